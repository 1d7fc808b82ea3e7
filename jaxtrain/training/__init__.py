"""The core of a run: ``loop.py`` says when, ``step.py`` what, ``state.py`` on what."""
