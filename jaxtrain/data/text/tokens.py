"""The token cache: a corpus as flat files of token ids.

Each split is one stream, ``<split>.tokens``: the tokens of its documents in order, as uint16 (or
uint32 for more than 65,536 ids). Its contents depend on the form
(:data:`jaxtrain.data.text.specials.Form`): sentences, with a [SEP] after each document, or every
byte, with a <|bos|> before each document. ``<split>.ends`` holds the positions after each sentence
(each document in the exact form) as uint64. Only what is needed of both is read, so memory does not
grow with the corpus. The folder also has ``tokenizer.json`` and, for the exact form,
``token_bytes``: the number of bytes of text that each id stands for, int32. The examples in a
stream are found by :mod:`jaxtrain.data.text.packing` and :mod:`jaxtrain.data.text.windows`.

The corpus is tokenized in chunks of about a megabyte on all cores, and the results are appended to
the streams in the order of the text. ``progress.json`` records how much of the streams is complete:
after a kill, tokenizing resumes there. The tokens do not depend on kills or on the number of
processes.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np

from jaxtrain.data import cache, worker_count, worker_pool
from jaxtrain.data.engine import Engine, Local
from jaxtrain.data.text import byte_level, documents, encoding, specials, tokenizer, tokenizer_file
from jaxtrain.data.text.encoding import Chunk, Part
from jaxtrain.data.text.held_out import HeldOut
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import SKIPPED, SPLITS, TRAIN, VAL, Split
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.storage import addresses, shared_folder
from jaxtrain.storage.atomic import remove_leftovers, write_whole
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.telemetry import progress_bar
from jaxtrain.telemetry.progress_bar import Say

_VERSION = 3  # of the files and all rules that determine their contents: change it with those
_PIECE_CHARACTERS = 1 << 20
_MIN_MB_PER_PROCESS = 8.0  # for less text, starting a process costs more time than it saves
_KEEP_EVERY_S = 2.0  # the most work that a kill can lose
_PROGRESS = "progress.json"
_PARTS = "parts"  # files that an engine has tokenized
TOKEN_BYTES = "token_bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Good files, and the side of each of their documents.

    Attributes:
        files: the files, in reading order.
        split: the side of each document.
        text_field: see :func:`jaxtrain.data.text.documents.read`.
        held_out: documents that validate, here or in another corpus, and are not trained on.
    """

    files: list[documents.Scanned]
    split: Split
    text_field: str | None
    held_out: HeldOut | None = None

    def key(self) -> str:
        """Returns a digest of file contents, order, and split, but not of names and paths."""
        rows = [(file.sha256, Path(file.name).suffix.lower()) for file in self.files]
        more = () if self.held_out is None else (self.held_out.path.name,)
        return cache.digest(_VERSION, rows, self.split.key(), self.text_field, *more)

    def characters(self) -> float:
        """Estimates the number of characters in the documents used."""
        return sum(file.characters for file in self.files) * self._used()

    def megabytes(self) -> float:
        """Estimates the size of the documents used, in MB of UTF-8."""
        return sum(file.text_bytes for file in self.files) / 1e6 * self._used()

    def _used(self) -> float:
        """Returns the fraction of documents used."""
        return sum(self.split.kept) / sum(self.split.totals)

    def read(self, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """Yields (number, split, document) of each document that is not skipped, in order.

        Args:
            start: number of the first document to yield; earlier files are not opened.

        Raises:
            InputError: a file has changed since it was scanned, or reading it is not permitted.
            RunAgain: its disk does not respond now.
        """
        first = 0  # number of the file's first document, over all files
        for at, file in enumerate(self.files):
            if first + file.documents > start:
                yield from self._read_file(at, file, first, start)
            first += file.documents

    def for_training(self) -> "Corpus":
        """Returns the training documents, without files that are for validation only."""
        split = self.split.for_training()
        sides = self.split.sides or (TRAIN,) * len(self.files)
        files = [file for file, side in zip(self.files, sides, strict=True) if side == TRAIN]
        return dataclasses.replace(self, files=files, split=split, held_out=None)

    def validation(self) -> Iterator[str]:
        """Yields the documents for validation, without opening files that have none.

        Raises:
            InputError, RunAgain: see :meth:`read`.
        """
        everything = dataclasses.replace(self, held_out=None)
        for at, file in enumerate(self.files):
            if self.split.sides is None or self.split.sides[at] == VAL:
                yield from (text for side, text in everything.read_file(at, file) if side == VAL)

    def without_files(self) -> "Corpus":
        """Returns the same without files, for other processes, which receive some of them."""
        return dataclasses.replace(self, files=[])

    def read_file(
        self, at: int, file: documents.Scanned, skip: int = 0
    ) -> Iterator[tuple[int, str]]:
        """Yields (split, document) of each document of one file that is not skipped, in order.

        Args:
            at: number of the file.
            file: the file.
            skip: number of documents to omit at its start.

        Raises:
            InputError: see :meth:`read`.
            RunAgain: its disk does not respond now.
        """
        return ((side, document) for _, side, document in self._read_file(at, file, 0, skip))

    def _read_file(
        self, at: int, file: documents.Scanned, first: int, start: int
    ) -> Iterator[tuple[int, int, str]]:
        number = first
        sides = (int(side) for block in self.split.of_file(at) for side in block)
        try:
            with file.opened() as path:
                for document in documents.read(path, self.text_field):
                    side = next(sides, SKIPPED)
                    skipped = side == SKIPPED or number < start
                    if not skipped and not (side == TRAIN and self._is_held_out(document)):
                        yield number, side, document
                    number += 1
            same = number == first + file.documents and file.unchanged()
        except (BadExample, FileNotFoundError):
            same = False
        except OSError as error:
            raise disk_trouble(
                error, f"{file.path} can no longer be read", "make it readable, and start again"
            ) from error
        if not same:
            raise InputError(f"{file.path} changed while it was being read: start again")

    def _is_held_out(self, document: str) -> bool:
        return self.held_out is not None and document in self.held_out


def prepare(
    corpus: Corpus,
    *,
    tokenizer_path: Path,
    form: Form = "sentences",
    folder: Path,
    say: Say,
    processes: int | None = None,
    engine: Engine | None = None,
    bucket: cache.CacheBucket | None = None,
    validation: Callable[[], Iterable[str]] = tuple,
) -> tuple[Path, dict[str, Any]]:
    """Builds the token cache of a corpus if it is missing.

    Args:
        corpus: the files to tokenize.
        tokenizer_path: a ``tokenizer.json`` that fits the model.
        form: which parts of the documents to keep.
        folder: folder of all token caches.
        say: prints a line on the console.
        processes: number of tokenizing processes; None uses one per core, if there is enough text.
        engine: tokenizes each file on any node instead; all must see ``folder``.
        bucket: has the cache that ``folder`` is a copy of.
        validation: reads the documents that validate, of all corpora.

    Returns:
        The cache's folder and its manifest.

    Raises:
        InputError: a split without text, a file that changes meanwhile, or a lossy tokenizer if the
            form is exact.
        RunAgain: the disk is full or cannot be read now, or memory is too small; finished work is
            kept.
    """
    content = tokenizer_path.read_bytes()
    marks = marks_of(tokenizer_path, form)

    def build(work: Path) -> dict[str, Any]:
        remove_leftovers(work, alone=True)
        if corpus.held_out is not None and not corpus.held_out.path.exists():
            say("reading the documents that validate, which are not trained on")
            corpus.held_out.store(validation())
        write_whole(work / tokenizer.NAME, content)
        return {
            "version": _VERSION,
            "content": corpus.key(),
            **_write(corpus, work, form, marks, say, processes, engine),
        }

    target = cache_folder(corpus, content, form, marks, folder)
    return target, cache.make_folder(target, build, say, resumable=True, bucket=bucket)


def marks_of(path: Path, form: Form) -> tuple[int, ...]:
    """Returns the special tokens between documents, for a ``tokenizer.json``."""
    read = tokenizer_file.read(path)
    if form == "exact":
        return specials.marks(read, path).before
    return (specials.find(read, str(path)).sep,)


def cache_folder(
    corpus: Corpus, content: bytes, form: Form, marks: tuple[int, ...], folder: Path
) -> Path:
    """Returns the folder of a token cache, whether or not it exists.

    Args:
        corpus, form, folder: see :func:`prepare`.
        content: of the ``tokenizer.json``.
        marks: see :func:`marks_of`.
    """
    key = cache.digest(
        corpus.key(),
        hashlib.sha256(content).hexdigest(),
        # Without the form for "sentences": caches from before there were two forms stay valid.
        *(() if form == "sentences" else (form, *marks)),
    )
    return folder / f"tokens-{key[:20]}"


def processes_for(megabytes: float) -> int:
    """Returns the default number of tokenizing processes for so much text."""
    return max(1, min(worker_count.cores(), int(megabytes / _MIN_MB_PER_PROCESS)))


def _chunks(corpus: Corpus, start: int) -> Iterator[Chunk]:
    texts: list[tuple[int, str]] = []
    characters = after = 0
    for number, side, document in corpus.read(start):
        texts.append((side, document))
        characters += len(document)
        after = number + 1
        if characters >= _PIECE_CHARACTERS:
            yield Chunk(texts, after)
            texts, characters = [], 0
    if texts:
        yield Chunk(texts, after)


def _write(
    corpus: Corpus,
    work: Path,
    form: Form,
    marks: tuple[int, ...],
    say: Say,
    processes: int | None,
    engine: Engine | None,
) -> dict[str, Any]:
    """Tokenizes all documents into the streams of both splits; returns the manifest's facts."""
    path = work / tokenizer.NAME
    read = tokenizer_file.read(path)
    if form == "exact":
        special: dict[str, Any] = {"before": list(marks)}
        write_whole(work / TOKEN_BYTES, byte_level.lengths(read).tobytes())
    else:
        special = specials.find(read, str(path)).to_json()
    size = 1 + max(read.get_vocab().values())
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    total_mb = corpus.megabytes()
    if processes is None:
        processes = processes_for(total_mb)
    streams = _Streams(work, dtype)
    before_mb = streams.megabytes()
    if streams.documents:
        say(f"resuming: {before_mb:,.1f} MB of text are already tokenized")
    those = Local(max(1, processes)).where if engine is None else engine.where
    say(f"tokenizing {total_mb:,.1f} MB of text in {those}")
    start = time.monotonic()
    try:
        with progress_bar.metered("tokenizing", total_mb, before_mb, say) as show:
            if engine is None:
                encoded = worker_pool.in_order(
                    encoding.encode,
                    _chunks(corpus, streams.documents),
                    str(path),
                    dtype.name,
                    form,
                    marks,
                    processes=processes,
                )
            else:
                how = (str(path), dtype.name, form, marks)
                encoded = _encoded_by(engine, corpus, streams, work / _PARTS, how)
            for after, parts in encoded:
                streams.append(after, parts)
                del parts  # on NFS, a folder with mapped files cannot be removed
                show(streams.megabytes())
        streams.keep()
        shutil.rmtree(work / _PARTS, ignore_errors=True)
    finally:
        streams.close()
    seconds = time.monotonic() - start
    done = streams.megabytes() - before_mb
    say(f"tokenized {done:.1f} MB of text in {seconds:.1f} s, {done / seconds:.1f} MB/s (measured)")
    twice = corpus.split.kept[TRAIN] - streams.facts[TRAIN]["texts"]
    if twice:
        say(f"{twice:,} documents are not trained on, because equal documents validate")
    for side, name in enumerate(SPLITS):
        if corpus.split.kept[side] and not streams.facts[side]["tokens"]:
            equal = side == TRAIN and twice == corpus.split.kept[TRAIN]
            why = ", because all its documents equal documents for validation" if equal else ""
            raise InputError(f"no text to tokenize in the {name} split{why}: add more text")
    return {
        "dtype": dtype.name,
        "vocabulary": size,
        "specials": special,
        "tokenizer": hashlib.sha256(path.read_bytes()).hexdigest(),
        "seconds": round(seconds, 3),
        "splits": {
            name: facts | {"sha256": _digest(work / f"{name}.tokens")}
            for name, facts in zip(SPLITS, streams.facts, strict=True)
        },
    }


_How = tuple[str, str, Form, tuple[int, ...]]  # the last arguments of encoding.encode


def _encoded_by(
    engine: Engine, corpus: Corpus, streams: "_Streams", folder: Path, how: _How
) -> Iterator[tuple[int, list[Part]]]:
    """Yields the tokens of one file after the other, as an engine writes them to ``folder``.

    Files finish in any order; those ahead wait on disk. What a killed command left there is used.

    Args:
        engine: tokenizes the files.
        corpus: the files.
        streams: receive the tokens; they may end inside a file that was tokenized without an
            engine.
        folder: for the tokens of files; one is removed once it is durable in the streams.
        how: how to tokenize.
    """
    folder.mkdir(exist_ok=True)
    start = streams.documents
    first, todo = 0, {}
    for at, file in enumerate(corpus.files):
        if first + file.documents > start:
            todo[at] = (max(0, start - first), first + file.documents)
        first += file.documents
    digest = hashlib.sha256(Path(how[0]).read_bytes()).hexdigest()
    missing = [
        (at, skip, corpus.files[at])
        for at, (skip, _) in todo.items()
        if not _part(folder, at, skip).is_dir()
    ]
    order = iter(todo.items())
    appended: list[Path] = []
    # Not those that exist: without a second look, NFS may say for a minute that one does not.
    ready = todo.keys() - {at for at, _, _ in missing}
    at, (skip, after) = next(order, (-1, (0, 0)))
    finished = engine.as_finished(
        _encode_file,
        missing,
        corpus.without_files(),
        folder,
        how,
        digest,
        died=lambda item: died_reading(item[2]),
    )
    for found in itertools.chain([None], finished):
        if found is not None:
            ready.add(found[0][0])
        while at in ready:
            part = _part(folder, at, skip)
            shared_folder.await_seen(part)
            yield after, _read_parts(part, how[1])
            appended.append(part)
            if streams.kept == after:
                for one in appended:
                    shutil.rmtree(one)
                appended.clear()
            at, (skip, after) = next(order, (-1, (0, 0)))


def check_seen(file: documents.Scanned) -> None:
    """Raises InputError unless this host, on which a worker runs, sees a file."""
    if not addresses.is_address(file.path) and not os.path.exists(file.path):
        raise shared_folder.not_seen(file.path)


def died_reading(file: documents.Scanned, *others: documents.Scanned) -> NoReturn:
    """Raises RunAgain: the worker of files was killed, most likely for lack of memory."""
    also = f" or one of {len(others):,} other file{'s'[: len(others) != 1]}" if others else ""
    raise RunAgain(
        f"a worker that reads {file.path}{also} was killed, also in every retry, most likely for "
        "lack of memory: use smaller files or nodes with more memory, and start again; finished "
        "work is kept"
    )


def _part(folder: Path, at: int, skip: int) -> Path:
    """Returns the folder with the tokens of a file from document ``skip`` on."""
    return folder / f"{at:08}-{skip}"


def _encode_file(
    item: tuple[int, int, documents.Scanned],
    corpus: Corpus,
    folder: Path,
    how: _How,
    digest: str,
) -> None:
    """Tokenizes a file into a folder of its own, which appears when it is complete.

    Runs in a worker, maybe elsewhere, and maybe twice at the same time.

    Raises:
        InputError: this node does not see the cache folder or the file; or see
            :func:`jaxtrain.data.text.encoding.encode`.
    """
    at, skip, file = item
    path = Path(how[0])
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise shared_folder.not_seen(path)
    check_seen(file)
    target = _part(folder, at, skip)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=".part-"))
    try:
        streams = _Streams(work, np.dtype(how[1]))
        texts, characters = [], 0
        for number, (side, document) in enumerate(corpus.read_file(at, file, skip)):
            texts.append((side, document))
            characters += len(document)
            if characters >= _PIECE_CHARACTERS:
                streams.append(*encoding.encode(Chunk(texts, number), *how))
                texts, characters = [], 0
        if texts:
            streams.append(*encoding.encode(Chunk(texts, 0), *how))
        streams.keep()
        streams.close()
        try:
            os.rename(work, target)
        except OSError:
            if not target.is_dir():  # otherwise another attempt has finished it
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_parts(folder: Path, dtype: str) -> list[Part]:
    """Maps the tokens of one file."""
    facts = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))["facts"]
    return [
        Part(
            ids=memoryview(
                cast(Any, _mapped(folder / f"{name}.tokens", dtype, of_split["tokens"]))
            ).cast("B"),
            ends=_mapped(folder / f"{name}.ends", "uint64", of_split["sentences"]),
            texts=of_split["texts"],
            documents=of_split["documents"],
            text_bytes=of_split["bytes"],
            characters=of_split["characters"],
            unknown=of_split["unknown"],
        )
        for name, of_split in zip(SPLITS, facts, strict=True)
    ]


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Streams:
    """Writes the streams of both splits; resumes the work of a killed process.

    Args:
        work: folder of the streams.
        dtype: dtype of the ids.

    Attributes:
        documents: number of the first document that is not in the streams.
        kept: the same, for the part that survives a kill.
        facts: counts for each split.
    """

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._record = work / _PROGRESS
        self._width = dtype.itemsize
        self.documents = 0
        counted = ("texts", "documents", "sentences", "tokens", "bytes", "characters", "unknown")
        self.facts = [dict.fromkeys(counted, 0) for _ in SPLITS]
        if self._record.exists():
            kept = json.loads(self._record.read_text(encoding="utf-8"))
            self.documents, self.facts = kept["documents"], kept["facts"]
        self.kept = self.documents
        self._files: list[tuple[BinaryIO, BinaryIO]] = []
        for name, facts in zip(SPLITS, self.facts, strict=True):
            tokens = _opened(work / f"{name}.tokens", facts["tokens"] * self._width)
            self._files.append((tokens, _opened(work / f"{name}.ends", facts["sentences"] * 8)))
        self._kept = -math.inf  # record the first chunk at once

    def megabytes(self) -> float:
        """Returns the size of the text in the streams, in MB."""
        return sum(facts["bytes"] for facts in self.facts) / 1e6

    def append(self, after: int, parts: list[Part]) -> None:
        """Appends a chunk's tokens; all documents before number ``after`` are then in."""
        for (tokens, ends), facts, part in zip(self._files, self.facts, parts, strict=True):
            tokens.write(part.ids)
            ends.write((part.ends + np.uint64(facts["tokens"])).tobytes())
            facts["tokens"] += len(part.ids) // self._width
            facts["sentences"] += len(part.ends)
            facts["texts"] += part.texts
            facts["documents"] += part.documents
            facts["bytes"] += part.text_bytes
            facts["characters"] += part.characters
            facts["unknown"] += part.unknown
        self.documents = after
        if time.monotonic() - self._kept >= _KEEP_EVERY_S:
            self.keep()

    def keep(self) -> None:
        """Makes the streams durable up to here, so that they survive a kill."""
        for pair in self._files:
            for file in pair:
                file.flush()
                os.fsync(file.fileno())
        write_whole(self._record, json.dumps({"documents": self.documents, "facts": self.facts}))
        self.kept = self.documents
        self._kept = time.monotonic()

    def close(self) -> None:
        for pair in self._files:
            for file in pair:
                file.close()


def _opened(path: Path, size: int) -> BinaryIO:
    """Truncates a file to ``size`` and opens it for appending."""
    file = open(path, "ab")  # noqa: SIM115 - _Streams.close
    file.truncate(size)
    return file
