"""Provides a data set's tokenizer: a given one, or one trained on its text and cached."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.text import tokenizer
from jaxtrain.data.text.rows import Skipped
from jaxtrain.data.text.shards import Shard, digest
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import cache, disks
from jaxtrain.storage.atomic import write_whole
from jaxtrain.terminal import Say

MOST_CHARACTERS = 128_000_000
"""Text to train on, which takes half a minute; more changes little."""
_MOST_SHARDS = 256  # that the text comes from
_BYTES_PER_DOCUMENT = 4096  # typical, of web pages
_VERSION = 6  # changes with any rule that affects training


Sample = tuple[Sequence[tuple[Shard, bool]], int]
"""Text to train on: shards, each with whether its documents are split, so that some validate; and
the number that the digests of documents for training are below."""


def prepare(
    samples: Sequence[Sample],
    *,
    vocab_size: int,
    kind: tokenizer.Kind,
    lossless: bool,
    tokenizer_path: Path | None,
    folder: Path,
    say: Say,
    bucket: cache.CacheBucket | None = None,
) -> Path:
    """Returns the path of the ``tokenizer.json`` to use; trains and caches one if none is given.

    Args:
        vocab_size: entries to train, or the limit for a given tokenizer.
        lossless: whether tokens must have every byte of the text; a given tokenizer is checked.
        tokenizer_path: a ``tokenizer.json``; None trains one.

    Raises:
        InputError: the given tokenizer does not fit, or the vocabulary is too small for the kind.
    """
    if tokenizer_path is not None:
        tokenizer.load(tokenizer_path, vocab_size, lossless=lossless)
        return tokenizer_path
    tokenizer.check_size_for(kind, vocab_size)

    def build(work: Path) -> dict[str, Any]:
        say(f"training a tokenizer with a vocabulary of {vocab_size:,}")
        trained = tokenizer.train(_documents(samples), vocab_size, kind)
        # Not with save(), which takes only paths in UTF-8.
        write_whole(work / tokenizer.NAME, trained.to_str(pretty=True))
        return {"version": _VERSION}

    text = [
        ([(shard.key(), is_split) for shard, is_split in shards], below)
        for shards, below in samples
    ]
    target = folder / f"vocabulary-{cache.digest(_VERSION, text, vocab_size, kind)[:20]}"
    cache.make_folder(target, build, say, bucket=bucket)
    return target / tokenizer.NAME


def first_shards(shards: Sequence[Shard], max_documents: int, folder: Path, say: Say) -> int:
    """Returns how many of the first shards have ``max_documents`` documents.

    Their documents are counted, once, if the text is much more than so many documents may have.
    """
    if sum(shard.size for shard in shards) <= max_documents * _BYTES_PER_DOCUMENT:
        return len(shards)

    def build(work: Path) -> dict[str, Any]:
        say(f"looking for {max_documents:,} documents")
        documents = 0
        for number, shard in enumerate(shards, 1):
            documents += sum(1 for _ in _read(shard, []))
            if documents >= max_documents:
                return {"shards": number}
        return {"shards": len(shards)}

    key = cache.digest(_VERSION, [shard.key() for shard in shards], max_documents)
    return int(cache.make_folder(folder / f"first-{key[:20]}", build, say)["shards"])


def _documents(samples: Sequence[Sample]) -> Iterator[str]:
    """Yields the documents to train on: the first ones of each of evenly spread shards.

    Each side of a source that is split has a document. If no digest says so, the greatest of a
    document validates, or the least trains, so these two documents wait until that is known.
    """
    everything = [shard for shards, _ in samples for shard, _ in shards]
    step = max(1, -(-len(everything) // _MOST_SHARDS))
    bad = list[BadExample]()
    total = sum(shard.size for shard in everything[::step])
    number = 0
    for shards, below in samples:
        least = greatest = (0, "")
        some_validate = some_train = False
        for shard, is_split in shards:
            number += 1
            if (number - 1) % step:
                continue
            characters = 0
            for document in _read(shard, bad):
                key = digest(document.encode())
                if key >= below:
                    some_validate = True
                    least = min(least, (key, document)) if least[1] else (key, document)
                    continue
                if is_split and key >= greatest[0]:
                    (key, document), greatest = greatest, (key, document)
                if document:
                    some_train = True
                    characters += len(document)
                    yield document
                if characters >= MOST_CHARACTERS * shard.size / max(1, total):
                    break
        if some_validate and greatest[1]:
            yield greatest[1]
        elif not some_train and (alone := greatest[1] or least[1]):
            yield alone
        elif not some_train:
            broken = bad and f"the first of {len(bad):,} broken files is {bad[0]}"
            raise InputError(
                f"{shards[0][0].name}: no text to train a tokenizer on: "
                + (broken or "add text, or pass other files")
            )


def _read(shard: Shard, bad: list[BadExample]) -> Iterator[str]:
    """Yields the documents of a shard; adds broken files, which tokenizing lists, to ``bad``."""
    for file_range in shard.file_ranges:
        try:
            yield from file_range.read(Skipped())
        except BadExample as error:
            bad.append(error)
        except OSError as error:
            failure = disks.unreadable(file_range.file.path, error)
            if isinstance(failure, disks.DiskAway):
                raise failure from error
            bad.append(failure)
