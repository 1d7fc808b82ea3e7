"""Hugging Face datasets without a Hub; tests/interop/hub/datasets.py has one."""

import errno
import os
import re
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
def test_globs_match_paths(file: str, pattern: str, wanted: bool) -> None:
    assert hub_datasets._matches(file, pattern) == wanted


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


WIKITEXT = [
    f"wikitext-{size}-v1/{side}-00000-of-00001.parquet"
    for size in ("103", "103-raw", "2", "2-raw")
    for side in ("test", "train", "validation")
]
C4 = [
    *(f"en/c4-train.{n:05d}-of-01024.json.gz" for n in range(3)),
    "en/c4-validation.00000-of-00008.json.gz",
    "realnewslike/c4-train.00000-of-00512.json.gz",
]
PILE = ["train/00.jsonl.zst", "train/01.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"]
ABOUT = ["README.md", "LICENSE.txt", "requirements.txt"]


@pytest.mark.parametrize(
    ("files", "pattern", "chosen"),
    [
        (PILE, "", PILE),
        ([*ABOUT, *PILE], "", [*ABOUT, *PILE]),  # skipped with a line, as in a folder
        (["data/train-0.parquet", "data/test-0.parquet", "load.py"], "", None),
        (["a.jsonl", "b.jsonl.zst", "c.json.gz", "d.json"], "", None),
        (["data/train/a.txt", "data/dev/b.txt", "data/test1/c.txt"], "", None),
        (WIKITEXT, "wikitext-2-raw-v1", WIKITEXT[9:]),
        (WIKITEXT, "wikitext-2-raw-v1/", WIKITEXT[9:]),
        (WIKITEXT, "wikitext-2-raw-v1/*validation*", WIKITEXT[11:]),
        (WIKITEXT, "**", None),
        (C4, "en/*", C4[:4]),
        ([*ABOUT, *C4], "en", C4[:4]),
        (["partial-train/0.parquet", "test/0.parquet"], "test", ["test/0.parquet"]),
    ],
)
def test_files_are_chosen_by_a_glob_or_a_folder(
    files: list[str], pattern: str, chosen: list[str] | None
) -> None:
    chosen = files if chosen is None else chosen
    assert hub_datasets._chosen(files, pattern, "hf:n", "--data.path hf:n") == chosen


@pytest.mark.parametrize(
    ("files", "pattern", "message"),
    [
        (
            WIKITEXT,
            "",
            "several folders have text: wikitext-103-raw-v1/ (3 .parquet), wikitext-103-v1/ (3 "
            ".parquet), wikitext-2-raw-v1/ (3 .parquet), wikitext-2-v1/ (3 .parquet); choose with "
            "hf:n:GLOB, such as hf:n:wikitext-2-v1, or take all with hf:n:**",
        ),
        (["vocab.txt", "data/a.parquet"], "", "text: (1 .txt), data/ (1 .parquet); choose with"),
        (["data/de/a.txt", "data/en/a.txt"], "", "such as hf:n:data/en, or"),
        (
            ["README.md", *C4],
            "fr",
            "no file of the dataset matches fr; it has (1 .md), en/ (4 .json.gz), realnewslike/ (1 "
            ".json.gz): write hf:n:GLOB",
        ),
        (C4, ":train", "matches :train; it has en/ (4 .json.gz), "),
        (
            ["README.md", "data/a.csv", "data/b.csv", "load.py"],
            "",
            "only (1 .md, 1 .py), data/ (2 .csv): convert it, or try the Hub's own conversion, "
            "hf:n@refs/convert/parquet",
        ),
        ([f"{n}/a.csv" for n in range(10)], "", "7/ (1 .csv), and 2 more folders: convert"),
        (["default/partial-train/0.parquet"], "", "only the first part of a split to parquet"),
    ],
)
def test_what_does_not_say_which_files_is_refused_with_what_there_is(
    files: list[str], pattern: str, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        hub_datasets._chosen(files, pattern, "hf:n", "--data.path hf:n")
