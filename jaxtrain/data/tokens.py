"""The token cache: a corpus as flat files of token ids.

Each split is one stream, ``<split>.tokens``: the tokens of its documents in order, a [SEP] after
each document, as uint16 (or uint32 for more than 65,536 ids). ``<split>.ends`` holds the positions
after each sentence as uint64. Both are written in batches and read through memory maps, so memory
does not grow with the corpus. ``tokenizer.json`` lies beside them. Where examples lie in a stream
is the matter of :mod:`jaxtrain.data.packing`.
"""

import array
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxtrain.data import cache, documents, tokenizer
from jaxtrain.data.masking import SEP
from jaxtrain.errors import BadExample, InputError

TRAIN, VAL, LEFT_OUT = 0, 1, 2
SPLITS = ("train", "val")
_VERSION = 1  # of the files and of every rule that decides what is in them: change it with those
_BATCH_CHARACTERS = 1 << 20
_TOKENIZER_CHARACTERS = 256_000_000  # text to learn a vocabulary from; more changes little
_SAY_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Good files and where each of their documents goes.

    Attributes:
        files: the files, in the order in which they are read.
        splits: for each file uint8 [documents]: TRAIN, VAL or LEFT_OUT.
        text_field: see :func:`jaxtrain.data.documents.read`.
    """

    files: list[documents.Scanned]
    splits: list[np.ndarray]
    text_field: str | None

    def key(self) -> str:
        """Digest of the content: file contents, order and split; not of names and places."""
        rows = [
            (
                file.sha256,
                Path(file.name).suffix.lower(),
                hashlib.sha256(split.tobytes()).hexdigest(),
            )
            for file, split in zip(self.files, self.splits, strict=True)
        ]
        return cache.digest(_VERSION, rows, self.text_field)

    def read(self) -> Iterator[tuple[int, str]]:
        """(split, document) of every document that is not left out, in order.

        Raises:
            InputError: a file is no longer what it was when it was scanned.
        """
        for file, split in zip(self.files, self.splits, strict=True):
            count = 0
            try:
                for document in documents.read(Path(file.path), self.text_field):
                    if count < len(split) and split[count] != LEFT_OUT:
                        yield int(split[count]), document
                    count += 1
                same = count == len(split) and file.unchanged()
            except (BadExample, OSError):
                same = False
            if not same:
                raise InputError(f"{file.path} changed while it was being read: start again")


def assign(
    counts: list[int], names: list[str], *, train_split: float, max_examples: int | None
) -> list[np.ndarray]:
    """Share documents out to training and validation.

    Several files are split by a hash of their names, one file by a hash of the document's number;
    each split gets at least one file or document. So a file that is added moves no other one.

    Args:
        counts: documents of each file.
        names: relative names of the files.
        train_split: share that trains, in expectation.
        max_examples: documents to keep over both splits, spread evenly over the corpus.

    Returns:
        For each file uint8 [documents] of TRAIN, VAL or LEFT_OUT.

    Raises:
        InputError: fewer than two documents.
    """
    if sum(counts) < 2:
        raise InputError(
            f"{', '.join(names[:3])} has {sum(counts)} document, training and validation need one "
            "each: give more text, or --data.val_path"
        )
    if len(names) > 1:
        to_val = _choose_val(np.array([_name_hash(name) for name in names]), train_split)
        split = np.repeat(to_val, counts)
    else:
        split = _choose_val(_number_hash(sum(counts)), train_split)
    result = np.where(split, VAL, TRAIN).astype(np.uint8)
    if max_examples is not None and max_examples < len(result):
        in_val = int(np.count_nonzero(result == VAL))
        keep_val = round(max_examples * in_val / len(result))
        keep_val = min(max(keep_val, 1), max_examples - 1, in_val)
        keep_train = min(max_examples - keep_val, len(result) - in_val)
        for value, keep in ((TRAIN, keep_train), (VAL, max_examples - keep_train)):
            _thin_out(result, value, keep)
    return np.split(result, np.cumsum(counts)[:-1])


def assign_all(counts: list[int], value: int, max_examples: int | None) -> list[np.ndarray]:
    """Give every document to one split, or ``max_examples`` of them spread evenly."""
    result = np.full(sum(counts), value, np.uint8)
    if max_examples is not None:
        _thin_out(result, value, max_examples)
    return np.split(result, np.cumsum(counts)[:-1])


def _thin_out(split: np.ndarray, value: int, keep: int) -> None:
    """Leave ``keep`` documents of a split, evenly spread, in place."""
    at = np.flatnonzero(split == value)
    if keep < len(at):
        rank = np.arange(len(at))
        split[at[(rank + 1) * keep // len(at) == rank * keep // len(at)]] = LEFT_OUT


def _choose_val(fractions: np.ndarray, train_split: float) -> np.ndarray:
    to_val = fractions >= train_split
    if not to_val.any():
        to_val[np.argmax(fractions)] = True
    if to_val.all():
        to_val[np.argmin(fractions)] = False
    return to_val


def _name_hash(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _number_hash(count: int) -> np.ndarray:
    """A number in [0, 1) for each of 0..count-1: SplitMix64's output (Steele et al. 2014)."""
    x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53


