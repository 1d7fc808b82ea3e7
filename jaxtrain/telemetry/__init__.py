"""Reports a run: one stream of events, and sinks that print or store them."""
