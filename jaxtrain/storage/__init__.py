"""Atomic file writes, tensor files, locks, data addresses, and disk errors."""
