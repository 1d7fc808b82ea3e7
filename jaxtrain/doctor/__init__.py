"""Checks whether this machine, its cluster, and the data are ready for a config.

`examination.py` starts `worker.py` and limits the time of each group of checks; a group that hangs
or crashes is a finding, and the remaining groups run in a new process. The groups: `hosts.py`
(several processes), `devices.py` with `packages.py`, `system.py`, `collective.py`, `loader.py`,
`checkpointing.py`. Checks are functions of a `subject.py` that yield findings (`finding.py`).
"""
