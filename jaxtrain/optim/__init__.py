"""Builds optax optimizers from configs: schedules, AdamW, Muon, averages of the parameters."""
