"""Is this machine, this cluster and this data fit for a config?

`examination.py` starts `worker.py` and gives each group of checks its time; a group that hangs or
crashes is a finding, and the next ones go on in a new process. The groups: `hosts.py` (several
processes), `devices.py` with `packages.py`, `system.py`, `collective.py`, `loader.py`,
`checkpointing.py`. Checks are functions of a `subject.py` that give findings (`finding.py`).
"""
