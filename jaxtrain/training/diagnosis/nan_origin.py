"""Names what computes NaN/Inf in a step.

With ``--debug``, :func:`checked` looks at the metrics and parameters after each step. With
``loop.find_nan``, :class:`FindNan` finds the line of the model at which the first NaN of a bad step
is computed. For that, the loss and the gradients of the step are computed a second time, by a
program that checks the result of each operation (:mod:`jax.experimental.checkify`) and is compiled
only then. It cannot know whether a later operation masks a NaN, which is legal. An Inf is not
searched for, because attention masks are -Inf: the losses and gradients that are Inf are named.
"""

import contextlib
import functools
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify

from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.models.contract import Batch
from jaxtrain.ops import per_device
from jaxtrain.sharding import replicated
from jaxtrain.storage.atomic import write_whole
from jaxtrain.training.state import Arrays, State
from jaxtrain.training.step import LossSums, Metrics, TrainStep, means

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple(
    f"{Path(str(package.__file__)).parent}{os.sep}" for package in (jax, flax, optax)
)
_STANDARD = ("<", sysconfig.get_path("stdlib") + os.sep)
_MODELS, _OPS = (f"{_PACKAGE / name}{os.sep}" for name in ("models", "ops"))
_MOST_NAMED = 3


class _NotCompiledError(Exception):
    """A process cannot compile the program, so none of them runs it."""


class FindNan:
    """Examines a step whose loss or gradient is NaN/Inf.

    Args:
        gradients: (params, extras, batch, examples seen) -> gradients, sums, ..., traceable.
        mesh: over all devices.
        say: prints a line.
        begun: a file that has the number of the step while it is examined.
    """

    def __init__(
        self,
        gradients: Callable[..., tuple[Arrays, LossSums, Any]],
        mesh: jax.sharding.Mesh,
        say: Callable[[str], None],
        begun: Path,
    ) -> None:
        self._gradients, self._say, self._begun = gradients, say, begun
        self._whole = replicated(mesh)
        self._kinds = jax.jit(_kinds, out_shardings=self._whole)

    def __call__(self, done: int, seen: int, state: State, batch: Batch) -> str | None:
        """Returns where the NaN/Inf of a bad step began; None if that cannot be examined.

        All processes must call it.

        Args:
            done: completed steps before it.
            seen: examples seen before it.
            state: before it. The state after it is the same; a later one may have other parameters.
            batch: of it.

        Raises:
            RunAgain: this process failed while the others may wait for it.
        """
        self._note(f"{done + 1}\n")
        text = None
        try:
            text = self._examined(state, batch, seen)
        except RunAgain:
            raise
        except Exception as error:  # a diagnosis must not end the run
            why = f"loop.find_nan failed at step {done + 1}: {first_line(error)}"
            if jax.process_count() > 1 and not isinstance(error, _NotCompiledError):
                raise RunAgain(
                    f"{why}: resume with --resume latest, which does not try it again"
                ) from error
            self._say(f"warning: {why}")
        self._note("")
        if text is not None and int(state.step) != done:
            text += "; computed with the parameters after the next step"
        return text

    def _note(self, text: str) -> None:
        """Writes the file, or removes it if the text is empty, in process 0."""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # a diagnosis must not end the run
                if text:
                    write_whole(self._begun, text)
                else:
                    self._begun.unlink()

    def _examined(self, state: State, batch: Batch, seen: int) -> str:
        for kind, arrays in (("parameter", state.params), ("model state", state.extras)):
            if bad := self._not_finite(arrays):
                return (
                    f"{'/'.join(sorted(set(bad.values())))} in the {kind} {_listed(list(bad))} "
                    "before the step: an earlier step computed it, or the weights that the run "
                    "started from contain it"
                )
        if nan := [name for name, kind in self._not_finite(batch).items() if kind == "NaN"]:
            return f"NaN is in the batch's {_listed(nan)}"

        def function(*arguments: Any) -> Any:
            grads, sums, *_ = self._gradients(*arguments)
            loss, grads = means(grads, sums)
            return loss, sums.metrics, grads

        def checked(*arguments: Any) -> Any:
            # checkify cannot continue after a shard_map that follows another operation (jax 0.10).
            with per_device.without_shard_map():
                both = checkify.checkify(function, errors=checkify.nan_checks)(*arguments)
            error, (loss, metrics, grads) = both
            losses = {"loss": loss} | {name: value[0] for name, value in metrics.items()}
            largest = {name: jnp.abs(grad).max() for name, grad in grads.items()}
            return error, _kinds(losses), _kinds(grads), largest

        at = jnp.asarray(seen, jnp.uint32, device=state.examples_seen.sharding)
        arguments = (state.params, state.extras, batch, at)
        program = self._compiled(checked, arguments)
        error, losses, grads, largest = jax.device_get(program(*arguments))
        return _described(error, _named(losses), _named(grads), largest)

    def _compiled(self, function: Callable[..., Any], arguments: Any) -> jax.stages.Compiled:
        """Compiles a function in all processes.

        Raises:
            _NotCompiledError: in all of them, if one cannot, for example because its host has too
                little memory: the others would wait for it in the first collective.
        """
        program, failure = None, ""
        try:
            program = jax.jit(function, out_shardings=self._whole).lower(*arguments).compile()
        except Exception as error:
            failure = f"{type(error).__name__}: {first_line(error)}"
        failures = process_group.gather("failure to compile loop.find_nan", failure)
        for process, reason in enumerate(failures):
            if reason:
                raise _NotCompiledError(f"process {process} cannot compile the check ({reason})")
        assert program is not None, "a process that fails has a reason"
        return program

    def _not_finite(self, arrays: Mapping[str, jax.Array]) -> dict[str, str]:
        """Returns "NaN" or "Inf" for each array that has one."""
        return _named(jax.device_get(self._kinds(dict(arrays))))


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
) -> str:
    """Describes what the second computation found.

    Args:
        error: the first NaN.
        losses: "NaN" or "Inf" for the loss and each metric that has one.
        grads: likewise, for the gradient of each parameter.
        largest: the largest absolute value of each gradient.
    """
    if not losses and not grads:
        name = max(largest, key=lambda name: float(largest[name]))
        if largest[name] > float(jnp.finfo(jnp.float32).max) ** 0.5:
            return (
                f"the gradients are finite, but their norm is not: the gradient of {name} is up to "
                f"{largest[name]:.2g}, whose square exceeds float32"
            )
        return (
            "not reproduced: a second computation of the step has only finite values; if this "
            "happens again, check the devices with --loop.replay_every"
        )
    where = [
        f"{kind} in {what}{_listed([name for name in kinds if kinds[name] == kind])}"
        for what, kinds in (("", losses), ("the gradient of ", grads))
        for kind in ("NaN", "Inf")
        if kind in kinds.values()
    ]
    if "loss" not in losses:
        where.insert(0, "the loss is finite")
    if "NaN" not in {**losses, **grads}.values():
        return f"no NaN, but {'; '.join(where)}"
    try:
        error.throw()
    except checkify.JaxRuntimeError as first:
        return (
            f"the first NaN is computed at {_line(first)}, unless a later operation masks it; "
            + "; ".join(where)
        )
    return f"an unchecked operation computes the first NaN; {'; '.join(where)}"


