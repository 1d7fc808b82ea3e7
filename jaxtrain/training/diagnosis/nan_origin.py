"""Names what computes NaN/Inf in a step.

With ``--debug``, :func:`checked` looks at the metrics and parameters after each step. After a run,
``jaxtrain find-nan`` calls :func:`examine`, which finds the line of the model at which the first
NaN of a bad step is computed, and the examples that compute it. For that, the loss and the
gradients of the step are computed by a program that checks the result of each operation
(:mod:`jax.experimental.checkify`). It cannot know whether a later operation masks a NaN, which is
legal. An Inf is not searched for, because attention masks are -Inf: the losses and gradients that
are Inf are named.
"""

import dataclasses
import functools
import itertools
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify

from jaxtrain.errors import InputError
from jaxtrain.models.contract import Batch
from jaxtrain.ops import per_device
from jaxtrain.optim.schedule import Scalars
from jaxtrain.sharding import batch_sharding, replicated
from jaxtrain.training.state import Arrays, State
from jaxtrain.training.step import LossSums, Metrics, TrainStep, means

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple(
    f"{Path(str(package.__file__)).parent}{os.sep}" for package in (jax, flax, optax)
)
_STANDARD = ("<", sysconfig.get_path("stdlib") + os.sep)
_MODELS, _OPS = (f"{_PACKAGE / name}{os.sep}" for name in ("models", "ops"))
MOST_NAMED = 3
"""Parameters or examples that are named; others are counted or omitted."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the NaN/Inf of a step begins.

    Attributes:
        rows: the first examples of the batch that compute NaN/Inf alone, at most three.
        is_reproduced: whether there was a NaN/Inf at all.
    """

    text: str
    rows: tuple[int, ...] = ()
    is_reproduced: bool = True


def examine(
    gradients: Callable[..., tuple[Arrays, LossSums, Any]],
    mesh: jax.sharding.Mesh,
    params: Arrays,
    extras: Arrays,
    batch: Batch,
    examples_seen: int,
) -> Origin:
    """Computes the loss and the gradients of a step with checks."""
    full = replicated(mesh)
    not_finite = functools.partial(_not_finite, jax.jit(_kinds, out_shardings=full))
    for kind, arrays in (("parameter", params), ("model state", extras)):
        if bad := not_finite(arrays):
            return Origin(
                f"{'/'.join(sorted(set(bad.values())))} in the {kind} {_listed(list(bad))} "
                "before the step: an earlier step computed it, or the weights that the run "
                "started from contain it"
            )
    if nan := [name for name, kind in not_finite(batch).items() if kind == "NaN"]:
        each_B = [jnp.isnan(batch[name]).reshape(len(batch[name]), -1).any(1) for name in nan]
        with_nan = np.flatnonzero(np.any(jax.device_get(each_B), axis=0)).tolist()
        return Origin(f"NaN is in the batch's {_listed(nan)}", tuple(with_nan[:MOST_NAMED]))

    def function(*arguments: Any) -> Any:
        grads, sums, *_ = gradients(*arguments)
        finite = jnp.isfinite(sums.loss)  # the weight of some examples alone may be 0
        for grad in grads.values():
            finite &= jnp.isfinite(grad).all()
        return means(grads, sums), sums.metrics, finite

    def checked(*arguments: Any) -> Any:
        # checkify cannot continue after a shard_map that follows another operation (jax 0.10).
        with per_device.without_shard_map():
            result = checkify.checkify(function, errors=checkify.nan_checks)(*arguments)
        error, ((loss, grads), metrics, finite) = result
        losses = {"loss": loss} | {name: value[0] for name, value in metrics.items()}
        largest = {name: jnp.abs(grad).max() for name, grad in grads.items()}
        return error, _kinds(losses), _kinds(grads), largest, finite

    program = jax.jit(checked, out_shardings=full)
    chosen = jax.jit(
        lambda batch, rows_B: {name: array[rows_B] for name, array in batch.items()},
        out_shardings=batch_sharding(mesh),
    )

    def computed(rows_B: np.ndarray) -> Any:
        numbers_B = jax.device_put(rows_B.astype(np.uint32), full)
        positions_B = jax.device_put((examples_seen + rows_B).astype(np.uint32), full)
        examples = chosen(dict(batch), numbers_B)
        return jax.device_get(program(params, extras, examples, positions_B))

    all_rows_B = np.arange(jax.tree.leaves(batch)[0].shape[0])
    error, losses, grads, largest, finite = computed(all_rows_B)

    def is_bad(rows: np.ndarray) -> bool:  # repeated to a complete batch: the same program
        return not computed(np.resize(rows, all_rows_B.shape))[-1]

    origin = _described(error, _named(losses), _named(grads), largest)
    alone = () if finite else itertools.islice(_bad_alone(is_bad, all_rows_B), MOST_NAMED)
    return dataclasses.replace(origin, rows=tuple(alone))


def _bad_alone(is_bad: Callable[[np.ndarray], bool], rows: np.ndarray) -> Iterator[int]:
    """Yields the examples of a bad part of a batch that are bad without the others."""
    if len(rows) == 1:
        yield int(rows[0])
        return
    for half in np.array_split(rows, 2):
        if is_bad(half):
            yield from _bad_alone(is_bad, half)


