"""Shards: the tokens of a corpus in pieces that are made, and kept in the cache, independently.

Files are grouped by the hashes of their names (:mod:`jaxtrain.data.grouping`), into groups of up to
128 MB. A file above 256 MB is divided into ranges of its bytes, unless it is compressed. Each group
and each range is a shard, a folder of the cache whose name is a digest of its files and of
all that its tokens depend on. Shards are made by :mod:`jaxtrain.jobs.resumable`.

A shard has all documents of its files, whichever side of a split they are on, sorted by their
digests. Their side follows from the digest (:mod:`jaxtrain.data.text.layout`), so each split by
document is one range of the shard, and another split tokenizes nothing again.

* ``tokens``: the ids as uint16, or as uint32 for more than 65,536 ids, with a <|bos|> before each
  document for causal models, and a [SEP] for masked ones.
* ``documents.npy``: uint64 [documents, 5], see :data:`COLUMNS`.
* ``manifest.json``: number of documents, digest, broken files, and number of rows that are not
  used; size of the documents.
"""

import array
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import machine
from jaxtrain.data import grouping
from jaxtrain.data.text import kinds
from jaxtrain.data.text.documents import File, FileRange
from jaxtrain.data.text.encoding import Encoded, Encoder
from jaxtrain.data.text.rows import Rows, Skipped
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.jobs import resumable, worker_process
from jaxtrain.jobs.engines import Engine, Processes, Worker
from jaxtrain.storage import cache, disks, record
from jaxtrain.terminal import Say

COLUMNS = DIGEST, TOKENS, BYTES, CHARACTERS, LOST = range(5)
"""Of a document: its :func:`digest`; the position after its last token; its size in bytes of UTF-8
and in characters; how many of these are lost (:class:`jaxtrain.data.text.encoding.Encoded`)."""
GROUP_BYTES = 2**27
LARGE_BYTES = 2**28  # of a file that is divided
_VERSION = 4  # of the files and all rules that determine their contents: change it with those
# Shards at once. With 30 ms per request, one alone takes 0.33 s, and each of eight 0.05 s.
_FETCHES = 8
_CHUNK_CHARACTERS = 1 << 20  # encoded together


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What tokens depend on besides the text.

    Attributes:
        lossless: whether tokens must have every byte of the text.
        marks: special tokens before each document.
    """

    tokenizer: str
    name: str
    lossless: bool
    marks: tuple[int, ...]
    ids: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the ids."""
        return np.dtype(np.uint16 if self.ids <= 2**16 else np.uint32)

    @functools.cached_property
    def key(self) -> str:
        """A digest of all but the name."""
        content = hashlib.sha256(self.tokenizer.encode()).hexdigest()
        return cache.digest(_VERSION, content, self.lossless, self.marks)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Files, or a part of a large one, that are tokenized together."""

    file_ranges: tuple[FileRange, ...]

    @property
    def size(self) -> int:
        """The number of bytes to read."""
        return sum(file_range.stop - file_range.start for file_range in self.file_ranges)

    @property
    def name(self) -> str:
        """Describes it for messages, in the same way on each machine."""
        first, *more = self.file_ranges
        if more:
            return f"{first.file.name} and {len(more):,} more files"
        origin = f" from byte {first.start:,}" if first.start else ""
        return f"{first.file.name}{origin}"

    def key(self) -> list[Any]:
        """Returns JSON values that change with the text."""
        return [file_range.key() for file_range in self.file_ranges]

    def folder(self, recipe: Recipe) -> str:
        """Returns the name of its folder in the cache."""
        return f"shard-{cache.digest(recipe.key, self.key())[:24]}"


def plan(files: Sequence[File], rows: Rows) -> list[Shard]:
    """Divides files into shards, ordered by the hashes of the files' names."""
    keyed = [
        (grouping.hash_of(file.name), _ranges(file, rows))
        for file in files
        if file.size > LARGE_BYTES
    ]
    small = [file for file in files if file.size <= LARGE_BYTES]
    for _, group in grouping.divided(
        small, lambda file: file.name, lambda file: file.size, GROUP_BYTES
    ):
        shard = Shard(tuple(FileRange(file, 0, file.size, rows) for file in group))
        keyed.append((grouping.hash_of(group[0].name), [shard]))
    return [shard for _, shards in sorted(keyed, key=lambda item: item[0]) for shard in shards]


