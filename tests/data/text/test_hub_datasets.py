"""Hugging Face datasets without a Hub; tests/interop/hub/datasets.py has one."""

import errno
import os
import socket
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors as refusals
import pytest

from jaxtrain.data.text import hub_datasets
from jaxtrain.errors import InputError, RunAgain


def test_dataset_names_are_distinguished_from_paths() -> None:
    assert hub_datasets.is_named("hf:imdb")
    assert not hub_datasets.is_named("texts/hf:imdb")


@pytest.mark.parametrize(
    ("file", "pattern", "wanted"),
    [
        ("data/train-00000.parquet", "data/train-*", True),
        ("data/train-00000.parquet", "./data/train-?????.parquet", True),
        ("data/en/train.parquet", "data/*", False),
        ("data/en/train.parquet", "data/**", True),
        ("train.parquet", "**/train.parquet", True),
        ("data/en/train.parquet", "data/**/train.parquet", True),
        ("data/en/train.parquet", "data/**train.parquet", False),
        ("data/train.parquet", "data/**train.parquet", True),
        ("data/train.parquet", "data/[st]*.parquet", True),
        ("data/train.parquet", "train.parquet", False),
        ("data/train.parquet", "", False),
    ],
)
def test_patterns_of_a_card_match_like_globs(file: str, pattern: str, wanted: bool) -> None:
    assert hub_datasets._matches(file, pattern) == wanted


@pytest.mark.parametrize("described", [None, 7, [None], [7], {"train": 7}, [{"split": []}], [[]]])
def test_a_card_of_another_form_names_no_file(described: Any) -> None:
    patterns = dict(hub_datasets._data_files(described))
    assert not any(
        hub_datasets._matches("a.txt", one) for of_split in patterns.values() for one in of_split
    )


def answer(status: int) -> Exception:
    """The Hub library's error for a status; its constructor needs an HTTP response."""
    error = refusals.HfHubHTTPError.__new__(refusals.HfHubHTTPError, "no")
    error.response = types.SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "no name"),
            InputError,
            "https://huggingface.co is an unknown host, .*; or on a connected machine",
        ),
        (answer(503), RunAgain, "https://huggingface.co cannot be reached"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RunAgain, "No space left on device"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
)
def test_only_network_errors_are_reported_as_such(
    error: Exception,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fails)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    for ask in (
        lambda: hub_datasets.find("hf:some/name", "--data.path", tmp_path, print),
        lambda: hub_datasets.fetched("hf://datasets/some/name@abc/data/a.txt"),
    ):
        with pytest.raises(kind, match=message) as raised:
            ask()
        assert ("cannot be reached" in message) == ("cannot be reached" in str(raised.value))


def test_only_data_is_chosen_without_a_card() -> None:
    data = ["a.jsonl", "b.jsonl.zst", "c.json.gz"]
    files = [*data, "README.txt", "LICENSE.txt", "requirements.txt", "README.md", "d.json"]
    assert hub_datasets._chosen(files, {}, "n", "", "train", "hf:n") == data


def test_an_unknown_split_is_not_that_of_the_files_without_one() -> None:
    files = ["data/train-0.parquet", "data/test-0.parquet", "data/more.parquet"]
    with pytest.raises(InputError, match="no split foo, only train, test"):
        hub_datasets._chosen(files, {}, "n", "", "foo", "hf:n::foo")
