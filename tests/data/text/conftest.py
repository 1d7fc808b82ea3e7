"""Tokenizes in threads, where no test is about processes: to start a process takes seconds."""

import pytest

from jaxtrain.data import engines
from jaxtrain.data.text import shards


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "Processes", lambda workers: engines.Threads(1))
