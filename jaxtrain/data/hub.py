"""Hugging Face datasets by name: fetched once into the cache, part by part, in bounded memory.

``hf:NAME[:CONFIG[:SPLIT]]`` names a dataset of the hub, or a folder: one that ``save_to_disk`` has
written, or one with the files of a dataset (.parquet, .jsonl) as the hub lays them out. A folder
needs no network.

The text column of the rows is written to ``<cache>/hf/<dataset>/part-<number>.parquet``, 10,000
documents each, and is then read like any other files: the same dataset with another vocabulary or
sequence length needs no second download. A part appears whole; a fetch that was killed goes on
behind the last one.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.data import cache, documents, folders, meter
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.files import appearing

FIELD = "text"  # the column of the parts
PARTS = "part-*.parquet"
_PREFIX = "hf:"
_PART_DOCUMENTS = 10_000
_PROGRESS = "progress.json"

Say = Callable[[str], None]


def is_named(path: str) -> bool:
    """Whether this names a dataset rather than files."""
    return path.startswith(_PREFIX)


@dataclasses.dataclass(frozen=True)
class _Named:
    """What ``hf:NAME[:CONFIG[:SPLIT]]`` says.

    Attributes:
        name: of a dataset, or a folder.
        config: one of its configurations; "" is its default.
        split: one of its splits; "" is train.
        flag: that gave it, with the value, for messages.
    """

    name: str
    config: str
    split: str
    flag: str

    @property
    def folder(self) -> Path | None:
        """The folder that the name means, if there is one."""
        path = Path(self.name).expanduser()
        return path.absolute() if path.is_dir() else None


def fetch(
    path: str, flag: str, root: Path, text_field: str | None, most: int | None, say: Say
) -> tuple[Path, int]:
    """Bring a dataset's text into the cache, as far as it is not there.

    Args:
        path: ``hf:NAME[:CONFIG[:SPLIT]]``.
        flag: that gave it, for messages.
        root: where fetched datasets lie.
        text_field: the column with the text; None takes the first of the usual names.
        most: documents that are wanted, the first ones; None is all.
        say: takes messages for the console.

    Returns:
        The folder of the parts, and how many of them, by name, hold what is wanted.

    Raises:
        InputError: no such dataset, split or column, or the extra ``hf`` is not installed.
        RunAgain: the hub cannot be reached now, and what is wanted was not fetched before.
    """
    name, config, split, *more = [*path.removeprefix(_PREFIX).split(":"), "", ""]
    if not name or any(more):
        raise InputError(f"{flag} {path}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    named = _Named(name, config, split, f"{flag} {path}")
    wanted = None if most is None else -(-most // _PART_DOCUMENTS)
    about = [name, config, split, text_field]
    try:
        revision = _revision(named)
    except RunAgain as error:
        before = _fetched_before(root, about, wanted)
        if before is None:
            raise
        say(f"{error}; takes what was fetched before, {before}")
        return before, wanted or _read_progress(before)["parts"]
    slug = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, about[:3])))[-60:]
    target = root / f"{slug}-{cache.digest(about, revision)[:12]}"
    target.mkdir(parents=True, exist_ok=True)
    with cache.locked(target.with_name(target.name + ".lock"), say):
        progress = _read_progress(target)
        if not _enough(progress, wanted):
            _fetch_parts(named, revision, about, target, wanted, say)
            progress = _read_progress(target)
    return target, progress["parts"] if wanted is None else min(wanted, progress["parts"])


def _read_progress(target: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = json.loads((target / _PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"parts": 0, "documents": 0, "complete": False, "state": None}
    return progress


def _enough(progress: dict[str, Any], wanted: int | None) -> bool:
    return progress["complete"] or (wanted is not None and progress["parts"] >= wanted)


def _fetched_before(root: Path, about: list[str | None], wanted: int | None) -> Path | None:
    """The folder fetched last that holds what is wanted, of whatever revision."""
    if not root.is_dir():
        return None
    found = []
    for record in root.glob(f"*/{_PROGRESS}"):
        progress = _read_progress(record.parent)
        if progress["about"] == about and _enough(progress, wanted):
            found.append((record.stat().st_mtime_ns, record.parent))
    return max(found)[1] if found else None


def _revision(named: _Named) -> str:
    """What the dataset holds now: a folder's files, or the hub's commit."""
    if named.folder is not None:
        files = [path for path in folders.files(named.folder) if path.is_file()]
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return cache.digest(stats)
    _datasets(named)
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(named.name).sha)
    except Exception as error:  # of several libraries
        raise _trouble(named, error) from error


def _datasets(named: _Named) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{named.flag}: Hugging Face datasets take the extra hf: pip install 'jaxtrain[hf]'"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _trouble(named: _Named, error: Exception) -> InputError | RunAgain:
    """The hub's refusal in one line: no such dataset, or no way to it."""
    import huggingface_hub.errors as refusals

    said = " ".join(str(error).split())[:200]
    if isinstance(error, refusals.GatedRepoError):
        return InputError(
            f"{named.flag}: the hub lets only some read it: run hf auth login ({said})"
        )
    absent = (refusals.RepositoryNotFoundError, refusals.HFValidationError)
    if isinstance(error, absent) or type(error).__name__ == "DatasetNotFoundError":
        return InputError(
            f"{named.flag}: no such folder, and no such dataset on the hub (or a private one: run "
            "hf auth login)"
        )
    if isinstance(error, ValueError | KeyError) and not isinstance(error, OSError):
        return InputError(f"{named.flag}: {said}")
    return RunAgain(
        f"{named.flag}: no such folder, and the hub cannot be reached ({type(error).__name__}: "
        f"{said}): connect this machine, or fetch it on one that is (jaxtrain prepare tokens) and "
        "bring its cache folder here ($JAXTRAIN_CACHE), or name a folder of the dataset as "
        "hf:FOLDER"
    )


