"""XLA: GPU memory, compiler options, compiled programs, worker processes with own settings."""
