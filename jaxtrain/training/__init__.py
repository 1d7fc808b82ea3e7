"""The core of a run: the loop (``loop.py``), the step (``step.py``), the state (``state.py``)."""
