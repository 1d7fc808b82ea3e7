"""XLA in this process: compiler options, the target platform, and GPU memory."""
