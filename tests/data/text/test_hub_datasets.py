"""Hugging Face datasets without the package; tests/interop/hf_datasets.py uses the real one."""

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

from jaxtrain.data.text import hub_datasets
from jaxtrain.errors import InputError, RunAgain


@pytest.mark.parametrize("spec", ["hf:some/name", "hf:."])
def test_the_message_about_a_missing_package_gives_the_extra(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--data.path hf:.* -m pip install -e '.*\[hf\]'"):
        hub_datasets.fetch(spec, "--data.path", tmp_path, None, None, lambda line: None)


def test_dataset_names_are_distinguished_from_paths() -> None:
    assert hub_datasets.is_named("hf:imdb")
    assert not hub_datasets.is_named("texts/hf:imdb")


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("hf://datasets/org/name@abc/data/train.parquet", True),
        ("hf://datasets/squad@abc/train.json", True),
        ("hf://datasets/org/name@other/train.json", False),
        ("hf://datasets/org/name@abc/../../mine/private@abc/a.json", False),
        ("/home/me/key.txt", False),
        ("https://example.com/a.json", False),
        ("zip://a.json::/home/me/a.zip", False),
        ("zip://hf://datasets/org/name@abc/a.json::/home/me/a.zip", False),
    ],
)
def test_a_dataset_on_the_hub_has_only_files_of_its_commit(file: str, own: bool) -> None:
    if own:
        hub_datasets.check_own("hf:org/name", [file], None, "abc")
        return
    with pytest.raises(InputError, match="which is not one of its own files: pass another"):
        hub_datasets.check_own("hf:org/name", [file], None, "abc")


class Rows:
    """A streamed dataset of the Hub: one row at a time, starting at any row."""

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
    """Simulates a dataset on the Hub at a commit."""
    monkeypatch.setattr(hub_datasets, "_PART_DOCUMENTS", 10)

    def serve(rows: Rows, commit: str = "abc") -> None:
        monkeypatch.setattr(hub_datasets, "_opened", lambda named, revision: rows)
        monkeypatch.setattr(hub_datasets, "_revision", lambda named, say: named.revision or commit)

    return serve


def fetch(
    spec: str, root: Path, most: int | None, said: list[str] | None = None
) -> tuple[Path, int]:
    lines = [] if said is None else said
    return hub_datasets.fetch(spec, "--data.path", root, None, most, lines.append)


def test_a_fetched_dataset_is_used_although_the_hub_has_a_newer_one(
    tmp_path: Path, serve: Any
) -> None:
    """A resumed run finds its data again, without asking the Hub."""
    serve(Rows(35))
    first = fetch("hf:some/name", tmp_path, 15)
    assert first[1] == 2
    serve(Rows(35), "def")
    said: list[str] = []
    assert fetch("hf:some/name", tmp_path, 15, said) == first
    assert said == [
        "--data.path hf:some/name: uses revision abc, already fetched to "
        f"{first[0]}; for another one, write hf:some/name@REVISION"
    ]
    more = fetch("hf:some/name", tmp_path, None)  # the first does not have all of them
    assert (more[0] != first[0], more[1]) == (True, 4)
    serve(Rows(35))
    other = fetch("hf:some/name@ghi", tmp_path, 15)
    assert other[0] not in (first[0], more[0])
    assert json.loads((other[0] / "progress.json").read_text())["revision"] == "ghi"
    assert "some_name_ghi" in other[0].name


def answer(status: int) -> Exception:
    """The Hub library's error for a status; its constructor needs an HTTP response."""
    error = refusals.HfHubHTTPError.__new__(refusals.HfHubHTTPError, "no")
    error.response = types.SimpleNamespace(status_code=status)
    return error


def of_library(name: str) -> Exception:
    """An HTTP library's error, which need not derive from any of Python's."""
    return type("ConnectError", (Exception,), {"__module__": name})("refused")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (of_library("httpx2"), RunAgain, "https://huggingface.co cannot be reached"),
        (
            of_library("aiohttp.client_exceptions"),
            RunAgain,
            "https://huggingface.co cannot be reached",
        ),
        (TimeoutError("slow"), RunAgain, "https://huggingface.co cannot be reached"),
        (
            socket.gaierror(socket.EAI_NONAME, "no name"),
            InputError,
            "https://huggingface.co is an unknown host, .*; or on a connected machine",
        ),
        (
            socket.gaierror(socket.EAI_AGAIN, "no name"),
            RunAgain,
            "https://huggingface.co cannot be reached",
        ),
        (ConnectionError("offline"), RunAgain, "https://huggingface.co cannot be reached"),
        (answer(503), RunAgain, "https://huggingface.co cannot be reached"),
        (answer(403), InputError, "the Hub refuses the request"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RunAgain, "No space left on device"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            InputError,
            "cannot read or write x",
        ),
        (ValueError("bad column"), InputError, "bad column"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
)
def test_only_network_errors_are_reported_as_such(
    error: Exception, kind: type[Exception], message: str, tmp_path: Path, serve: Any
) -> None:
    serve(Rows(15, error))
    with pytest.raises(kind, match=message) as raised:
        fetch("hf:some/name", tmp_path, None)
    assert ("cannot be reached" in message) == ("cannot be reached" in str(raised.value))
    serve(rows := Rows(15))
    rows.at = 15
    assert fetch("hf:some/name", tmp_path, None)[1] == 2  # resumes after the first part


def test_a_full_disk_is_reported(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(Rows(15))

    def full(path: Path, texts: list[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_datasets, "_write_part", full)
    with pytest.raises(RunAgain, match=r"cannot write .*part-000000.parquet \(No space left"):
        fetch("hf:some/name", tmp_path, None)
