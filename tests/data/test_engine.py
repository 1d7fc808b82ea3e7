"""Engines run a function over items; commands that share a folder divide the work."""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from jaxtrain.data import engine
from jaxtrain.errors import InputError


def square(number: int, plus: int) -> int:
    """The square; the process of item 3 is killed, also when it is retried."""
    if number == 3:
        os._exit(9)
    return number * number + plus


def wait_and_fail(number: int, folder: Path) -> int:
    """Raises an error for item 1, once item 0 is at work."""
    if number == 0:
        (folder / "started").touch()
    while not (folder / "started").exists():
        time.sleep(0.01)
    if number == 1:
        raise InputError("item 1 is wrong")
    return number


def test_an_item_that_kills_its_worker_costs_only_itself() -> None:
    found = dict(engine.Local(2).as_finished(square, range(6), 7, died=lambda number: -number))
    assert found == {0: 7, 1: 8, 2: 11, 3: -3, 4: 23, 5: 32}


def test_items_are_read_only_as_fast_as_they_are_processed() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count(10):
            read.append(number)
            yield number

    running = engine.Local(1).as_finished(square, items(), 0, died=int)
    assert [next(running) for _ in range(3)] == [(n, n * n) for n in (10, 11, 12)]
    assert len(read) <= 4
    running.close()  # type: ignore[attr-defined]


def test_an_error_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="item 1 is wrong"):
        list(engine.Local(2).as_finished(wait_and_fail, range(9), tmp_path, died=int))


def test_ray_is_imported_only_if_chosen() -> None:
    assert "ray" not in sys.modules
    with (
        mock.patch.dict(sys.modules, {"ray": None}),
        pytest.raises(InputError, match=r"--engine ray requires Ray: .*pip install .*ray"),
    ):
        list(engine.Ray("auto").as_finished(square, range(2), 0, died=int))


class _MemoryError(Exception):
    """Ray's OutOfMemoryError."""


def _get(reference: int) -> tuple[int, None]:
    if reference == 2:
        raise _MemoryError
    return reference, None


def test_a_task_that_ray_kills_for_lack_of_memory_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_task_oom_retries", raising=False)
    ray = mock.MagicMock()  # real_ray.py has the real one
    ray.exceptions.RayError = Exception
    ray.exceptions.WorkerCrashedError = KeyError
    ray.exceptions.OutOfMemoryError = _MemoryError
    ray.remote.return_value.return_value.remote = lambda item, shared: item
    ray.wait = lambda references, **limits: (references, [])
    ray.get = _get
    with mock.patch.dict(sys.modules, {"ray": ray}):
        found = dict(
            engine.Ray("auto", 2).as_finished(square, range(4), 0, died=lambda item: -item)
        )
    assert found == {0: 0, 1: 1, 2: -2, 3: 3}
    assert os.environ.pop("RAY_task_oom_retries") == "10"  # else Ray repeats it forever


def test_a_task_rejects_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_fetched", lambda reference: reference)
    assert engine._in_task(5, [(square, (1,), engine._stamp())]) == (26, None)
    result, error = engine._in_task(5, [(square, (1,), "av 0.1")])
    assert result is None
    assert "but this command has av 0.1: install the same versions" in str(error)
