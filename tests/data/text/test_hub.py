"""Hugging Face datasets without their package; the rest is tests/interop/hf_datasets.py."""

import errno
import json
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.errors as refusals
import pytest

from jaxtrain.data.text import hub
from jaxtrain.errors import InputError, RunAgain


@pytest.mark.parametrize("spec", ["hf:some/name", "hf:."])
def test_a_missing_package_names_the_extra(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--data.path hf:.* pip install -e '\.\[hf\]'"):
        hub.fetch(spec, "--data.path", tmp_path, None, None, lambda line: None)


def test_names_are_told_from_paths() -> None:
    assert hub.is_named("hf:imdb")
    assert not hub.is_named("texts/hf:imdb")


class Rows:
    """A dataset of the hub as it streams: a row at a time, from any one on."""

    def __init__(self, count: int, breaks: Exception | None = None) -> None:
        self.at, self.count, self.breaks = 0, count, breaks

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self.at < self.count:
            self.at += 1
            yield {"text": f"Document {self.at}"}
        if self.breaks is not None:
            raise self.breaks

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the hub hold a dataset at a commit."""
    monkeypatch.setattr(hub, "_PART_DOCUMENTS", 10)

    def serve(rows: Rows, commit: str = "abc") -> None:
        monkeypatch.setattr(hub, "_opened", lambda named, revision: rows)
        monkeypatch.setattr(hub, "_revision", lambda named: named.revision or commit)

    return serve


def fetch(
    spec: str, root: Path, most: int | None, said: list[str] | None = None
) -> tuple[Path, int]:
    lines = [] if said is None else said
    return hub.fetch(spec, "--data.path", root, None, most, lines.append)


def test_what_was_fetched_stays_where_the_hub_has_a_newer_one(tmp_path: Path, serve: Any) -> None:
    """A run that goes on finds its data again, and asks nobody for it."""
    serve(Rows(35))
    first = fetch("hf:some/name", tmp_path, 15)
    assert first[1] == 2
    serve(Rows(35), "def")
    said: list[str] = []
    assert fetch("hf:some/name", tmp_path, 15, said) == first
    assert said == [
        "--data.path hf:some/name: takes what was fetched before, revision abc in "
        f"{first[0]}; name another one as hf:some/name@REVISION"
    ]
    more = fetch("hf:some/name", tmp_path, None)  # it does not hold all
    assert (more[0] != first[0], more[1]) == (True, 4)
    serve(Rows(35))
    other = fetch("hf:some/name@ghi", tmp_path, 15)
    assert other[0] not in (first[0], more[0])
    assert json.loads((other[0] / "progress.json").read_text())["revision"] == "ghi"
    assert "some_name_ghi" in other[0].name


def answer(status: int) -> Exception:
    """What the hub's library makes of an answer; its constructor takes its HTTP library's."""
    error = refusals.HfHubHTTPError.__new__(refusals.HfHubHTTPError, "no")
    error.response = types.SimpleNamespace(status_code=status)
    return error


def of_library(name: str) -> Exception:
    """An error of an HTTP library, which need not derive from any of Python's."""
    return type("ConnectError", (Exception,), {"__module__": name})("refused")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (of_library("httpx2"), RunAgain, "the hub cannot be reached"),
        (of_library("aiohttp.client_exceptions"), RunAgain, "the hub cannot be reached"),
        (TimeoutError("slow"), RunAgain, "the hub cannot be reached"),
        (socket.gaierror(-3, "no name"), RunAgain, "the hub cannot be reached"),
        (ConnectionError("offline"), RunAgain, "the hub cannot be reached"),
        (answer(503), RunAgain, "the hub cannot be reached"),
        (answer(403), InputError, "the hub refuses it"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RunAgain, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), InputError, "x fails"),
        (ValueError("bad column"), InputError, "bad column"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
)
def test_only_the_network_is_blamed_on_the_network(
    error: Exception, kind: type[Exception], message: str, tmp_path: Path, serve: Any
) -> None:
    serve(Rows(15, error))
    with pytest.raises(kind, match=message) as raised:
        fetch("hf:some/name", tmp_path, None)
    assert ("cannot be reached" in message) == ("cannot be reached" in str(raised.value))
    serve(rows := Rows(15))
    rows.at = 15
    assert fetch("hf:some/name", tmp_path, None)[1] == 2  # goes on behind the first part


def test_a_full_disk_is_said_to_be_full(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(Rows(15))

    def full(path: Path, texts: list[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "_write_part", full)
    with pytest.raises(RunAgain, match=r"cannot write .*part-000000.parquet \(No space left"):
        fetch("hf:some/name", tmp_path, None)
