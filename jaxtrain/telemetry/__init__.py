"""What a run tells of itself: console, log, metrics, TensorBoard, timeline, the hardware's state."""
