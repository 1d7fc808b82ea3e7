"""Tokenizes in threads, where no test is about processes: to start a process takes seconds."""

from pathlib import Path

import pytest
from data.text import small_text

from jaxtrain.data.text import shards
from jaxtrain.jobs import engines


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "Processes", lambda workers, say: engines.Threads(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small texts."""
    return small_text.write(tmp_path_factory.mktemp("text") / "in")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
