"""Training that goes on when a worker or a host is lost: copies of the state in vaults, and what to do with them.

`hwaware.patching.surviving` takes part in Alpa's calls, and leads the recovery. This room holds what it needs of its
own: vaults, the worker that copies its state into them, and the bookkeeping of points to which training can return.
"""
