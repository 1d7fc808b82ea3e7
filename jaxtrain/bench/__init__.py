"""Measures a config on the available devices: `jaxtrain bench`.

`request.py` lists what to measure, and starts a separate process for each measurement, so that
startup is measured from scratch, peak memory belongs to this config, and running out of memory ends
only the measurement. `measurement.py` runs in it. `peaks.py` measures the device's own peaks,
and `report.py` formats the findings.
"""
