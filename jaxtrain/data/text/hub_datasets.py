"""Fetches Hugging Face datasets into the cache, once, part by part, in bounded memory.

``hf:NAME[@REVISION][:CONFIG[:SPLIT]]`` names a dataset on the Hub, or a folder: one written by
``save_to_disk``, or one with the files of a dataset (.parquet, .jsonl) in the Hub's layout. A
folder needs no network.

The text column is written to ``<cache>/hf/<dataset>/part-<number>.parquet``, 10,000 documents each,
and is then read like any other files. Another vocabulary or sequence length does not fetch it
again, and a dataset that has changed on the Hub stays as it was fetched until you pass another
revision. Parts are written atomically; after a kill, fetching resumes after the last complete part.
"""

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain import versions
from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.data.text import documents
from jaxtrain.errors import InputError, RunAgain, shown
from jaxtrain.storage import hub_errors, listing, lock
from jaxtrain.storage.atomic import appearing, expanded
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.telemetry import progress_bar
from jaxtrain.telemetry.progress_bar import Say

FIELD = "text"  # the parts' only column
PARTS = "part-*.parquet"
PREFIX = "hf:"
_PART_DOCUMENTS = 10_000
_PROGRESS = "progress.json"


def is_named(path: str) -> bool:
    """Returns whether the path names a Hugging Face dataset rather than files."""
    return path.startswith(PREFIX)


@dataclasses.dataclass(frozen=True)
class _Named:
    """A parsed ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``.

    Attributes:
        name: name of a dataset, or a folder.
        revision: a commit, branch or tag on the Hub; "" is the newest commit.
        config: a configuration of the dataset; "" is its default.
        split: a split of the dataset; "" is train.
        flag: the flag and its value, for messages.
    """

    name: str
    revision: str
    config: str
    split: str
    flag: str

    @property
    def folder(self) -> Path | None:
        """The folder with this name; None if there is none."""
        path = expanded(self.name)
        return path.absolute() if os.path.isdir(path) else None


def fetch(
    path: str, flag: str, root: Path, text_field: str | None, most: int | None, say: Say
) -> tuple[Path, int]:
    """Fetches the missing parts of a dataset's text into the cache.

    Args:
        path: ``hf:NAME[@REVISION][:CONFIG[:SPLIT]]``.
        flag: the flag that gave the path, for messages.
        root: folder of fetched datasets.
        text_field: the column with the text; None uses the first of the usual names.
        most: how many documents to fetch, from the start; None fetches all.
        say: prints a line on the console.

    Returns:
        The folder of the parts, and how many of them to read, in order of name.

    Raises:
        InputError: no such dataset, split or column, or the extra ``hf`` is not installed.
        RunAgain: the Hub cannot be reached now, or the cache's disk is full.
    """
    name, config, split, *more = [*path.removeprefix(PREFIX).split(":"), "", ""]
    if not name or any(more):
        raise InputError(f"{flag} {path}: write hf:NAME, hf:NAME:CONFIG, or hf:NAME:CONFIG:SPLIT")
    at = "" if os.path.isdir(expanded(name)) else name.partition("@")[2]
    named = _Named(name.removesuffix(f"@{at}"), at, config, split, f"{flag} {path}")
    wanted = None if most is None else -(-most // _PART_DOCUMENTS)
    about = [name, config, split, text_field]
    before = _fetched_before(root, about, wanted) if named.folder is None else None
    if before is not None:
        progress = _read_progress(before)
        say(
            f"{flag} {path}: uses revision {progress['revision']}, already fetched to {before}; "
            f"for another one, write hf:{named.name}@REVISION"
        )
        return before, _parts(progress, wanted)
    revision = _revision(named, say)
    slug = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, about[:3])))[-60:]
    target = root / f"{slug}-{cache.digest(about, revision)[:12]}"
    target.mkdir(parents=True, exist_ok=True)
    with lock.locked(target.with_name(target.name + ".lock"), say, f"building {target.name}"):
        progress = _read_progress(target)
        if not _enough(progress, wanted):
            _fetch_parts(named, revision, about, target, wanted, say)
            progress = _read_progress(target)
    return target, _parts(progress, wanted)


