"""The token cache: a corpus as flat files of token ids.

Each split is one stream, ``<split>.tokens``: the tokens of its documents in order, a [SEP] after
each document, as uint16 (or uint32 for more than 65,536 ids). ``<split>.ends`` holds the positions
after each sentence as uint64. Both are read through memory maps, so memory does not grow with the
corpus. ``tokenizer.json`` lies beside them. Where examples lie in a stream is the matter of
:mod:`jaxtrain.data.packing`.

The corpus is tokenised in pieces of about a megabyte, on all cores, and what they give is appended
to the streams in the order of the text. ``progress.json`` says how far the streams are complete:
what a killed process had finished up to there is not done again, and the tokens are the same
whatever is killed and however many processes work.
"""

import array
import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers

from jaxtrain.data import cache, crew, documents, meter, specials, tokenizer
from jaxtrain.data.splitting import LEFT_OUT, SPLITS, Split
from jaxtrain.errors import BadExample, InputError
from jaxtrain.files import write_whole

_VERSION = 2  # of the files and of every rule that decides what is in them: change it with those
_PIECE_CHARACTERS = 1 << 20
_MB_WORTH_A_PROCESS = 8.0  # below, starting it takes longer than what it saves
_KEEP_EVERY_S = 2.0  # what a kill costs, at most
_PROGRESS = "progress.json"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Good files and where each of their documents goes.

    Attributes:
        files: the files, in the order in which they are read.
        split: the side of each of their documents.
        text_field: see :func:`jaxtrain.data.documents.read`.
    """

    files: list[documents.Scanned]
    split: Split
    text_field: str | None

    def key(self) -> str:
        """Digest of the content: file contents, order and split; not of names and places."""
        rows = [(file.sha256, Path(file.name).suffix.lower()) for file in self.files]
        return cache.digest(_VERSION, rows, self.split.key(), self.text_field)

    def megabytes(self) -> float:
        """Of text that is used, about: characters, as if each were a byte."""
        total = sum(file.characters for file in self.files)
        return total / 1e6 * sum(self.split.kept) / sum(self.split.totals)

    def read(self, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """(number, split, document) of every document that is not left out, in order.

        Args:
            start: number of the first document to give; files before it are not opened.

        Raises:
            InputError: a file is no longer what it was when it was scanned.
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
        except (BadExample, OSError):
            same = False
        if not same:
            raise InputError(f"{file.path} changed while it was being read: start again")


def prepare(
    corpus: Corpus, *, tokenizer_path: Path, folder: Path, say: Say, processes: int | None = None
) -> tuple[Path, dict[str, Any]]:
    """The token cache of a corpus, built where there is none: (its folder, its manifest).

    Args:
        corpus: what to read.
        tokenizer_path: a ``tokenizer.json`` that fits the model.
        folder: where caches lie.
        say: takes messages for the console.
        processes: that tokenise; None is one for each core, if there is work for it.

    Raises:
        InputError: a split without text, or a file that changes meanwhile.
        RunAgain: a full disk, or too little memory; what is done stays.
    """
    content = tokenizer_path.read_bytes()
    key = cache.digest(corpus.key(), hashlib.sha256(content).hexdigest())

    def build(work: Path) -> dict[str, Any]:
        write_whole(work / tokenizer.NAME, content)
        return {
            "version": _VERSION,
            "content": corpus.key(),
            **_write(corpus, work, say, processes),
        }

    target = folder / f"tokens-{key[:20]}"
    return target, cache.make_folder(target, build, say, resumable=True)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Documents to tokenise together.

    Attributes:
        texts: (split, document) in order.
        after: number of the first document behind them.
    """

    texts: list[tuple[int, str]]
    after: int


@dataclasses.dataclass
class _Part:
    """What a piece adds to one split.

    Attributes:
        ids: tokens, as bytes of the stream's dtype.
        ends: uint64 positions after each sentence, from the part's begin.
        documents: with text in them.
        text_bytes: of the documents, as UTF-8.
    """

    ids: bytes
    ends: np.ndarray
    documents: int
    text_bytes: int


def _pieces(corpus: Corpus, start: int) -> Iterator[_Piece]:
    texts: list[tuple[int, str]] = []
    characters = after = 0
    for number, side, document in corpus.read(start):
        texts.append((side, document))
        characters += len(document)
        after = number + 1
        if characters >= _PIECE_CHARACTERS:
            yield _Piece(texts, after)
            texts, characters = [], 0
    if texts:
        yield _Piece(texts, after)


@functools.lru_cache(maxsize=1)
def _words(path: str) -> tokenizers.Tokenizer:
    words = tokenizers.Tokenizer.from_file(path)
    words.no_padding()
    words.no_truncation()
    # So that a literal "[SEP]" in the text becomes ordinary pieces, not a special token.
    words.encode_special_tokens = True
    return words


def _encode(piece: _Piece, path: str, dtype: str, sep: int) -> tuple[int, list[_Part]]:
    """Tokenise a piece: the number of the document behind it, and what each split gets."""
    parts = []
    for side in range(len(SPLITS)):
        texts = [text for its_side, text in piece.texts if its_side == side]
        cut = [documents.sentences(text) for text in texts]
        encoded = iter(
            _words(path).encode_batch_fast(
                [sentence for sentences in cut for sentence in sentences], add_special_tokens=False
            )
        )
        ids, ends, count = array.array("I"), array.array("Q"), 0
        for sentences in cut:
            before = len(ids)
            for _ in sentences:
                sentence = next(encoded).ids
                if sentence:  # control characters alone give no token
                    ids.extend(sentence)
                    ends.append(len(ids))
            if len(ids) > before:
                ids.append(sep)
                count += 1
        parts.append(
            _Part(
                ids=np.frombuffer(ids, np.uint32).astype(dtype).tobytes(),
                ends=np.frombuffer(ends, np.uint64).copy(),
                documents=count,
                text_bytes=sum(len(text.encode()) for text in texts),
            )
        )
    return piece.after, parts


def _write(corpus: Corpus, work: Path, say: Say, processes: int | None) -> dict[str, Any]:
    """Tokenise every document into the streams of both splits; returns the manifest's facts."""
    path = work / tokenizer.NAME
    words = _words.__wrapped__(str(path))
    found = specials.find(words, str(path))
    size = 1 + max(words.get_vocab().values())
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    total_mb = corpus.megabytes()
    if processes is None:
        processes = min(crew.cores(), int(total_mb / _MB_WORTH_A_PROCESS))
    streams = _Streams(work, dtype)
    before_mb = streams.megabytes()
    if streams.documents:
        say(f"going on with tokenising: {before_mb:,.1f} MB of text are done already")
    say(f"tokenising {total_mb:,.1f} MB of text with {max(processes, 1)} processes")
    start = time.monotonic()
    try:
        with meter.metered("tokenising", total_mb, before_mb, say) as tell:
            for after, parts in crew.in_order(
                _encode,
                _pieces(corpus, streams.documents),
                str(path),
                dtype.name,
                found.sep,
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
        "specials": found.to_json(),
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
        self._kept = -math.inf  # the first piece is kept at once

    def megabytes(self) -> float:
        """Of text that is in them."""
        return sum(facts["bytes"] for facts in self.facts) / 1e6

    def append(self, after: int, parts: list[_Part]) -> None:
        """Adds what a piece gave; the documents before number ``after`` are in then."""
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
