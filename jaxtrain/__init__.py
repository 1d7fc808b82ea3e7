"""Train Flax models with one jitted, mesh-sharded step."""
