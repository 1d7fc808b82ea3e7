"""Work in other processes: a resumable map with one record of what is complete; single functions.

`resumable.py` makes things once, with `engines.py` (processes, or Ray); `subprocess_worker.py` runs
one function in a process of its own. The record is :mod:`jaxtrain.storage.record`.
"""
