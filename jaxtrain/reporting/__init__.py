"""Writes a run's report, ``report.html``: one HTML page that needs no other file.

``run_files`` reads the run directory. ``times`` and ``facts`` compute the numbers, and ``curves``
prepares the charts. ``sections``, ``costs``, and ``samples`` turn them into HTML with ``markup``,
and ``page`` writes the file.
Nothing here imports jax, so any machine that can read the run directory can write the page.
"""
