"""What a run needs, found out without the GPUs that it needs.

`planner.py` starts a process in which `compilation.py` compiles the step for one of `cards.py`:
`buffers.py` finds the largest temporaries, `work.py` counts operations, `traffic.py` sums what is
sent. `prediction.py` and `plan.py` draw the conclusions, `fit.py` looks for ways to need less, and
`report.py` writes it down.
"""
