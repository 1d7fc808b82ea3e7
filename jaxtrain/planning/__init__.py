"""Predicts memory, communication, time, input, and cost of a run without its GPUs.

`planner.py` starts a process in which `compilation.py` compiles the step for a card in `cards.py`:
`buffers.py` finds the largest temporaries, `flops.py` counts operations, and `communication.py`
sums what collectives send. `prediction.py` derives memory and the time of a step (from the card's
peaks and the fraction of them that steps reach, perhaps measured, `efficiency.py`), `input_rate.py`
(or `input_measurement.py`, on this machine) what hosts can load, `duration.py` the time of the run,
and `plan.py` puts them together. `fit.py` searches for variants that need less memory; `report.py`
formats the plan.
"""
