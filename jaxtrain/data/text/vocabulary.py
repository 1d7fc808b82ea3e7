"""Provides a data set's tokenizer: a given one, or one trained on its text and cached."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.text import tokenizer
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.storage.atomic import write_whole
from jaxtrain.telemetry.progress_bar import Say

_VERSION = 4  # changes with any rule that affects training
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
        bucket: has the cache that ``folder`` is a copy of.

    Raises:
        InputError: the given tokenizer does not fit, or the vocabulary is too small for the kind.
    """
    if given is not None:
        tokenizer.load(given, vocab_size, form)
        return given
    tokenizer.check_size_for(kind, vocab_size)
    # With other validation text, the tokenizer is the same.
    training = [corpus.for_training() for corpus in corpora if corpus.split.kept[TRAIN]]

    def build(work: Path) -> dict[str, Any]:
        say(f"training a tokenizer with a vocabulary of {vocab_size:,}")
        trained = tokenizer.train(_documents(training), vocab_size, kind)
        # Not with save(), which takes only paths in UTF-8.
        write_whole(work / tokenizer.NAME, trained.to_str(pretty=True))
        return {"version": _VERSION}

    key = cache.digest(_VERSION, [corpus.key() for corpus in training], vocab_size, kind)
    target = folder / f"vocabulary-{key[:20]}"
    cache.make_folder(target, build, say, bucket=bucket)
    return target / tokenizer.NAME


def _documents(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yields documents to train on, evenly spread, up to the limit of characters."""
    fraction = min(1.0, MOST_CHARACTERS / sum(corpus.characters() for corpus in corpora))
    rank = 0
    for corpus in corpora:
        for _, side, document in corpus.read():
            if side == TRAIN:
                rank += 1
                if int(rank * fraction) > int((rank - 1) * fraction):
                    yield document
