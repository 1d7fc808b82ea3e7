"""Finds the text files of a dataset on the Hugging Face Hub, and fetches them into its cache.

``hf:NAME[@REVISION][:GLOB]`` names the files of the dataset's repository at a revision, as if they
were in a folder; the glob chooses some of them, or is a folder. It is required if several folders
have text that no name of a side explains: most likely, they are several datasets, or the same one
several times. The card is not read. ``@refs/convert/parquet`` is the Hub's own conversion.

The commit and its files are recorded in the cache: a dataset that changes on the Hub stays as it
was found first, until you pass another revision. The files are fetched when they are tokenized.
"""

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.config import invocation
from jaxtrain.data import splits
from jaxtrain.data.text import kinds
from jaxtrain.errors import InputError
from jaxtrain.storage import cache, hub_errors
from jaxtrain.terminal import Say

PREFIX = "hf:"
FILE = "hf://datasets/"
"""Begins the path of a file: hf://datasets/NAME@COMMIT/PATH."""
_CONVERTED = "refs/convert/parquet"
_PARTIAL = "partial-"  # folder of the first 5 GB of a split in the Hub's conversion
_SHOWN = 8  # folders in an error

About = tuple[str, str, int, str]
"""Path, name, size in bytes, and version of a file."""


def is_named(path: str) -> bool:
    """Returns whether the path names a Hugging Face dataset rather than files."""
    return path.startswith(PREFIX)


def find(path: str, flag: str, folder: Path, say: Say) -> list[About]:
    """Returns the files of a dataset, of any kind, without hidden ones.

    Args:
        folder: keeps which commits have been found.

    Raises:
        InputError: the dataset does not exist or cannot be accessed; no file matches or has text;
            several folders have text; or the Hub has converted only a part of what matches.
        RunAgain: the Hub cannot be reached now, or the cache's disk is full.
    """
    text = f"{flag} {path}"
    name, _, pattern = path.removeprefix(PREFIX).partition(":")
    name, _, revision = name.partition("@")
    if not name:
        raise InputError(f"{text}: write hf:NAME, hf:NAME@REVISION, or hf:NAME:GLOB")
    record = folder / f"{cache.digest('files', name, revision)[:20]}.json"
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        say(
            f"{text}: uses commit {kept['commit'][:12]}, as before; for another one, write "
            f"hf:{name}@REVISION"
        )
    except (OSError, ValueError, KeyError):
        kept = _looked_up(name, revision, text)
        cache.write_file(record, json.dumps(kept))
    files: dict[str, tuple[int, str]] = {file: about for file, *about in kept["files"]}
    reference = f"hf:{name}{'@' if revision else ''}{revision}"
    chosen = _chosen(list(files), pattern, reference, text)
    top = f"{FILE}{name}@{kept['commit']}/"
    return [(top + file, file, *files[file]) for file in chosen]


def fetched(path: str) -> str:
    """Returns the path on disk of a file in the Hub's cache, after fetching it if it is missing."""
    import huggingface_hub

    name, _, rest = path.removeprefix(FILE).partition("@")
    commit, _, file = rest.partition("/")
    try:
        return huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=commit)
    except Exception as error:  # from several libraries
        _fail(error, name, f"hf:{name}")