def prepare(
    corpus: Corpus,
    *,
    vocab_size: int,
    tokenizer_path: Path | None,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[Path, dict[str, Any]]:
    """The token cache of a corpus, built where there is none: (its folder, its manifest).

    Args:
        corpus: what to read.
        vocab_size: entries of the vocabulary to learn, or the most that a given one may have.
        tokenizer_path: a ``tokenizer.json`` to use; None learns one from the training split.
        folder: where caches lie.
        say: takes messages for the console.
    """
    if tokenizer_path is None:
        key = cache.digest(corpus.key(), "learned", vocab_size)
    else:
        tokenizer.load(tokenizer_path, vocab_size)
        key = cache.digest(corpus.key(), hashlib.sha256(tokenizer_path.read_bytes()).hexdigest())

    def build(work: Path) -> dict[str, Any]:
        if tokenizer_path is not None:
            words = tokenizer.load(tokenizer_path, vocab_size)
        else:
            say(f"learning a vocabulary of {vocab_size}")
            words = tokenizer.train(_sample(corpus), vocab_size)
        words.save(str(work / "tokenizer.json"))
        return {"version": _VERSION, "content": corpus.key(), **_write(corpus, words, work, say)}

    target = folder / f"tokens-{key[:20]}"
    return target, cache.make_folder(target, build, say)


def _sample(corpus: Corpus) -> Iterator[str]:
    """Training documents, evenly spread, up to the text that a vocabulary is learned from."""
    total = sum(file.characters for file in corpus.files)
    share = min(1.0, _TOKENIZER_CHARACTERS / total)
    rank = 0
    for split, document in corpus.read():
        if split == TRAIN:
            if int((rank + 1) * share) > int(rank * share):
                yield document
            rank += 1


def _write(
    corpus: Corpus, words: tokenizers.Tokenizer, work: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokenise every document into the streams of both splits; returns the manifest's facts."""
    size = 1 + max(words.get_vocab().values())
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    streams = [_Stream(work, name, words, dtype) for name in SPLITS]
    megabytes = sum(file.size for file in corpus.files) / 1e6
    say(f"tokenising {megabytes:.1f} MB of files")
    start = told = time.monotonic()
    try:
        for split, document in corpus.read():
            streams[split].add(document)
            if time.monotonic() - told > _SAY_EVERY_S:
                told = time.monotonic()
                done = sum(stream.bytes for stream in streams) / 1e6
                say(f"tokenised {done:.0f} MB of text, {done / (told - start):.1f} MB/s")
        for stream in streams:
            stream.flush()
    finally:
        for stream in streams:
            stream.close()
    for stream, name in zip(streams, SPLITS, strict=True):
        if stream.tokens == 0:
            raise InputError(f"no text to tokenise in the {name} split: give more text")
    seconds = time.monotonic() - start
    done = sum(stream.bytes for stream in streams) / 1e6
    say(f"tokenised {done:.1f} MB of text in {seconds:.1f} s, {done / seconds:.1f} MB/s (measured)")
    return {
        "dtype": dtype.name,
        "vocabulary": size,
        "tokenizer": hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest(),
        "seconds": round(seconds, 3),
        "splits": {name: stream.facts() for name, stream in zip(SPLITS, streams, strict=True)},
    }


class _Stream:
    """One split while it is written."""

    def __init__(self, work: Path, name: str, words: tokenizers.Tokenizer, dtype: np.dtype) -> None:
        self._words, self._dtype = words, dtype
        # So that a literal "[SEP]" in the text becomes ordinary pieces, not a special token.
        self._words.encode_special_tokens = True
        self._tokens = open(work / f"{name}.tokens", "wb")  # noqa: SIM115 - see close()
        self._ends = open(work / f"{name}.ends", "wb")  # noqa: SIM115
        self._hash = hashlib.sha256()
        self._waiting: list[str] = []
        self._characters = 0
        self.documents = self.sentences = self.tokens = self.bytes = 0

    def add(self, document: str) -> None:
        self._waiting.append(document)
        self._characters += len(document)
        self.bytes += len(document.encode())
        if self._characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Tokenise what waits, on all cores, and write it."""
        if not self._waiting:
            return
        cut = [documents.sentences(document) for document in self._waiting]
        self._waiting, self._characters = [], 0
        encoded = iter(
            self._words.encode_batch_fast(
                [sentence for parts in cut for sentence in parts], add_special_tokens=False
            )
        )
        ids = array.array("I")
        ends = array.array("Q")
        for parts in cut:
            before = len(ids)
            for _ in parts:
                sentence = next(encoded).ids
                if sentence:  # control characters alone give no token
                    ids.extend(sentence)
                    ends.append(self.tokens + len(ids))
            if len(ids) > before:
                ids.append(SEP)
                self.documents += 1
        data = np.frombuffer(ids, np.uint32).astype(self._dtype).tobytes()
        self._hash.update(data)
        self._tokens.write(data)
        self._ends.write(ends.tobytes())
        self.tokens += len(ids)
        self.sentences += len(ends)

    def close(self) -> None:
        self._tokens.close()
        self._ends.close()

    def facts(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "sentences": self.sentences,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self._hash.hexdigest(),
        }
