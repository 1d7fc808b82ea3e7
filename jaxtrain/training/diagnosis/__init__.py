"""What finds out why a run, or a model of your own, is wrong, slow, or out of memory."""
