"""Provides a data set's tokenizer: a given one, or one trained on its text and cached."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.text import tokenizer
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.telemetry.progress_bar import Say

# Change with any rule that affects training. Since 2, [MASK] includes the space before it.
_VERSIONS = {"wordpiece": 1, "bpe": 2, "word": 1, "byte_bpe": 1}
_CHARACTERS = 256_000_000  # text to train on; more changes little


def prepare(
    corpora: Sequence[Corpus],
    *,
    vocab_size: int,
    kind: tokenizer.Kind,
    form: Form = "sentences",
    given: Path | None,
    folder: Path,
    say: Say,
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

    Raises:
        InputError: the given tokenizer does not fit.
    """
    if given is not None:
        tokenizer.load(given, vocab_size, form)
        return given
    version = _VERSIONS[kind]
    key = cache.digest(version, [corpus.key() for corpus in corpora], vocab_size, kind)

    def build(work: Path) -> dict[str, Any]:
        say(f"training a tokenizer with a vocabulary of {vocab_size:,}")
        trained = tokenizer.train(_sample(corpora), vocab_size, kind)
        trained.save(str(work / tokenizer.NAME))
        return {"version": version}

    target = folder / f"vocabulary-{key[:20]}"
    cache.make_folder(target, build, say)
    return target / tokenizer.NAME


def _sample(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Yields training documents, evenly spread, up to the limit of characters."""
    total = sum(corpus.characters() for corpus in corpora)
    fraction, rank = min(1.0, _CHARACTERS / total), 0
    for corpus in corpora:
        for _, side, document in corpus.read():
            if side == TRAIN:
                if int((rank + 1) * fraction) > int(rank * fraction):
                    yield document
                rank += 1
