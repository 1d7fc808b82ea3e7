"""BLiMP: does a language model prefer the acceptable one of two sentences that differ little?

Its folder, ``data`` of https://github.com/alexwarstadt/blimp, is not part of jaxtrain: 67 files of
1,000 pairs, a paradigm each. A line is an object with ``sentence_good``, ``sentence_bad``, and
``field``. The more probable sentence is the model's answer; if both are equally probable, half an
answer is right (https://arxiv.org/abs/1912.00582). A causal model gives the probability of all
tokens of a sentence, a masked one its pseudo-log-likelihood
(https://arxiv.org/abs/1910.14659): the sum over its tokens, one masked at a time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.errors import InputError, first_line
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.storage import atomic

GOOD, BAD, _FIELD = "sentence_good", "sentence_bad", "field"
_MOST_BYTES = 2**26

MODELS = ("n-gram", "LSTM", "Transformer-XL", "GPT-2")
PUBLISHED = MappingProxyType(
    {
        "morphology": (0.654, 0.847, 0.813, 0.926),
        "syntax": (0.615, 0.648, 0.637, 0.794),
        "semantics": (0.509, 0.622, 0.628, 0.780),
        "syntax_semantics": (0.620, 0.649, 0.699, 0.806),
        "mean": (0.612, 0.698, 0.696, 0.830),
    }
)
"""Accuracies of :data:`MODELS`: means over the paradigms of each field, and over all of them."""
SOURCE = "https://github.com/alexwarstadt/blimp, raw_results/summary/models_summary.jsonl"


class Pair(NamedTuple):
    """Two sentences."""

    good: str
    bad: str


@dataclasses.dataclass(frozen=True)
class Paradigm:
    """The pairs of a file.

    Attributes:
        name: of the file, without its suffix.
    """

    name: str
    field: str
    pairs: list[Pair]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """A result.

    Attributes:
        accuracy: fraction of pairs whose acceptable sentence is the more probable one; for several
            paradigms, the mean of theirs.
    """

    name: str
    field: str
    pairs: int
    accuracy: float


@dataclasses.dataclass(frozen=True)
class BlimpScore:
    """The result of all paradigms.

    Attributes:
        paradigms: the result of each.
    """

    accuracy: float
    fields: list[Accuracy]
    paradigms: list[Accuracy]


def is_blimp(path: Path) -> bool:
    """Returns whether a path is a folder of such files, by the first line of the first one."""
    if not path.is_dir() or not (files := sorted(path.glob("*.jsonl"))):
        return False
    try:
        with atomic.open_regular(files[0]) as file:
            first = atomic.parse_json(file.readline(2**16))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {GOOD, BAD} <= first.keys()


def read(folder: Path, max_examples: int | None = None) -> list[Paradigm]:
    """Reads the pairs.

    Args:
        max_examples: pairs per paradigm, the first ones; None is all.
    """
    paradigms, problems = list[Paradigm](), list[str]()
    for file in sorted(folder.glob("*.jsonl")):
        try:
            paradigms.append(_paradigm(file, max_examples))
        except InputError as error:
            problems += error.messages
    if problems:
        raise InputError(*problems)
    return paradigms


def _paradigm(file: Path, max_examples: int | None) -> Paradigm:
    try:
        lines = atomic.read_regular(file, _MOST_BYTES).decode().splitlines()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file} cannot be read: {first_line(error)}") from None
    pairs, field = list[Pair](), ""
    for number, line in enumerate(lines[:max_examples], 1):
        location = f"{file}, line {number}"
        try:
            content: Any = atomic.parse_json(line)
        except ValueError as error:
            raise InputError(f"{location}: {error}: write one JSON object per line") from None
        texts = [
            content.get(name) if isinstance(content, dict) else None for name in (GOOD, BAD, _FIELD)
        ]
        for name, text in zip((GOOD, BAD, _FIELD), texts, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{location}: {name} is {text!r:.60}: write a text")
        good, bad, field = (str(text) for text in texts)
        pairs.append(Pair(good, bad))
    if not pairs:
        raise InputError(f"{file} has no pairs: remove the file")
    return Paradigm(file.stem, field.replace("/", "_"), pairs)  # one file has syntax/semantics


def score(
    model: CausalModel | MaskedModel,
    paradigms: Sequence[Paradigm],
    rows: int,
    each: Callable[[int, int], None],
) -> BlimpScore:
    """Measures a model."""
    results, scored = list[Accuracy](), 0
    total = sum(len(paradigm.pairs) for paradigm in paradigms)
    for paradigm in paradigms:
        # Each text once: the same text is exactly as probable in both places.
        texts = list(dict.fromkeys(text for pair in paradigm.pairs for text in pair))
        try:
            values = model.log_probabilities(texts, rows)
        except InputError as error:
            raise InputError(f"{paradigm.name}.jsonl: {error}") from error
        of = dict(zip(texts, values.tolist(), strict=True))
        right = [np.sign(of[good] - of[bad]) / 2 + 0.5 for good, bad in paradigm.pairs]
        accuracy = float(np.mean(right))
        results.append(Accuracy(paradigm.name, paradigm.field, len(right), accuracy))
        scored += len(right)
        each(scored, total)
    fields = [
        _mean(field, [result for result in results if result.field == field])
        for field in dict.fromkeys(result.field for result in results)
    ]
    return BlimpScore(_mean("mean", results).accuracy, fields, results)


def _mean(name: str, results: Sequence[Accuracy]) -> Accuracy:
    pairs = sum(result.pairs for result in results)
    return Accuracy(name, name, pairs, float(np.mean([result.accuracy for result in results])))


def rows_of(score: BlimpScore) -> Iterable[tuple[str, ...]]:
    """Returns a table: the accuracy of each field and the mean, with those published beside it."""
    yield ("field", "paradigms", "pairs", "accuracy", *MODELS)
    for result in (*score.fields, _mean("mean", score.paradigms)):
        count = sum(result.name in (paradigm.field, "mean") for paradigm in score.paradigms)
        published = PUBLISHED.get(result.name, (None,) * len(MODELS))
        cells = ("-" if value is None else f"{value:.3f}" for value in published)
        yield (result.name, str(count), f"{result.pairs:,}", f"{result.accuracy:.4f}", *cells)
