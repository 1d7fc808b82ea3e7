"""Measures a config on the available devices: `jaxtrain bench`.

`request.py` starts a separate process for each measurement, so that startup is measured from
scratch, peak memory belongs to this config, and running out of memory ends only the measurement.
`measurement.py` runs in it. `sweep.py` lists the points of a sweep, `ceilings.py` measures the
device's own peaks, and `report.py` formats the findings.
"""