def _opened(named: _Named, revision: str) -> Any:
    """The rows as an iterable dataset, which tells its state and goes on from one."""
    datasets = _datasets(named)
    folder = named.folder
    try:
        if folder is not None and _saved_to_disk(folder):
            loaded = datasets.load_from_disk(str(folder / named.config))
            if isinstance(loaded, datasets.DatasetDict):
                loaded = _chosen(named, loaded)
            return loaded.to_iterable_dataset()
        loaded = datasets.load_dataset(
            str(folder or named.name),
            named.config or None,
            streaming=True,
            revision=None if folder else revision,
        )
        return _chosen(named, loaded)
    except (InputError, RunAgain):
        raise
    except Exception as error:  # of several libraries
        raise _trouble(named, error) from error


def _saved_to_disk(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _chosen(named: _Named, splits: Any) -> Any:
    split = named.split or "train"
    if split not in splits:
        raise InputError(
            f"{named.flag}: it has no split {split}, only {', '.join(splits)}: name one as "
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
    """Writes the parts that are missing, and after each how far it is."""
    progress = _read_progress(target) | {"about": about, "revision": revision}
    rows = _opened(named, revision)
    if progress["state"] is not None:
        rows.load_state_dict(progress["state"])
        say(f"going on with {named.flag}: {progress['documents']:,} documents are here already")
    else:
        say(f"fetching the text of {named.flag} into {target}")
    told = time.monotonic()
    texts: list[str] = []

    def keep(*, complete: bool) -> None:
        _write_part(target / f"part-{progress['parts']:06d}.parquet", texts)
        progress["parts"] += 1
        progress["documents"] += len(texts)
        progress["state"], progress["complete"] = rows.state_dict(), complete
        texts.clear()
        cache.write_file(target / _PROGRESS, json.dumps(progress))

    try:
        for text in _texts(named, rows, about[3]):
            texts.append(text)
            if len(texts) == _PART_DOCUMENTS:
                keep(complete=False)
                if _enough(progress, wanted):
                    return
            if time.monotonic() - told > meter.SAY_EVERY_S:
                told = time.monotonic()
                say(f"fetched {progress['documents'] + len(texts):,} documents")
    except (InputError, RunAgain):
        raise
    except Exception as error:  # of several libraries
        raise _trouble(named, error) from error
    if texts:
        keep(complete=True)
    elif not progress["documents"]:
        raise InputError(f"{named.flag}: no text in it")
    else:
        cache.write_file(target / _PROGRESS, json.dumps(progress | {"complete": True}))


def _texts(named: _Named, rows: Any, text_field: str | None) -> Iterator[str]:
    field = text_field
    for row in rows:
        if field is None:
            field = next((name for name in documents.TEXT_FIELDS if name in row), None)
        if field not in row:
            raise InputError(
                f"{named.flag}: its columns are {', '.join(map(repr, row))}: name the one with the "
                "text with --data.text_field"
            )
        value = row[field]
        if value is not None and not isinstance(value, str):
            raise InputError(f"{named.flag}: column {field!r} is no text: {type(value).__name__}")
        if value and value.strip():
            yield value


def _write_part(path: Path, texts: list[str]) -> None:
    import pyarrow  # here, so that worker processes, which read no parquet, do not load it
    import pyarrow.parquet

    table = pyarrow.table({FIELD: pyarrow.array(texts, pyarrow.large_string())})
    with appearing(path) as beside:
        pyarrow.parquet.write_table(table, beside, compression="zstd")
