"""The token cache: a corpus as flat files of token ids.

Each split is one stream, ``<split>.tokens``: the tokens of its documents in order, as uint16 (or
uint32 for more than 65,536 ids). What it keeps of them depends on the form that is asked for
(:data:`jaxtrain.data.text.specials.Form`): sentences, with a [SEP] after each document, or every
byte, with a <|bos|> before each document. ``<split>.ends`` holds the positions after each sentence
(each document of the exact form) as uint64. Both are read through memory maps, so memory does not
grow with the corpus. ``tokenizer.json`` lies beside them, and for the exact form ``token_bytes``:
how many bytes of text each id stands for, int32. Where examples lie in a stream is the matter of
:mod:`jaxtrain.data.text.packing` and :mod:`jaxtrain.data.text.windows`.

The corpus is tokenised in chunks of about a megabyte, on all cores, and what they give is appended
to the streams in the order of the text. ``progress.json`` says how far the streams are complete:
what a killed process had finished up to there is not done again, and the tokens are the same
whatever is killed and however many processes work.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.data import cache, worker_pool
from jaxtrain.data.text import byte_level, documents, encoding, specials, tokenizer, tokenizer_file
from jaxtrain.data.text.encoding import Chunk, Part
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import LEFT_OUT, SPLITS, Split
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.telemetry import progress_bar
from jaxtrain.telemetry.progress_bar import Say

_VERSION = 2  # of the files and of every rule that decides what is in them: change it with those
_PIECE_CHARACTERS = 1 << 20
_MB_WORTH_A_PROCESS = 8.0  # below, starting it takes longer than what it saves
_KEEP_EVERY_S = 2.0  # what a kill costs, at most
_PROGRESS = "progress.json"
TOKEN_BYTES = "token_bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Good files and where each of their documents goes.

    Attributes:
        files: the files, in the order in which they are read.
        split: the side of each of their documents.
        text_field: see :func:`jaxtrain.data.text.documents.read`.
    """

    files: list[documents.Scanned]
    split: Split
    text_field: str | None

    def key(self) -> str:
        """Digest of the content: file contents, order and split; not of names and places."""
        rows = [(file.sha256, Path(file.name).suffix.lower()) for file in self.files]
        return cache.digest(_VERSION, rows, self.split.key(), self.text_field)

    def characters(self) -> float:
        """Of the documents that are used, about."""
        return sum(file.characters for file in self.files) * self._used()

    def megabytes(self) -> float:
        """Of UTF-8 text that is used, about."""
        return sum(file.text_bytes for file in self.files) / 1e6 * self._used()

    def _used(self) -> float:
        """Share of the documents that are not left out."""
        return sum(self.split.kept) / sum(self.split.totals)

    def read(self, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """(number, split, document) of every document that is not left out, in order.

        Args:
            start: number of the first document to give; files before it are not opened.

        Raises:
            InputError: a file is no longer what it was when it was scanned, or may not be read.
            RunAgain: its disk does not answer now.
        """
        first = 0  # of the file, over all files
        for at, file in enumerate(self.files):
            if first + file.documents > start:
                yield from self._read_file(at, first, start)
            first += file.documents

    def _read_file(self, at: int, first: int, start: int) -> Iterator[tuple[int, int, str]]:
        file, number = self.files[at], first
        sides = (int(side) for block in self.split.of_file(at) for side in block)
        try:
            for document in documents.read(Path(file.path), self.text_field):
                side = next(sides, LEFT_OUT)
                if side != LEFT_OUT and number >= start:
                    yield number, side, document
                number += 1
            same = number == first + file.documents and file.unchanged()
        except (BadExample, FileNotFoundError):
            same = False
        except OSError as error:
            raise disk_trouble(
                error, f"{file.path} cannot be read any more", "let it be read, and start again"
            ) from error
        if not same:
            raise InputError(f"{file.path} changed while it was being read: start again")


def prepare(
    corpus: Corpus,
    *,
    tokenizer_path: Path,
    form: Form = "sentences",
    folder: Path,
    say: Say,
    processes: int | None = None,
) -> tuple[Path, dict[str, Any]]:
    """The token cache of a corpus, built where there is none: (its folder, its manifest).

    Args:
        corpus: what to read.
        tokenizer_path: a ``tokenizer.json`` that fits the model.
        form: what to keep of the documents.
        folder: where caches lie.
        say: takes messages for the console.
        processes: that tokenise; None is one for each core, if there is work for it.

    Raises:
        InputError: a split without text, a file that changes meanwhile, or a tokenizer that loses
            text where the form is exact.
        RunAgain: a full disk, one that cannot be read now, or too little memory; what is done
            stays.
    """
    content = tokenizer_path.read_bytes()
    key = cache.digest(
        corpus.key(),
        hashlib.sha256(content).hexdigest(),
        # Caches of sentences are older than the other form: they stay valid.
        *(() if form == "sentences" else (form,)),
    )

    def build(work: Path) -> dict[str, Any]:
        write_whole(work / tokenizer.NAME, content)
        return {
            "version": _VERSION,
            "content": corpus.key(),
            **_write(corpus, work, form, say, processes),
        }

    target = folder / f"tokens-{key[:20]}"
    return target, cache.make_folder(target, build, say, resumable=True)


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
    corpus: Corpus, work: Path, form: Form, say: Say, processes: int | None
) -> dict[str, Any]:
    """Tokenise every document into the streams of both splits; returns the manifest's facts."""
    path = work / tokenizer.NAME
    words = tokenizer_file.read(path)
    if form == "exact":
        mark = specials.begin(words, str(path))
        special: dict[str, Any] = {"begin": mark}
        write_whole(work / TOKEN_BYTES, byte_level.lengths(words).tobytes())
    else:
        found = specials.find(words, str(path))
        mark, special = found.sep, found.to_json()
    size = 1 + max(words.get_vocab().values())
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    total_mb = corpus.megabytes()
    if processes is None:
        processes = min(worker_pool.cores(), int(total_mb / _MB_WORTH_A_PROCESS))
    streams = _Streams(work, dtype)
    before_mb = streams.megabytes()
    if streams.documents:
        say(f"going on with tokenising: {before_mb:,.1f} MB of text are done already")
    those = "one process" if processes <= 1 else f"{processes} processes"
    say(f"tokenising {total_mb:,.1f} MB of text in {those}")
    start = time.monotonic()
    try:
        with progress_bar.metered("tokenising", total_mb, before_mb, say) as tell:
            for after, parts in worker_pool.in_order(
                encoding.encode,
                _chunks(corpus, streams.documents),
                str(path),
                dtype.name,
                form,
                mark,
                processes=processes,
            ):
                streams.append(after, parts)
                tell(streams.megabytes())
        streams.keep()
    finally:
        streams.close()
    seconds = time.monotonic() - start
    done = streams.megabytes() - before_mb
    say(f"tokenised {done:.1f} MB of text in {seconds:.1f} s, {done / seconds:.1f} MB/s (measured)")
    for side, name in enumerate(SPLITS):
        if corpus.split.kept[side] and not streams.facts[side]["tokens"]:
            raise InputError(f"no text to tokenise in the {name} split: give more text")
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


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Streams:
    """The streams of both splits while they are written; goes on where a killed process was.

    Args:
        work: their folder.
        dtype: of the ids.

    Attributes:
        documents: number of the first document that is not in them.
        facts: of each split.
    """

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._record = work / _PROGRESS
        self._width = dtype.itemsize
        self.documents = 0
        self.facts = [{"documents": 0, "sentences": 0, "tokens": 0, "bytes": 0} for _ in SPLITS]
        if self._record.exists():
            kept = json.loads(self._record.read_text(encoding="utf-8"))
            self.documents, self.facts = kept["documents"], kept["facts"]
        self._files: list[tuple[BinaryIO, BinaryIO]] = []
        for name, facts in zip(SPLITS, self.facts, strict=True):
            tokens = _opened(work / f"{name}.tokens", facts["tokens"] * self._width)
            self._files.append((tokens, _opened(work / f"{name}.ends", facts["sentences"] * 8)))
        self._kept = -math.inf  # the first chunk is kept at once

    def megabytes(self) -> float:
        """Of text that is in them."""
        return sum(facts["bytes"] for facts in self.facts) / 1e6

    def append(self, after: int, parts: list[Part]) -> None:
        """Adds what a chunk gave; the documents before number ``after`` are in then."""
        for (tokens, ends), facts, part in zip(self._files, self.facts, parts, strict=True):
            tokens.write(part.ids)
            ends.write((part.ends + np.uint64(facts["tokens"])).tobytes())
            facts["tokens"] += len(part.ids) // self._width
            facts["sentences"] += len(part.ends)
            facts["documents"] += part.documents
            facts["bytes"] += part.text_bytes
        self.documents = after
        if time.monotonic() - self._kept >= _KEEP_EVERY_S:
            self.keep()

    def keep(self) -> None:
        """What is in them until now outlives a kill."""
        for pair in self._files:
            for file in pair:
                file.flush()
                os.fsync(file.fileno())
        write_whole(self._record, json.dumps({"documents": self.documents, "facts": self.facts}))
        self._kept = time.monotonic()

    def close(self) -> None:
        for pair in self._files:
            for file in pair:
                file.close()


def _opened(path: Path, size: int) -> BinaryIO:
    """A file cut to ``size``, to append to."""
    file = open(path, "ab")  # noqa: SIM115 - _Streams.close
    file.truncate(size)
    return file