def _ranges(file: File, rows: Rows) -> list[Shard]:
    size = file.size if kinds.packing(file.name) else GROUP_BYTES
    starts = range(0, file.size, size)
    return [Shard((FileRange(file, at, min(at + size, file.size), rows),)) for at in starts]


def digest(text: bytes) -> int:
    """Returns the digest of a document, which decides its side of a split.

    White space does not matter: a copy with another line end or width is the same document.
    """
    return int.from_bytes(hashlib.sha256(b" ".join(text.split())).digest()[:8], "big")


def prepare(
    shards: Sequence[Shard],
    recipe: Recipe,
    folder: Path,
    say: Say,
    *,
    engine: Engine | None = None,
    part: resumable.Part = resumable.ALL,
    bucket: cache.CacheBucket | None = None,
) -> bool:
    """Makes the shards that are missing in the cache.

    Args:
        engine: where the work runs; None uses the cores of this machine.

    Returns:
        Whether all are in ``folder``; without it, other parts have yet to make some.

    Raises:
        InputError: a worker was killed, a file changes meanwhile, or a lossy tokenizer.
        RunAgain: the disk is full or cannot be read now; finished shards are kept.
    """
    by_folder = {shard.folder(recipe): shard for shard in shards}
    missing = [name for name in by_folder if record.read(folder / name) is None]
    if not missing:
        return True
    items = [
        resumable.Item(f"{shard.name} ({name})", (), name, shard, is_folder=True)
        for name, shard in by_folder.items()
    ]
    with worker_process.started_by_us():  # also in a script that opens a data set itself
        outcome = resumable.run(
            items,
            functools.partial(_begin, recipe, len(missing) < machine.cores()),
            folder if bucket is None else f"{bucket.url}/{bucket.name(folder)}",
            engine=engine or Processes(machine.cores(), say),
            say=say,
            part=part,
            doing="tokenizing",
            things="parts of the text",
        )
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        raise InputError(f"{name.rpartition(' (')[0]}: {reason}")
    with ThreadPoolExecutor(_FETCHES) as pool:  # all that exist are fetched
        return all(list(pool.map(lambda name: cache.is_here(folder / name, say, bucket), missing)))


def _begin(recipe: Recipe, few: bool, worker: Worker) -> resumable.Make:
    if few:  # fewer shards than cores: the library's threads use the others
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = Encoder(recipe.tokenizer, recipe.lossless, recipe.marks, recipe.name)
    return functools.partial(_make, recipe, encoder)


def _make(recipe: Recipe, encoder: Encoder, item: resumable.Item, folder: Path) -> dict[str, Any]:
    """Makes the folder of a shard."""
    folder.mkdir()
    skipped, bad = dict[str, int](), dict[str, str]()
    bad_rows = dict[str, tuple[int, str]]()
    with _Writer(folder, recipe.dtype) as writer:
        for file_range in item.value.file_ranges:
            before = writer.mark()

            def read(file_range: FileRange = file_range, before: _Mark = before) -> Skipped:
                writer.reset(before)  # of an attempt that an outage of the disk ended
                rows = Skipped()
                try:
                    for texts in _chunks(file_range.read(rows)):
                        writer.add(texts, encoder(texts))
                except OSError as error:
                    raise disks.unreadable(file_range.file.path, error) from error
                return rows

            try:
                rows = disks.when_readable(read)
            except BadExample as error:
                writer.reset(before)
                bad[file_range.file.name] = error.reason
                continue
            if file_range.file.changed():
                raise InputError(
                    f"{file_range.file.path} changed while it was being read: start again"
                )
            if rows.rows:
                skipped[file_range.file.name] = rows.rows
            if rows.bad:
                bad_rows[file_range.file.name] = rows.bad, rows.first
            if writer.mark() == before and file_range.is_complete:
                bad[file_range.file.name] = "no text in it"
        sha256, count, text_bytes = writer.finish()
    details = {"documents": count, "sha256": sha256, "bad": bad, "skipped": skipped}
    return details | {"bad_rows": bad_rows, "bytes": text_bytes}


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk, characters = list[str](), 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


