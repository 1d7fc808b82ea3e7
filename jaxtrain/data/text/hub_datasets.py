"""Finds the text files of a dataset on the Hugging Face Hub, and fetches them into its cache.

``hf:NAME[@REVISION][:CONFIG[:SPLIT]]`` names the dataset's own ``.parquet``, ``.jsonl``, or
``.txt`` files at a revision. Its card says which belong to a configuration and a split; without
that, their names do. Only a dataset without such files is read from the Hub's conversion to parquet
(``refs/convert/parquet``), which holds the first 5 GB of a large split.

The commit and its files are recorded in the cache: a dataset that changes on the Hub stays as it
was found first, until you pass another revision. The files are fetched when they are tokenized.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.config import invocation
from jaxtrain.data import cache, hub_errors, splits
from jaxtrain.data.text import kinds
from jaxtrain.errors import InputError
from jaxtrain.terminal import Say

PREFIX = "hf:"
FILE = "hf://datasets/"
"""Begins the path of a file: hf://datasets/NAME@COMMIT/PATH."""
_CONVERTED = "refs/convert/parquet"
_SUFFIXES = tuple(kind for kind in kinds.SUFFIXES if kind != ".md")
_WORDS = {"train": "train", "validation": "val", "test": "test"}  # the Hub's splits, and ours

About = tuple[str, str, int, str]
"""Path, name, size in bytes, and version of a file."""


def is_named(path: str) -> bool:
    """Returns whether the path names a Hugging Face dataset rather than files."""
    return path.startswith(PREFIX)


def find(path: str, flag: str, folder: Path, say: Say) -> list[About]:
    """Returns the files of a split.

    Args:
        path: ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``.
        flag: the flag that gave the path, for messages.
        folder: keeps which commits have been found.
        say: prints a line on the console.

    Raises:
        InputError: there is no such dataset, configuration, or split, no access to it, or only a
            part of the split is parquet.
        RunAgain: the Hub cannot be reached now, or the cache's disk is full.
    """
    text = f"{flag} {path}"
    name, config, split, *more = [*path.removeprefix(PREFIX).split(":"), "", ""]
    if not name or any(more):
        raise InputError(f"{text}: write hf:NAME, hf:NAME:CONFIG, or hf:NAME:CONFIG:SPLIT")
    name, _, revision = name.partition("@")
    record = folder / f"{cache.digest(name, revision, config, split)[:20]}.json"
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        say(
            f"{text}: uses commit {kept['commit'][:12]}, as before; for another one, write "
            f"hf:{name}@REVISION"
        )
    except (OSError, ValueError, KeyError):
        kept = _looked_up(name, revision, config, split or "train", text)
        cache.write_file(record, json.dumps(kept))
    top = f"{FILE}{name}@{kept['commit']}/"
    return [(top + file, file, size, version) for file, size, version in kept["files"]]


def fetched(path: str) -> str:
    """Returns the path on disk of a file in the Hub's cache, after fetching it if it is missing.

    Args:
        path: see :data:`FILE`.

    Raises:
        InputError, RunAgain: see :func:`find`.
    """
    import huggingface_hub

    name, _, rest = path.removeprefix(FILE).partition("@")
    commit, _, file = rest.partition("/")
    try:
        return huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=commit)
    except Exception as error:  # from several libraries
        _fail(error, name, f"hf:{name}")


def _looked_up(name: str, revision: str, config: str, split: str, text: str) -> dict[str, Any]:
    """Asks the Hub for the commit and the files of a split."""
    commit, sizes, card = _repository(name, revision, text)
    chosen = _chosen(sizes, card, name, config, split, text)
    if not chosen:
        commit, sizes, _ = _repository(name, _CONVERTED, text, converted=True)
        chosen = _converted(sizes, name, config, split, text)
    return {"commit": commit, "files": [(file, *sizes[file]) for file in sorted(chosen)]}


def _repository(
    name: str, revision: str, text: str, *, converted: bool = False
) -> tuple[str, dict[str, tuple[int, str]], Mapping[str, Any]]:
    """Returns the commit, the size and blob of each file, and the card's metadata."""
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    api = huggingface_hub.HfApi()
    try:
        info = api.dataset_info(name, revision=revision or None)
        tree = api.list_repo_tree(name, recursive=True, revision=info.sha, repo_type="dataset")
        sizes = {
            file.path: (file.size, file.blob_id)
            for file in tree
            if isinstance(file, huggingface_hub.RepoFile)
        }
    except Exception as error:  # from several libraries
        if converted and isinstance(error, RevisionNotFoundError):
            raise InputError(
                f"{text}: the dataset has no .parquet, .jsonl, .txt files, and the Hub has not "
                "converted it to parquet: download it and convert it to one of these"
            ) from error
        _fail(error, name, text)
    return str(info.sha), sizes, info.card_data.to_dict() if info.card_data else {}


