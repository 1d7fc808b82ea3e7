"""Provides a data set's tokenizer: a given one, or one trained on its text and cached."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import cache, worker_count, worker_pool
from jaxtrain.data.engine import Engine
from jaxtrain.data.text import tokenizer, tokens, word_counts
from jaxtrain.data.text.documents import Scanned
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.storage.atomic import write_whole
from jaxtrain.telemetry.progress_bar import Say

# Change with any rule that affects training. Since bpe 2, [MASK] includes the space before it.
# Counting in parts, which changes what is forgotten above a million words, added 1 to each. Since
# wordpiece 3 and word 3, words of more than 100 characters are split, not omitted.
_VERSIONS = {"wordpiece": 3, "bpe": 3, "word": 3, "byte_bpe": 2}
MOST_CHARACTERS = 256_000_000
"""Text to train on; more changes little."""
_CHARACTERS_PER_PROCESS = 32_000_000  # for less, starting a process costs more time than it saves
_READ_BYTES = 2**28  # of the files of a task, which are read to their ends


def prepare(
    corpora: Sequence[Corpus],
    *,
    vocab_size: int,
    kind: tokenizer.Kind,
    form: Form = "sentences",
    given: Path | None,
    folder: Path,
    say: Say,
    processes: int | None = None,
    engine: Engine | None = None,
    bucket: cache.CacheBucket | None = None,
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
        processes: number of processes that count words; None uses one per core, if there is enough
            text.
        engine: reads the files and counts their words on any node instead.
        bucket: has the cache that ``folder`` is a copy of.

    Raises:
        InputError: the given tokenizer does not fit, or the vocabulary is too small for the kind.
    """
    if given is not None:
        tokenizer.load(given, vocab_size, form)
        return given
    tokenizer.check_room(vocab_size, kind)
    version = _VERSIONS[kind]

    def build(work: Path) -> dict[str, Any]:
        say(f"training a tokenizer with a vocabulary of {vocab_size:,}")
        words = _count(corpora, kind, processes, engine)
        trained = tokenizer.train_on(words, vocab_size, kind)
        # Not with save(), which takes only paths in UTF-8.
        write_whole(work / tokenizer.NAME, trained.to_str(pretty=True))
        return {"version": version}

    target = cache_folder(corpora, vocab_size, kind, folder)
    cache.make_folder(target, build, say, bucket=bucket)
    return target / tokenizer.NAME


def cache_folder(
    corpora: Sequence[Corpus], vocab_size: int, kind: tokenizer.Kind, folder: Path
) -> Path:
    """Returns the folder of a trained tokenizer, whether or not it exists; see :func:`prepare`."""
    keys = [corpus.key() for corpus in _for_training(corpora)]
    key = cache.digest(_VERSIONS[kind], keys, vocab_size, kind)
    return folder / f"vocabulary-{key[:20]}"


def _for_training(corpora: Sequence[Corpus]) -> list[Corpus]:
    """Returns the training documents: with other validation text, the tokenizer is the same."""
    return [corpus.for_training() for corpus in corpora if corpus.split.kept[TRAIN]]


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


def _count(
    corpora: Sequence[Corpus], kind: tokenizer.Kind, processes: int | None, engine: Engine | None
) -> Counter[str]:
    """Counts the words of training documents, evenly spread, up to the limit of characters.

    The result is the same for any number of processes and with any engine: it depends only on the
    parts, and these only on the training documents.
    """
    corpora = _for_training(corpora)
    fraction = _fraction(corpora)
    tasks = _tasks(corpora, fraction)
    if engine is not None:
        return word_counts.merge(_counted_by(engine, tasks, corpora, fraction, kind))
    characters = fraction * sum(corpus.characters() for corpus in corpora)
    if processes is None:
        processes = min(worker_count.cores(), int(characters / _CHARACTERS_PER_PROCESS))
    parts = worker_pool.in_order(
        tokenizer.count,
        (part for task in tasks for part in _parts(task, corpora, fraction)),
        kind,
        processes=min(processes, int(characters / word_counts.PART_CHARACTERS)),
    )
    return word_counts.merge(parts)


def _tasks(corpora: Sequence[Corpus], fraction: float) -> Iterator[list[_File]]:
    """Yields lists of files, in order, with a part of the text or more; omits files without any."""
    before, task, characters, size = 0, list[_File](), 0.0, 0
    for number, corpus in enumerate(corpora):
        ranks = [before + corpus.split.used_before(at)[TRAIN] for at in range(len(corpus.files))]
        before += corpus.split.kept[TRAIN]
        for at, (rank, after) in enumerate(itertools.pairwise([*ranks, before])):
            chosen = int(after * fraction) - int(rank * fraction)
            if not chosen:
                continue
            file = corpus.files[at]
            task.append(_File(number, at, file, rank))
            characters += file.characters * chosen / file.documents
            size += file.size
            if characters >= word_counts.PART_CHARACTERS or size >= _READ_BYTES:
                yield task
                task, characters, size = [], 0.0, 0
    if task:
        yield task


def _parts(task: list[_File], corpora: Sequence[Corpus], fraction: float) -> Iterator[list[str]]:
    """Yields the documents of a task to train on, in parts of a bounded length."""
    part, characters = list[str](), 0
    for file in task:
        rank = file.rank
        for side, document in corpora[file.corpus].read_file(file.at, file.scanned):
            if side != TRAIN:
                continue
            rank += 1
            if int(rank * fraction) > int((rank - 1) * fraction):
                part.append(document)
                characters += len(document)
                if characters >= word_counts.PART_CHARACTERS:
                    yield part
                    part, characters = [], 0
    if part:
        yield part


def _counted_by(
    engine: Engine,
    tasks: Iterable[list[_File]],
    corpora: Sequence[Corpus],
    fraction: float,
    kind: tokenizer.Kind,
) -> Iterator[dict[str, int]]:
    """Yields the counts of all parts, in order; an engine counts the parts of each task.

    Counts of later tasks wait in memory as JSON, which takes less than their text.
    """
    ready: dict[int, list[bytes]] = {}
    wanted = 0
    for (number, _), counts in engine.as_finished(
        _count_task,
        enumerate(tasks),
        tuple(corpus.without_files() for corpus in corpora),
        fraction,
        kind,
        died=lambda item: tokens.died_reading(*(file.scanned for file in item[1])),
    ):
        ready[number] = counts
        while wanted in ready:
            yield from map(json.loads, ready.pop(wanted))
            wanted += 1


def _count_task(
    item: tuple[int, list[_File]],
    corpora: tuple[Corpus, ...],
    fraction: float,
    kind: tokenizer.Kind,
) -> list[bytes]:
    """Counts the words of each part of a task; runs in a worker."""
    for file in item[1]:
        tokens.check_seen(file.scanned)
    return [
        json.dumps(tokenizer.count(part, kind), ensure_ascii=False).encode()
        for part in _parts(item[1], corpora, fraction)
    ]
