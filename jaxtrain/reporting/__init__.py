"""A run as one HTML page that needs nothing else: ``report.html``.

``run_files`` reads a run's directory, ``times`` and ``facts`` work out what it says, ``curves`` and
``samples`` what it shows; ``sections``, ``costs`` and ``settings`` put that into words, and
``page`` puts it into one file.
Nothing here imports jax: the page of a run can be made on any machine that can read its directory.
"""
