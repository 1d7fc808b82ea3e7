"""Measures language models on a text, on CORE, or on BLiMP: its files say which of them data are.

Bits per byte and pseudo-perplexity are computed in :mod:`jaxtrain.inference.language_model` and
:mod:`jaxtrain.inference.fill_mask`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data.text import documents
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.evaluation import blimp, core_tasks
from jaxtrain.inference.evaluation.blimp import BlimpScore
from jaxtrain.inference.evaluation.core_tasks import CoreScore
from jaxtrain.inference.fill_mask import MaskedModel, MaskedScore
from jaxtrain.inference.language_model import CausalModel, TextScore
from jaxtrain.models.contract import Task

KINDS: dict[Task, type[MaskedModel] | type[CausalModel]] = {
    "fill": MaskedModel,
    "generate": CausalModel,
}
"""A model's task, and the class that uses it."""
ROWS = 16
"""The usual batch size, in sequences."""

Each = Callable[[int, int], None]
"""Receives how much is measured, and how much there is."""


class Measurement(NamedTuple):
    """What measures a model.

    Attributes:
        unit: what is counted.
        score: measures a model of the kind, with a batch size.
    """

    unit: str
    score: Callable[[Any, int, Each], CoreScore | BlimpScore | TextScore | MaskedScore]


def measurement(
    kind: type[MaskedModel] | type[CausalModel],
    data: Path,
    *,
    text_field: str | None,
    max_tokens: int | None,
    max_examples: int | None,
) -> Measurement:
    """Returns what measures a kind of model on data; reads a folder, before a model is loaded.

    Raises:
        InputError: the data cannot be read, or a limit is not one of such data; so does a
            measurement if the data have no token.
    """
    of_text = {"text-field": text_field, "max-tokens": max_tokens}
    if kind is CausalModel and core_tasks.is_core(data):
        _refuse(of_text, f"--data {data} has the tasks of CORE")
        tasks = core_tasks.read(data, max_examples)
        return Measurement(
            "examples", lambda model, rows, each: core_tasks.score(model, tasks, rows, each)
        )
    if blimp.is_blimp(data):
        _refuse(of_text, f"--data {data} has the pairs of BLiMP")
        paradigms = blimp.read(data, max_examples)
        return Measurement(
            "pairs", lambda model, rows, each: blimp.score(model, paradigms, rows, each)
        )
    if max_examples is not None:
        raise InputError(
            f"--max-examples {max_examples}: --data {data} is not a folder with the tasks of CORE "
            "or the pairs of BLiMP; omit the flag, or use --max-tokens"
        )
    if data.is_dir():
        core = "" if kind is MaskedModel else f" with {core_tasks.TASKS}, or"
        raise InputError(
            f"--data {data} is a folder: pass a text file, or a folder{core} with BLiMP's .jsonl "
            "files"
        )
    try:
        data.open("rb").close()
    except OSError as error:
        raise _unreadable(data, error) from error

    def score(model: MaskedModel | CausalModel, rows: int, each: Each) -> TextScore | MaskedScore:
        limit = None if max_tokens is None else max_tokens + 2 * model.longest
        try:
            texts = documents.texts(data, text_field, model.count, limit)
        except BadExample as error:
            raise InputError(f"--data {data}: {error.reason}") from error
        except OSError as error:
            raise _unreadable(data, error) from error
        try:
            return model.score(texts, rows=rows, max_tokens=max_tokens, each=each)
        except InputError as error:
            raise InputError(f"--data {data}: {error}") from error

    return Measurement("windows" if kind is CausalModel else "tokens", score)


def _refuse(of_text: dict[str, Any], reason: str) -> None:
    for name, value in of_text.items():
        if value is not None:
            raise InputError(f"--{name} {value}: {reason}; omit the flag")


def _unreadable(data: Path, error: OSError) -> InputError:
    return InputError(f"--data {data} cannot be read: {error.strerror}")
