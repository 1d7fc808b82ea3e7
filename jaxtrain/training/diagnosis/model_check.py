"""Checks that a model follows its contract, by shapes alone, before data are read.

A wrong model would end a run later: after the text is tokenized, or after minutes of compilation,
with an error of the step that uses the model's results.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import from_file
from jaxtrain.ops import per_device
from jaxtrain.training.state import ModelDefinition

OWN = ("gpt", "llama", "mlm", "video_ae", "wan_vae")
"""Models whose results are not checked at each start, which takes a second: tests do."""
_ROWS = 2  # of a batch
_RULES = "see jaxtrain/models/contract.py"


def check(run: config.Run) -> None:
    """Checks the model of a run, and that its data have the arrays that it requires."""
    name = from_file.name_of(run.model)
    broken = list(_of_batch(run))
    if not broken and name not in OWN:
        broken = list(_of_module(run.model))
    if broken:
        raise InputError(*(f"model {name}: {problem}; {_RULES}" for problem in broken))


def _of_batch(run: config.Run) -> Iterator[str]:
    """Yields where ``batch_spec`` differs from the arrays that the data have."""
    spec = run.model.batch_spec(2)
    for name, array in spec.items():
        if array.shape[:1] != (2,):
            yield (
                f"batch_spec(2) has {name} with shape {list(array.shape)}: the first dimension of "
                "each array must be the batch size"
            )
    kind = from_file.name_of(run.data)
    expected = run.data.arrays(run.model)
    for name in expected.keys() | spec.keys():
        if name not in spec:
            yield f"batch_spec lacks {name}, which data of {kind} have: {_text(*expected[name])}"
        elif name not in expected:
            yield f"batch_spec has {name}, which data of {kind} lack: remove it"
        elif _of_example(spec[name]) != expected[name]:
            yield (
                f"batch_spec has {name} with {_text(*_of_example(spec[name]))} for each example, "
                f"but data of {kind} have {_text(*expected[name])}"
            )


def _of_example(array: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return array.shape[1:], str(array.dtype)


def _text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _of_module(model: Any) -> Iterator[str]:
    """Yields what ``loss`` and ``evaluate`` of a model return that their callers do not take."""
    definition = ModelDefinition(model.build, model.freeze)
    batch = model.batch_spec(_ROWS)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), _ROWS))

    arguments = (definition.params, definition.extras, batch)
    returned = _returned(lambda p, e, b, k: definition.module(p, e).loss(b, k), *arguments, keys)
    measured = _returned(lambda p, e, b: definition.module(p, e).evaluate(b), *arguments)
    if not isinstance(returned, tuple) or len(returned) != 3:
        yield f"loss returned {_kind(returned)}: it must return (sum, weight, metrics)"
    else:
        total, weight, metrics = returned
        for name, value in (("sum", total), ("weight", weight)):
            if not _is_scalar(value):
                yield f"loss returned {_kind(value)} as {name}: it must be a float32 scalar"
        yield from _of_sums("loss", metrics, at_most=2)
    yield from _of_sums("evaluate", measured, at_most=3)
    if isinstance(measured, dict) and "loss" not in measured:
        yield f'evaluate returned {", ".join(measured) or "nothing"}: it must also return "loss"'


def _of_sums(function: str, sums: Any, at_most: int) -> Iterator[str]:
    form = "name: (sum, weight)" + (" or (sum, weight, of examples)" if at_most == 3 else "")
    if not isinstance(sums, dict):
        yield f"{function} returned {_kind(sums)} as metrics: it must return {{{form}}}"
        return
    for name, terms in sums.items():
        if not isinstance(terms, tuple) or not 2 <= len(terms) <= at_most:
            yield (
                f"{function} returned {name}: {_kind(terms)}: return {{{form}}}, which the caller "
                "divides once, after all microbatches and devices"
            )
        elif not all(map(_is_scalar, terms[:2])):
            kinds = ", ".join(map(_kind, terms))
            yield f"{function} returned {name}: ({kinds}): sum and weight must be float32 scalars"
        elif terms[2:] and _kind(terms[2]) != (
            expected := f"an array {_text((2, _ROWS), 'float32')}"
        ):
            yield (
                f"{function} returned {name}: {_kind(terms[2])} of {_ROWS} examples: it must be "
                f"{expected}, the sum and the weight of each example"
            )


def _returned(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function returns for arguments of these shapes, with shapes for arrays."""
    results = []

    def call(*arrays: Any) -> None:
        results.append(jax.tree.map(_abstract, function(*arrays)))

    with per_device.tracing(platform="cpu"):
        jax.eval_shape(call, *arguments)
    return results[0]


def _abstract(leaf: Any) -> Any:
    known = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if known else leaf


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and value.dtype == jnp.float32


def _kind(value: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"an array {_text(value.shape, str(value.dtype))}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
