"""Checks whether this machine, its cluster, and the data are ready for a config.

`examination.py` runs the checks in one process with a time limit: `hosts.py` (several processes),
`machine.py` (devices, packages, workers, disk), `collectives.py`, `data.py` (with the loader's
rate) and `checkpointing.py`. A check is a function of a `subject.py` that yields findings
(`finding.py`).
"""
