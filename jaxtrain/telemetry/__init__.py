"""What a run reports: one stream of events, the sinks that keep it, and the hardware's state."""
