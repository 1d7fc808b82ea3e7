"""XLA: options and cache, reading compiled programs, worker processes with their own settings."""
