"""Predicts a run's memory, communication, time and cost without its GPUs.

`planner.py` starts a process in which `compilation.py` compiles the step for a card in `cards.py`:
`buffers.py` finds the largest temporaries, `work.py` counts operations, and `traffic.py` sums the
communication. `prediction.py` and `plan.py` derive the predictions, `fit.py` and `relief.py` search
for variants that need less memory, and `report.py` formats the plan.
"""
