"""Predicts memory, communication, time, input, and cost of a run without its GPUs.

`planner.py` starts a process in which `compilation.py` compiles the step for a card. What a step
costs and how long it takes follow in `cost/`; `prediction.py` adds memory, and the time and cost of
the run; `data/input_rate.py` what hosts can load, perhaps measured on this machine. `fit.py`
searches for variants that need less memory; `report.py` formats the plan.
"""