def _chosen(
    files: Iterable[str],
    card: Mapping[str, Any],
    name: str,
    config: str,
    split: str,
    text: str,
) -> list[str]:
    """Returns the dataset's own text files of a split; none if it has other files."""
    visible = [file for file in files if not any(p.startswith(".") for p in file.split("/"))]
    described = [entry for entry in card.get("configs") or [] if isinstance(entry, dict)]
    listed = {str(entry.get("config_name")): entry for entry in described if "data_files" in entry}
    texts = [
        file for file in visible if kinds.suffix(file) in _SUFFIXES and not kinds.describes(file)
    ]
    if listed:
        first = next((key for key, entry in listed.items() if entry.get("default")), "default")
        key = config or (first if first in listed else "")
        if not key and len(listed) == 1:
            key = next(iter(listed))
        if key not in listed:
            problem = f"no configuration {config}" if config else "several configurations"
            raise InputError(
                f"{text}: {problem}: write hf:{name}:CONFIG, with one of {splits.listed([*listed])}"
            )
        patterns = dict(_data_files(listed[key]["data_files"]))
        folder = str(listed[key].get("data_dir") or "").strip("/")
        if split not in patterns:
            raise InputError(
                f"{text}: no split {split}, only {splits.listed([*patterns])}: write "
                f"hf:{name}:{config}:SPLIT"
            )
        wanted = [f"{folder}/{pattern}".strip("/") for pattern in patterns[split]]
        return [file for file in texts if any(_matches(file, pattern) for pattern in wanted)]
    if config:
        texts = [file for file in texts if file.startswith(f"{config}/")]
    if not texts:
        return []
    sides = splits.by_name(texts) or ["train"] * len(texts)
    wanted_side = _WORDS.get(split, split)  # of another split, no file
    chosen = [file for file, side in zip(texts, sides, strict=True) if side == wanted_side]
    if not chosen:
        has = [word for word, side in _WORDS.items() if side in sides]
        raise InputError(
            f"{text}: no split {split}, only {', '.join(has)}: write hf:{name}:{config}:SPLIT"
        )
    return chosen


def _data_files(described: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields each split and its patterns: a card has one pattern, several, or those of splits."""
    if isinstance(described, dict):
        described = [{"split": split, "path": path} for split, path in described.items()]
    described = described if isinstance(described, list) else [described]
    if all(isinstance(entry, str) for entry in described):
        yield "train", described
    for entry in described:
        if isinstance(entry, dict):
            path = entry.get("path")
            yield (
                str(entry.get("split")),
                list(map(str, path if isinstance(path, list) else [path])),
            )


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


def _converted(
    sizes: Mapping[str, tuple[int, str]], name: str, config: str, split: str, text: str
) -> list[str]:
    """Returns the files of a split that the Hub has converted completely."""
    configs = sorted({file.partition("/")[0] for file in sizes if file.endswith(".parquet")})
    if not config:
        if len(configs) > 1 and "default" not in configs:
            raise InputError(
                f"{text}: several configurations: write hf:{name}:CONFIG, with one of "
                f"{splits.listed(configs)}"
            )
        config = "default" if "default" in configs else configs[0] if configs else ""
    of_config = [
        file for file in sizes if re.fullmatch(rf"{re.escape(config)}/[^/]+/.*\.parquet", file)
    ]
    chosen = [file for file in of_config if file.split("/")[1] == split]
    part = [file for file in of_config if file.split("/")[1] == f"partial-{split}"]
    if part:
        raise InputError(
            f"{text}: the dataset has no .parquet, .jsonl, .txt files, and the Hub has converted "
            f"only the first {sum(sizes[file][0] for file in part) / 1e9:,.1f} GB of the split "
            f"{split} to parquet ({len(part):,} files in partial-{split}): download the dataset "
            "and convert it"
        )
    if not chosen:
        has = sorted({file.split("/")[1] for file in of_config})
        raise InputError(
            f"{text}: no split {split}"
            + (f", only {', '.join(has)}" if has else f"; configurations: {', '.join(configs)}")
            + f": write hf:{name}:CONFIG:SPLIT"
        )
    return chosen


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
