"""What a config does on the devices at hand, measured: `jaxtrain bench`.

`measurement.py` measures one config, in a process of its own (so that a start is a real start, a
peak of memory is this config's own, and running out of memory ends only the measurement), which
`request.py` starts; `cli/bench.py` puts the findings together; `ceilings.py` measures what the
device itself can do.
"""
