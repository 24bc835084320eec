"""Hold `sitecustomize`, which Python imports when it starts: this folder is on a testbed host's PYTHONPATH."""
