"""What waits long says what for; what does not wait long says nothing."""

import time

import pytest

from jaxtrain.distributed import waiting


def test_it_says_what_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SILENCE_S", 0.3)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.1)
    said: list[str] = []
    missing = [3]
    with waiting.announced(lambda: f"process {missing[-1]}", said.append):
        time.sleep(0.35)
        missing.append(7)
        time.sleep(0.4)
    assert said[0].startswith("waiting for process 3 (0 s so far)")
    assert said[-1].startswith("waiting for process 7 (")
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count


def test_a_short_wait_is_silent() -> None:
    said: list[str] = []
    with waiting.announced(lambda: "nothing", said.append):
        pass
    assert said == []
