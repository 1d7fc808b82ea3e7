"""What a step costs: FLOPs, the operations of its program, the rates of cards, and its time.

`flops.py` counts the operations of a traced step, `hlo.py` and `operations.py` read the compiled
program, and `step_cost.py` sums up both. `step_time.py` divides it by the rates of a card
(`cards.py`) and by the fraction of them that steps reach, perhaps measured (`efficiency.py`).
"""
