"""Data sets, and the pipeline that turns them into batches on devices."""
