"""A worker that measures."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxtrain.bench import request


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
    found = request.findings("demo", (), compiled="", measurements=(), timeout_s=7.0)
    assert found["notes"] == {"worker": "took longer than 7 s"}
    assert found["failed"] == ["worker"]
