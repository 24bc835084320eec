"""On the PYTHONPATH of a testbed's hosts: Python imports `sitecustomize` from here when it starts."""
