"""Let training go on when a worker or a host is lost.

`rescuer` takes part in Alpa's calls by the hook `hwaware.patching.rescue`. A `run` is one program, and notes
its `calls`. `copying` brings its state into `vaults`. `recovering` places it again and gives the state back.
"""
