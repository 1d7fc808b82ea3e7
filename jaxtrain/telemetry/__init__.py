"""What a run reports: one stream of events (``events.py``), its sinks, and the hardware's state."""