def of_update(step: TrainStep, state: State, batch: Batch, scalars: Scalars) -> str:
    """Returns which parameters the optimizer makes NaN/Inf from finite gradients; "" if none.

    Args:
        step: compiled; must not donate the state.
    """
    following, _ = step(state, batch, scalars)
    bad = _not_finite(jax.jit(_kinds), following.params)
    if not bad:
        return ""
    kinds = "/".join(sorted(set(bad.values())))
    return f"the gradients are finite, but the optimizer computes {kinds} in {_listed(list(bad))}"


def _not_finite(kinds: Callable[..., Any], arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Returns "NaN" or "Inf" for each array that has one; ``kinds`` is :func:`_kinds`, jitted."""
    return _named(jax.device_get(kinds(dict(arrays))))


def _kinds(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns for each array of floating-point numbers whether it has NaN, and Inf: bool [2]."""
    return {
        name: jnp.stack([jnp.isnan(array).any(), jnp.isinf(array).any()])
        for name, array in arrays.items()
        if jnp.issubdtype(array.dtype, jnp.floating)
    }


def _named(kinds: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: "NaN" if nan else "Inf" for name, (nan, inf) in kinds.items() if nan or inf}


def _described(
    error: checkify.Error,
    losses: Mapping[str, str],
    grads: Mapping[str, str],
    largest: Mapping[str, np.ndarray],
) -> Origin:
    if not losses and not grads:
        name = max(largest, key=lambda name: float(largest[name]))
        if largest[name] > float(jnp.finfo(jnp.float32).max) ** 0.5:
            return Origin(
                f"the gradients are finite, but their norm is not: the gradient of {name} is up to "
                f"{largest[name]:.2g}, whose square exceeds float32"
            )
        return Origin(
            "not reproduced: the step has only finite values now; if this happens again, check "
            "the devices of the run with --loop.replay_every",
            is_reproduced=False,
        )
    locations = [
        f"{kind} in {prefix}{_listed([name for name in kinds if kinds[name] == kind])}"
        for prefix, kinds in (("", losses), ("the gradient of ", grads))
        for kind in ("NaN", "Inf")
        if kind in kinds.values()
    ]
    if "loss" not in losses:
        locations.insert(0, "the loss is finite")
    if "NaN" not in {**losses, **grads}.values():
        return Origin(f"no NaN, but {'; '.join(locations)}")
    try:
        error.throw()
    except checkify.JaxRuntimeError as first:
        return Origin(
            f"the first NaN is computed at {_line(first)}, unless a later operation masks it; "
            + "; ".join(locations)
        )
    return Origin(f"an unchecked operation computes the first NaN; {'; '.join(locations)}")


def _line(error: Exception) -> str:
    """Returns the line of the model and its operation, and the line of ``ops`` if it is in one."""
    operation = re.sub(r".*primitive: (\w+).*", r"\1", str(error), flags=re.DOTALL)
    in_ops = ""
    frames = traceback.walk_tb((error.__cause__ or error).__traceback__)
    for frame, number in reversed(list(frames)):  # from the inside out
        name = frame.f_code.co_filename
        if _never_a_model(name):
            continue
        line = f"{_relative(name)}:{number}"
        if name.startswith(_OPS):
            in_ops = in_ops or line
        elif name.startswith(_MODELS) or not name.startswith(f"{_PACKAGE}{os.sep}"):
            return f"{line} ({operation}{f' in {in_ops}' if in_ops else ''})"
        else:  # the step, which calls the model
            return f"{in_ops or line} ({operation})"
    return f"{in_ops or 'an unknown line'} ({operation})"


def _never_a_model(file: str) -> bool:
    # Without a virtual environment, packages are below the standard library.
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD) and not installed)


def _relative(name: str) -> str:
    path = Path(name)
    for root in (_PACKAGE.parent, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return name


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def checked(step: TrainStep, rate_flag: str, keep: Callable[[State, Batch, str], str]) -> TrainStep:
    """Wraps a step so that it checks its metrics and the new parameters for NaN/Inf.

    It waits for each step. (``jax_debug_nans`` does not check ahead-of-time compiled functions.)

    The wrapped step raises InputError with the names of the arrays that contain NaN/Inf.

    Args:
        step: compiled; it must not donate the state if ``keep`` saves it.
        keep: saves the state before a step with NaN/Inf and its batch, with the reason; returns
            the command that examines them, or "".
    """

    @jax.jit
    def finite(following: State, metrics: Metrics) -> dict[str, jax.Array]:
        arrays = {f"train/{name}": value for name, value in metrics.items()} | following.params
        return {name: jnp.isfinite(array).all() for name, array in arrays.items()}

    @functools.wraps(step)  # the profiler unwraps it to read the compiled step
    def checked_step(state: State, batch: Batch, scalars: Scalars) -> tuple[State, Metrics]:
        # Read before the step, which may donate the state and does not count a bad step.
        first, number = int(state.examples_seen), int(state.step) + 1
        following, metrics = step(state, batch, scalars)
        good = jax.device_get(finite(following, metrics))
        bad = sorted((name for name in good if not good[name]), key=following.params.__contains__)
        if bad:
            why = (
                f"step {number} (examples from {first} on) computes NaN/Inf in "
                f"{', '.join(bad[:5])}" + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            )
            command = keep(state, batch, why)
            raise InputError(
                f"{why}: lower {rate_flag}, or "
                + (f"find the cause with: {command}" if command else "check these examples")
            )
        return following, metrics

    return checked_step
