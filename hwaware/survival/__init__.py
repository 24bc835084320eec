"""Training that goes on when a worker or a host is lost: copies of the state in vaults, and what to do with them.

`rescuer` takes part in Alpa's calls by the hook `hwaware.patching.rescue`. A `run` is one program: its `calls` are
noted, `copying` brings its state into `vaults`, and `recovering` places it again and gives the state back.
"""