_Mark = tuple[int, int]


class _Writer(contextlib.ExitStack):
    """Writes documents in the order of reading, then sorts them.

    Memory holds 40 bytes for each document, and less than 130 in :meth:`finish`; few of their
    tokens.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        super().__init__()
        self._folder, self._dtype = folder, dtype
        # The columns of each document, with the number of tokens instead of the position.
        self._rows = array.array("Q")
        self._file = self.enter_context(open(folder / "unsorted", "w+b"))  # noqa: SIM115

    def mark(self) -> _Mark:
        """Returns the present state, for :meth:`reset`."""
        return self._file.tell(), len(self._rows)

    def reset(self, mark: _Mark) -> None:
        """Drops what was added after a mark."""
        at, rows = mark
        self._file.seek(at)
        self._file.truncate()
        del self._rows[rows:]

    def add(self, texts: list[str], encoded: list[Encoded]) -> None:
        """Adds documents; those without tokens are omitted."""
        for text, document in zip(texts, encoded, strict=True):
            if not document.ids:
                continue
            data = text.encode()
            counts = len(document.ids), len(data), len(text), document.lost
            self._rows.extend((digest(data), *counts))
            ids = np.frombuffer(document.ids, np.uint32)
            self._file.write(ids.astype(self._dtype).tobytes())

    def finish(self) -> tuple[str, int, int]:
        """Writes the files of the shard; returns their digest, and count and bytes of documents."""
        self._file.flush()
        rows = np.frombuffer(self._rows, np.uint64).reshape(-1, len(COLUMNS))
        order = np.argsort(rows[:, DIGEST], kind="stable")
        tokens = _mapped(Path(self._file.name), self._dtype)
        starts = np.cumsum(rows[:, TOKENS], dtype=np.uint64) - rows[:, TOKENS]
        content = hashlib.sha256()
        with open(self._folder / "tokens", "wb") as tokens_file:
            for number in order.tolist():
                start, count = int(starts[number]), int(rows[number, TOKENS])
                data = tokens[start : start + count].tobytes()
                content.update(data)
                tokens_file.write(data)
        rows = rows[order]
        rows[:, TOKENS] = np.cumsum(rows[:, TOKENS], dtype=np.uint64)
        content.update(rows.tobytes())
        np.save(self._folder / "documents.npy", rows)
        del tokens
        os.unlink(self._file.name)
        return content.hexdigest(), len(rows), int(rows[:, BYTES].sum())


@dataclasses.dataclass(frozen=True)
class CachedShard:
    """A shard in the cache.

    Attributes:
        bad: name -> reason of each broken file; none of its documents is in the shard.
        skipped: name -> number of rows without text, of files that have such.
        bad_rows: name -> number of rows that cannot be used, and place and reason of the first.
        count: number of documents.
        bytes: their size.
    """

    folder: Path
    sha256: str
    bad: dict[str, str]
    skipped: dict[str, int]
    bad_rows: dict[str, tuple[int, str]]
    count: int
    bytes: int
    dtype: np.dtype

    @classmethod
    def of(cls, folder: Path, dtype: np.dtype) -> "CachedShard":
        """Opens a shard that is complete."""
        stored = record.read(folder)
        assert stored is not None
        return cls(
            folder,
            stored["sha256"],
            stored["bad"],
            stored["skipped"],
            stored["bad_rows"],
            stored["documents"],
            stored["bytes"],
            dtype,
        )

    def verify(self) -> None:
        """Compares the checksums of its files.

        Raises:
            RunAgain: a file is damaged; the shard is then absent, and made again.
        """
        stored = record.read(self.folder)
        bad = record.NAME if stored is None else record.damaged(self.folder, stored)
        if bad:
            (self.folder / record.NAME).unlink(missing_ok=True)
            raise RunAgain(
                f"{self.folder / bad} is damaged: start again, and these tokens are made again"
            )

    @property
    def documents(self) -> np.ndarray:
        """The documents: uint64 [documents, 5], mapped."""
        return np.asarray(np.load(self.folder / "documents.npy", mmap_mode="r"))


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
