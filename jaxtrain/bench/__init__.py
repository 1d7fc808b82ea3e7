"""What a config does on the devices at hand, measured: `jaxtrain bench`.

`worker.py` measures one config in a process of its own (so that a start is a real start, a peak of
memory is this config's own, and running out of memory ends only the measurement);
`cli/bench.py` starts workers and puts their findings together; `ceilings.py` measures what the
device itself can do.
"""
