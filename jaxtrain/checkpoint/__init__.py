"""Saves, verifies, restores, retains, and finds checkpoints. Only this package uses Orbax."""