def _parts(progress: dict[str, Any], wanted: int | None) -> int:
    parts: int = progress["parts"]
    return parts if wanted is None else min(wanted, parts)


def _read_progress(target: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = json.loads((target / _PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"parts": 0, "documents": 0, "complete": False, "state": None}
    return progress


def _enough(progress: dict[str, Any], wanted: int | None) -> bool:
    return progress["complete"] or (wanted is not None and progress["parts"] >= wanted)


def _fetched_before(root: Path, about: list[str | None], wanted: int | None) -> Path | None:
    """Returns the newest fetched folder that has enough parts, of any revision."""
    if not root.is_dir():
        return None
    found = []
    for record in root.glob(f"*/{_PROGRESS}"):
        progress = _read_progress(record.parent)
        if progress["about"] == about and _enough(progress, wanted):
            found.append((record.stat().st_mtime_ns, record.parent))
    return max(found)[1] if found else None


def _revision(named: _Named, say: Say) -> str:
    """Identifies the dataset's current contents: a digest of the folder, or the Hub's commit."""
    if named.folder is not None:
        files = [path for path in listing.files(named.folder, say) if path.is_file()]
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return cache.digest(stats)
    _datasets(named)
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().dataset_info(named.name, revision=named.revision or None)
        return str(found.sha)
    except Exception as error:  # from several libraries
        _fail(named, error)


def _datasets(named: _Named) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{named.flag}: Hugging Face datasets require the package datasets: "
            f"{versions.install('hf')}"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _fail(named: _Named, error: Exception) -> NoReturn:
    """Raises errors of the Hub and the network as one line, and any other error unchanged."""
    raise hub_errors.explained(
        error,
        named.flag,
        kind="dataset",
        page=f"datasets/{named.name}",
        absent="no such folder, and no such dataset on the Hub; if it is private, run hf auth "
        "login",
        offline=f"on a connected machine, run {invocation.program()} prepare tokens with this "
        "run's --config and overrides, and copy its cache folder here ($JAXTRAIN_CACHE); or pass a "
        "folder with the dataset as hf:FOLDER",
    ) from error


def _opened(named: _Named, revision: str) -> Any:
    """Opens the rows as an iterable dataset, whose state can be saved and restored."""
    datasets = _datasets(named)
    folder = named.folder
    try:
        if folder is not None and _saved_to_disk(folder):
            loaded = datasets.load_from_disk(str(folder / named.config))
            if isinstance(loaded, datasets.DatasetDict):
                loaded = _chosen(named, loaded)
            files = [one["filename"] for one in loaded.cache_files]
            check_own(named.flag, files, folder, revision)
            return loaded.to_iterable_dataset()
        found = datasets.load_dataset_builder(
            str(folder or named.name),
            named.config or None,
            revision=None if folder else revision,
        )
        for files in (found.config.data_files or {}).values():
            check_own(named.flag, map(str, files), folder, revision)
        return _chosen(named, found.as_streaming_dataset())
    except (InputError, RunAgain):
        raise
    except Exception as error:  # from several libraries
        _fail(named, error)


def check_own(flag: str, files: Iterable[str], folder: Path | None, revision: str) -> None:
    """Checks that a dataset consists of its own files.

    The README.md or state.json of a stranger's dataset can name any file of this machine, which
    would become training data, or a URL.

    Args:
        flag: the flag and its value, for messages.
        files: as the package ``datasets`` names them.
        folder: of the dataset; None for one on the Hub.
        revision: the commit on the Hub.

    Raises:
        InputError: a file is elsewhere.
    """
    if folder is None:
        own = re.compile(rf"hf://datasets/[^@:]+@{re.escape(revision)}/")
    else:
        tops = {os.path.normpath(folder), os.path.realpath(folder)}
        own = re.compile(f"({'|'.join(map(re.escape, tops))})/")
    for file in files:
        name = file if folder is None else os.path.normpath(file)
        if not own.match(name) or ".." in name.split("/"):
            raise InputError(
                f"{flag}: the dataset lists {shown(file, 300)}, which is not one of its own files: "
                "pass another dataset"
            )


def _saved_to_disk(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _chosen(named: _Named, splits: Any) -> Any:
    split = named.split or "train"
    if split not in splits:
        raise InputError(
            f"{named.flag}: no split {split}, only {', '.join(splits)}: write "
            f"hf:{named.name}:{named.config}:SPLIT"
        )
    return splits[split]


def _fetch_parts(
    named: _Named,
    revision: str,
    about: list[str | None],
    target: Path,
    wanted: int | None,
    say: Say,
) -> None:
    """Writes the missing parts, and the progress after each."""
    progress = _read_progress(target) | {"about": about, "revision": revision}
    rows = _opened(named, revision)
    if progress["state"] is not None:
        rows.load_state_dict(progress["state"])
        say(f"{named.flag}: {progress['documents']:,} documents are already fetched; resuming")
    else:
        say(f"fetching the text of {named.flag} into {target}")
    reported = time.monotonic()
    texts: list[str] = []

    def keep(*, complete: bool) -> None:
        path = target / f"part-{progress['parts']:06d}.parquet"
        try:
            _write_part(path, texts)
        except OSError as error:
            raise disk_trouble(
                error,
                f"cannot write {path}",
                "set --data.cache_dir or $JAXTRAIN_CACHE to a writable folder",
            ) from error
        progress["parts"] += 1
        progress["documents"] += len(texts)
        progress["state"], progress["complete"] = rows.state_dict(), complete
        texts.clear()
        cache.write_file(target / _PROGRESS, json.dumps(progress))

    for text in _texts(named, rows, about[3]):
        texts.append(text)
        if len(texts) == _PART_DOCUMENTS:
            keep(complete=False)
            if _enough(progress, wanted):
                return
        if time.monotonic() - reported > progress_bar.SAY_EVERY_S:
            reported = time.monotonic()
            say(f"fetched {progress['documents'] + len(texts):,} documents")
    if texts:
        keep(complete=True)
    elif not progress["documents"]:
        raise InputError(f"{named.flag}: the dataset has no text")
    else:
        cache.write_file(target / _PROGRESS, json.dumps(progress | {"complete": True}))


def _texts(named: _Named, rows: Any, text_field: str | None) -> Iterator[str]:
    field = text_field
    for row in _rows(named, rows):
        if field is None:
            field = next((name for name in documents.TEXT_FIELDS if name in row), None)
        if field not in row:
            raise InputError(
                f"{named.flag}: its columns are {', '.join(map(repr, row))}: set --data.text_field "
                "to the one with the text"
            )
        value = row[field]
        if value is not None and not isinstance(value, str):
            raise InputError(f"{named.flag}: column {field!r} is not text: {type(value).__name__}")
        if value and value.strip():
            yield value


def _rows(named: _Named, rows: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows; only errors of fetching one are reported as the Hub's."""
    coming = iter(rows)
    while True:
        try:
            row = next(coming)
        except StopIteration:
            return
        except Exception as error:  # from several libraries
            _fail(named, error)
        yield row


def _write_part(path: Path, texts: list[str]) -> None:
    import pyarrow  # here, so that worker processes, which read no parquet, do not load it
    import pyarrow.parquet

    table = pyarrow.table({FIELD: pyarrow.array(texts, pyarrow.large_string())})
    with appearing(path) as beside:
        pyarrow.parquet.write_table(table, beside, compression="zstd")
