"""Atomic file writes, tensor files, locks, data URLs, and disk errors."""
