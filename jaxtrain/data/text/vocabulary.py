"""The tokenizer of a data set: the one that is given, or one learned from its text, once."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.text import tokenizer
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.telemetry.progress_bar import Say

# Of every rule that decides what is learned; 2 is [MASK] with the space before it.
_VERSIONS = {"wordpiece": 1, "bpe": 2, "word": 1, "byte_bpe": 1}
_CHARACTERS = 256_000_000  # text to learn a vocabulary from; more changes little


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
    """The path of the ``tokenizer.json`` to use; one that is learned stays in the cache.

    Args:
        corpora: all sources; the training documents of all of them are learned from, in proportion
            to their sizes, evenly spread, 256 million characters at most.
        vocab_size: entries to learn, or the most that a given one may have.
        kind: of tokenizer to learn.
        form: what the tokens are to keep of the text; a given one must be able to.
        given: a ``tokenizer.json``; None learns one.
        folder: where caches lie.
        say: takes messages for the console.

    Raises:
        InputError: the given one does not fit.
    """
    if given is not None:
        tokenizer.load(given, vocab_size, form)
        return given
    version = _VERSIONS[kind]
    key = cache.digest(version, [corpus.key() for corpus in corpora], vocab_size, kind)

    def build(work: Path) -> dict[str, Any]:
        say(f"learning a vocabulary of {vocab_size:,}")
        words = tokenizer.train(_sample(corpora), vocab_size, kind)
        words.save(str(work / tokenizer.NAME))
        return {"version": version}

    target = folder / f"vocabulary-{key[:20]}"
    cache.make_folder(target, build, say)
    return target / tokenizer.NAME


def _sample(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Training documents, evenly spread, up to the text that a vocabulary is learned from."""
    total = sum(corpus.characters() for corpus in corpora)
    share, rank = min(1.0, _CHARACTERS / total), 0
    for corpus in corpora:
        for _, side, document in corpus.read():
            if side == TRAIN:
                if int((rank + 1) * share) > int(rank * share):
                    yield document
                rank += 1
