"""Tests the points of a sweep, and tables with points that ran out of memory."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.bench import report, request

RUN = config.named("h100_16")  # 128 = 8 x 16


def test_batches_double_from_a_quarter() -> None:
    found = request.batch_sizes(RUN)
    assert list(found) == ["2", "4", "8", "16", "32", "64"]
    assert found["4"] == ("--data.batch_size", "64")
    small = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, batch_size=16))
    assert list(request.batch_sizes(small)) == ["1", "2", "4", "8"]


def test_every_point_is_a_valid_config() -> None:
    for overrides in request.batch_sizes(RUN).values():
        config.load("h100_16", overrides)


def test_a_point_that_runs_out_of_memory_appears_in_the_table() -> None:
    rows = {"synthetic/examples_per_second": 20.0, "memory/compiled_gib": 3.0}
    assert report.sweep_point({"rows": rows}) == (20.0, 3.0)
    assert report.sweep_point({"rows": rows | {"memory/device_peak_gib": 4.0}}) == (20.0, 4.0)
    ended = {"rows": {}, "notes": {"worker": "out of memory"}, "failed": ["worker"]}
    assert report.sweep_point(ended) == ("out of memory", "out of memory")
    failed: dict[str, Any] = {"failure": "out of memory", "detail": ""}
    _, eight, last = report.sweep({"8": {"rows": rows}, "16": failed}).splitlines()
    assert eight.split() == ["8", "20", "3"]
    assert last.split() == ["16", "out", "of", "memory"]


def test_a_worker_that_ends_early_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Worker":
            return self

        def __exit__(self, *_: object) -> None: ...
        def messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
            yield {"rows": {"start/total": 3.0}, "notes": {}, "failed": []}
            raise TimeoutError

    monkeypatch.setattr(request, "SubprocessWorker", Worker)
    found = request.findings("demo", (), compiled="", parts=(), timeout_s=7.0)
    assert found["notes"] == {"worker": "took longer than 7 s"}
    assert found["failed"] == ["worker"]