def _looked_up(name: str, revision: str, text: str) -> dict[str, Any]:
    """Asks the Hub for the commit, and the name, size and blob of each file that is not hidden."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        info = api.dataset_info(name, revision=revision or None)
        tree = api.list_repo_tree(name, recursive=True, revision=info.sha, repo_type="dataset")
        files = [
            (file.path, file.size, file.blob_id)
            for file in tree
            if isinstance(file, huggingface_hub.RepoFile)
        ]
    except Exception as error:  # from several libraries
        _fail(error, name, text)
    return {
        "commit": str(info.sha),
        "files": [about for about in sorted(files) if "/." not in f"/{about[0]}"],
    }


def _chosen(files: Sequence[str], pattern: str, reference: str, text: str) -> list[str]:
    """Returns the files that match a glob; without one, all.

    Args:
        pattern: the glob, or a folder; "" for neither.
        reference: the dataset and its revision, as ``--data.path`` takes them.
    """
    inside = pattern.rstrip("/")
    chosen = [
        file
        for file in files
        if not pattern or file.startswith(f"{inside}/") or _matches(file, pattern)
    ]
    if not chosen:
        raise InputError(
            f"{text}: no file of the dataset matches {pattern}; it has {_folders(files)}: write "
            f"{reference}:GLOB, in which ** matches several folders"
        )
    texts = [
        file
        for file in chosen
        if kinds.suffix(file) in kinds.SUFFIXES and not kinds.describes(file)
    ]
    if not texts:
        raise InputError(
            f"{text}: the dataset has no text there ({kinds.SUPPORTED}), only {_folders(chosen)}: "
            "convert it, or try the Hub's own conversion, "
            f"{reference.partition('@')[0]}@{_CONVERTED}"
        )
    partial = next((file for file in texts if f"/{_PARTIAL}" in f"/{file}"), None)
    if partial:
        raise InputError(
            f"{text}: the Hub has converted only the first part of a split to parquet ({partial}): "
            "choose others with a glob, or download the dataset and convert it"
        )
    if not pattern and len(folders := _datasets(texts)) > 1:
        raise InputError(
            f"{text}: several folders have text: {_folders(texts)}; choose with {reference}:GLOB, "
            f"such as {reference}:{folders[-1]}, or take all with {reference}:**"
        )
    return chosen


def _datasets(files: Sequence[str]) -> list[str]:
    """Returns the folders, below those that all files have in common, that say no side."""
    depth = splits.common_depth(files)
    folders = set[str]()
    for file in files:
        *above, _ = file.split("/")
        first = above[depth : depth + 1]
        says = first and splits.says_side(first[0])
        folders.add("/".join(above[:depth] if says else above[: depth + 1]))
    return sorted(folders)


def _folders(files: Sequence[str]) -> str:
    """Describes what there is: each folder, or file at the top, with the kinds of its files."""
    depth = splits.common_depth(files)
    counts: dict[str, Counter[str]] = {}
    for file in files:
        *above, last = file.split("/")
        folder = "/".join(above[: depth + 1])
        kind = kinds.suffix(last) or "without a suffix"
        counts.setdefault(f"{folder}/" if folder else "", Counter())[kind] += 1
    listed = [
        f"{folder}{' ' if folder else ''}({', '.join(f'{n:,} {kind}' for kind, n in of.items())})"
        for folder, of in sorted(counts.items())
    ]
    more = f", and {len(listed) - _SHOWN:,} more folders" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _matches(file: str, pattern: str) -> bool:
    """Returns whether a path matches a glob, in which only ``**`` matches several folders."""

    def fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
        if not patterns:
            return not names
        if patterns[0] == "**":
            return any(fits(names[skip:], patterns[1:]) for skip in range(len(names) + 1))
        return bool(
            names and fnmatch.fnmatchcase(names[0], patterns[0]) and fits(names[1:], patterns[1:])
        )

    return fits(file.split("/"), re.sub(r"\*\*(?!/|$)", "*", pattern.removeprefix("./")).split("/"))


def _fail(error: Exception, name: str, text: str) -> NoReturn:
    """Raises errors of the Hub and the network as one line, and any other error unchanged."""
    hub_errors.fail(
        error,
        text,
        kind="dataset",
        page=f"datasets/{name}",
        absent="no such dataset on the Hub; if it is private, run hf auth login",
        offline=f"on a connected machine, run {invocation.program()} prepare tokens with this "
        "run's --config and overrides, and copy its cache folder here ($JAXTRAIN_CACHE)",
    )
