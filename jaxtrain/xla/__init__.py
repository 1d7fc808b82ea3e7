"""XLA in this process: compiler options, the target platform, GPU memory; worker processes."""
