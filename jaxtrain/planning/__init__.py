"""Predicts memory, communication, time, input, and cost of a run without its GPUs.

`planner.py` starts a process in which `compilation.py` compiles the step for a card
(`xla/cards.py`) and reads its cost (`xla/step_cost.py`). `xla/step_time.py` derives the time of a
step (from its serial bound and the fraction of it that steps reach, perhaps measured,
`efficiency.py`); `prediction.py` memory, and the time and cost of the run; `data/input_rate.py`
what hosts can load, perhaps measured on this machine.
`fit.py` searches for variants that need less memory; `report.py` formats the plan.
"""
