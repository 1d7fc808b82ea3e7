"""Provides a data set's tokenizer: a given one, or one trained on its text and cached."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.engine import Engine
from jaxtrain.data.text import tokenizer, tokens
from jaxtrain.data.text.documents import Scanned
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.telemetry.progress_bar import Say

# Change with any rule that affects training. Since 2, [MASK] includes the space before it.
_VERSIONS = {"wordpiece": 1, "bpe": 2, "word": 1, "byte_bpe": 1}
MOST_CHARACTERS = 256_000_000
"""Text to train on; more changes little."""


def prepare(
    corpora: Sequence[Corpus],
    *,
    vocab_size: int,
    kind: tokenizer.Kind,
    form: Form = "sentences",
    given: Path | None,
    folder: Path,
    say: Say,
    engine: Engine | None = None,
    bucket: cache.InBucket | None = None,
) -> Path:
    """Returns the path of the ``tokenizer.json`` to use; trains and caches one if none is given.

    Args:
        corpora: all sources. Training uses their training documents, evenly spread, in proportion
            to their sizes, at most 256 million characters.
        vocab_size: entries to train, or the limit for a given tokenizer.
        kind: kind of tokenizer to train.
        form: which parts of the text tokens must represent; a given tokenizer is checked for it.
        given: a ``tokenizer.json``; None trains one.
        folder: folder of the caches.
        say: prints a line on the console.
        engine: reads the files, each on any node. The text is counted here, in order, so the
            vocabulary is the same.
        bucket: has the cache that ``folder`` is a copy of.

    Raises:
        InputError: the given tokenizer does not fit.
    """
    if given is not None:
        tokenizer.load(given, vocab_size, form)
        return given
    version = _VERSIONS[kind]

    def build(work: Path) -> dict[str, Any]:
        say(f"training a tokenizer with a vocabulary of {vocab_size:,}")
        texts = _sample(corpora) if engine is None else _sampled_by(engine, corpora)
        trained = tokenizer.train(texts, vocab_size, kind)
        trained.save(str(work / tokenizer.NAME))
        return {"version": version}

    target = cache_folder(corpora, vocab_size, kind, folder)
    cache.make_folder(target, build, say, bucket=bucket)
    return target / tokenizer.NAME


def cache_folder(
    corpora: Sequence[Corpus], vocab_size: int, kind: tokenizer.Kind, folder: Path
) -> Path:
    """Returns the folder of a trained tokenizer, whether or not it exists; see :func:`prepare`."""
    key = cache.digest(_VERSIONS[kind], [corpus.key() for corpus in corpora], vocab_size, kind)
    return folder / f"vocabulary-{key[:20]}"


def _sample(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yields training documents, evenly spread, up to the limit of characters."""
    fraction, rank = _fraction(corpora), 0
    for corpus in corpora:
        for _, side, document in corpus.read():
            if side == TRAIN:
                if int((rank + 1) * fraction) > int(rank * fraction):
                    yield document
                rank += 1


def _fraction(corpora: Sequence[Corpus]) -> float:
    """Returns the fraction of the training documents to train on."""
    return min(1.0, MOST_CHARACTERS / sum(corpus.characters() for corpus in corpora))


@dataclasses.dataclass(frozen=True)
class _File:
    """A file with documents to train on.

    Attributes:
        corpus: number of its corpus.
        at: its number in the corpus.
        scanned: its scan.
        rank: number of training documents before it, over all corpora.
    """

    corpus: int
    at: int
    scanned: Scanned
    rank: int


def _sampled_by(engine: Engine, corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yields the documents of :func:`_sample`, in the same order; an engine reads the files.

    Files without such a document are not read. Documents of later files wait in memory, in total
    at most the text to train on.
    """
    fraction, before = _fraction(corpora), 0
    todo = []
    for number, corpus in enumerate(corpora):
        for at in range(len(corpus.files)):
            rank, after = (before + corpus.split.used_before(one)[TRAIN] for one in (at, at + 1))
            if int(after * fraction) > int(rank * fraction):
                todo.append(_File(number, at, corpus.files[at], rank))
        before += corpus.split.kept[TRAIN]
    ready: dict[_File, list[str]] = {}
    waiting = iter(todo)
    wanted = next(waiting, None)
    for file, texts in engine.as_finished(
        _sample_file,
        todo,
        tuple(corpus.without_files() for corpus in corpora),
        fraction,
        died=lambda file: tokens.died_reading(file.scanned),
    ):
        ready[file] = texts
        while wanted in ready:
            yield from ready.pop(wanted)
            wanted = next(waiting, None)


def _sample_file(file: _File, corpora: tuple[Corpus, ...], fraction: float) -> list[str]:
    """Returns the documents of a file to train on; runs in a worker."""
    rank, found = file.rank, []
    for side, document in corpora[file.corpus].read_file(file.at, file.scanned):
        if side == TRAIN:
            if int((rank + 1) * fraction) > int(rank * fraction):
                found.append(document)
            rank += 1
    return found
