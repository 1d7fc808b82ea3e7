"""A run: ``loop.py`` says when, ``step.py`` what, ``state.py`` on what, ``setup.py`` from which config."""