def _line(error: Exception) -> str:
    """Returns the line of the model and its operation, and the line of ``ops`` if it is in one."""
    operation = re.sub(r".*primitive: (\w+).*", r"\1", str(error), flags=re.DOTALL)
    in_ops = ""
    frames = traceback.walk_tb((error.__cause__ or error).__traceback__)
    for frame, number in reversed(list(frames)):  # from the inside out
        name = frame.f_code.co_filename
        if _never_a_model(name):
            continue
        line = f"{_shown(name)}:{number}"
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


def _shown(name: str) -> str:
    path = Path(name)
    for root in (_PACKAGE.parent, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return name


def _listed(names: Sequence[str]) -> str:
    """Returns the first names, and the number of the others."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def checked(step: TrainStep, rate_flag: str) -> TrainStep:
    """Wraps a step so that it checks its metrics and the new parameters for NaN/Inf.

    It waits for each step. (``jax_debug_nans`` does not check ahead-of-time compiled functions.)

    The wrapped step raises InputError with the names of the arrays that contain NaN/Inf.
    """

    @jax.jit
    def finite(following: State, metrics: Metrics) -> dict[str, jax.Array]:
        arrays = {f"train/{name}": value for name, value in metrics.items()} | following.params
        return {name: jnp.isfinite(array).all() for name, array in arrays.items()}

    @functools.wraps(step)  # the profiler unwraps it to read the compiled step
    def checked_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Read before the step, which may donate the state and does not count a bad step.
        first, number = int(state.examples_seen), int(state.step) + 1
        following, metrics = step(state, batch)
        good = jax.device_get(finite(following, metrics))
        bad = sorted((name for name in good if not good[name]), key=following.params.__contains__)
        if bad:
            raise InputError(
                f"step {number} (examples from {first} on) computes NaN/Inf in "
                f"{', '.join(bad[:5])}"
                + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
                + f": lower {rate_flag}, or check these examples"
            )
        return following, metrics

    return checked_step
