"""From a config to an optax optimizer: schedules, AdamW, Muon, averages of the parameters."""
