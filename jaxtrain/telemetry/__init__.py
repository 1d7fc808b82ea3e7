"""What a run reports: console, log, metrics, TensorBoard, timeline, hardware."""
