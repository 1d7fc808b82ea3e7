"""What finds out why a run is wrong, slow, or out of memory."""
