"""Writes a run's report, ``report.html``: one HTML page that needs no other file.

``run_files`` reads the run directory. ``times`` and ``facts`` compute the numbers, ``curves`` and
``samples`` prepare the charts, images, and texts. ``sections``, ``costs``, ``settings``, and
``commands`` turn them into HTML with ``markup`` and ``formats``, and ``page`` writes the file.
Nothing here imports jax, so any machine that can read the run directory can write the page.
"""
