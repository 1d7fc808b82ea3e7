"""Finds where the first NaN/Inf of a bad step was computed, by computing the step a second time.

With ``loop.find_nan``, the operations of the loss and its gradients are evaluated one by one from
the state before the step. A NaN/Inf that a later operation masks is legal, such as the -inf of an
attention mask: each bad value carries the operation at which it began, and only that of the loss or
of a gradient is reported. An operation with operations inside, such as a remat or a scan, is
evaluated at once, and its inside only if a new NaN/Inf comes out of it. (A program that returns a
flag for each value instead takes minutes to compile, and 4 GB.)

Several processes evaluate the same operations in the same order, on arrays that are split over all
of them. Whatever decides which operation follows is reduced over the processes first.

Reading order: :class:`FindNan`, :class:`_Pass`, :meth:`_Pass._evaluated`, :class:`_Reader`.
"""

import collections
import contextlib
import functools
import json
import os
import sysconfig
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxtrain.distributed import process_group
from jaxtrain.errors import RunAgain
from jaxtrain.sharding import local_rows, replicated
from jaxtrain.storage.atomic import write_whole
from jaxtrain.training.replay import bind, evaluate
from jaxtrain.training.state import Arrays, State
from jaxtrain.training.step import Batch, LossSums, means

# How bad a value is. An attention mask's -inf is the only one of these that is usually legal.
_FINE, _MINUS_INF, _INF, _NAN = range(4)
_WORDS = {_NAN: "NaN", _INF: "Inf", _MINUS_INF: "Inf"}

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(f"{Path(str(one.__file__)).parent}{os.sep}" for one in (jax, flax, optax))
_STANDARD = ("<", sysconfig.get_path("stdlib") + os.sep)
_MODELS, _OPS = (f"{_PACKAGE / name}{os.sep}" for name in ("models", "ops"))

# Operations whose inside is one more jaxpr, with the same arguments.
_CALLS = ("jit", "pjit", "remat", "checkpoint", "closed_call", "custom_jvp", "custom_vjp")
_MOST_NAMED = 3

# Longest wait for the other processes after this one is done: they compile the same operations.
_ANSWER_S = 120.0


class Origin(NamedTuple):
    """Where a NaN/Inf began.

    Attributes:
        text: the line, the operation, and the parameters.
        rows: examples of the batch in which it began; empty if that is unknown.
        what: what began in which phase of the step; empty if ``text`` says it.
        more: a following clause.
    """

    text: str
    rows: tuple[int, ...] = ()
    what: str = ""
    more: str = ""

    def described(self, ids: Sequence[int], seen: int) -> str:
        """Returns a description, with the ids and the first position of the batch's examples."""
        where = f"{self.what} at {self.text}" if self.what else self.text
        return f"{where}{_examples(self.rows, ids, seen)}{self.more}"


class _Value(NamedTuple):
    """A value, and what is known of it.

    Attributes:
        array: the value; None if it was not computed.
        bad: how bad it is.
        origin: of its NaN/Inf; None if that is a constant, which is legal.
        names: the parameters that were used last to compute it.
        of_batch: whether it depends on the batch.
        by_row: whether its first axis is that of the examples.
        made: number of the operation.
    """

    array: Any
    bad: int = _FINE
    origin: Origin | None = None
    names: tuple[str, ...] = ()
    of_batch: bool = False
    by_row: bool = False
    made: int = 0


class _Place(NamedTuple):
    """Where an operation is.

    Attributes:
        stack: name stacks of the operations around it, which JAX's transformations wrote.
        inside: words on the iterations around it.
        microbatch: its number.
    """

    stack: str = ""
    inside: str = ""
    microbatch: int = 0


class _Found(Exception):
    """Ends the evaluation: the loss is NaN/Inf."""


class FindNan:
    """Examines the first step of a start of the run whose loss or gradient is NaN/Inf.

    Args:
        gradients: (params, extras, batch, examples seen) -> gradients, sums, ..., traceable.
        accumulate: microbatches per step.
        mesh: over all devices.
        still_alive: called after each operation.
        stopping: whether this process must stop.
        say: prints a line.
        begun: a file that has the number of the step while it is examined.
    """

    def __init__(
        self,
        gradients: Callable[..., tuple[Arrays, LossSums, Any, Any]],
        accumulate: int,
        mesh: jax.sharding.Mesh,
        still_alive: Callable[[], None],
        stopping: Callable[[], object],
        say: Callable[[str], None],
        begun: Path,
    ) -> None:
        self._gradients, self._accumulate, self._mesh = gradients, accumulate, mesh
        self._reader = _Reader(mesh, still_alive, stopping)
        self._say, self._begun = say, begun
        self._state: State | None = None
        self._batches: dict[int, Batch] = {}
        self._used = False

    def watch(self, seen: int, state: State, batch: Batch) -> None:
        """Takes a step: the examples seen before it, the state after it, and its batch.

        A bad step is reported while the step after it is computed, so two batches are kept. The
        state before a bad step is the one after it.
        """
        if not self._used:
            newest = list(self._batches.items())[-1:]
            self._state, self._batches = state, {**dict(newest), seen: batch}

    def forget(self) -> None:
        """Releases the state and the batches."""
        self._state, self._batches = None, {}

    def __call__(self, done: int, seen: int, ids: Sequence[int]) -> str | None:
        """Examines a bad step; returns a description, and None if there was one before.

        All processes must call it.

        Args:
            done: completed steps before it.
            seen: examples seen before it.
            ids: of this process's examples.

        Raises:
            RunAgain: it failed in some of the processes only.
        """
        state, batch = self._state, self._batches.get(seen)
        self.forget()
        if self._used or state is None or batch is None:
            return None
        self._used = True
        self._note(f"{done + 1}\n")
        found, failure = Origin(""), ""
        try:
            found = self._examined(state, batch, seen)
        except Exception as error:  # a diagnosis must not end the run
            failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        all_ids = self._agreed(failure, ids, len(jax.tree.leaves(batch)[0]))
        self._note("")
        if failure:
            self._say(f"warning: loop.find_nan failed at step {done + 1}: {failure}")
            return None
        text = found.described(all_ids, seen)
        if int(state.step) != done:
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

    def _agreed(self, failure: str, ids: Sequence[int], rows: int) -> list[int]:
        """Returns the ids of the batch's examples, after all processes have succeeded or failed.

        Args:
            failure: why this process failed; empty if it did not.
            ids: of this process's examples.
            rows: examples of the batch.

        Raises:
            RunAgain: some failed, or not all at the same operation. One of them may wait for values
                that another never sent, and would take those of the next step for them.
        """
        operation = self._reader.operation
        own = json.dumps([failure, operation, local_rows(self._mesh, rows).start, list(ids)])
        try:
            texts = process_group.gather("result of loop.find_nan", own, _ANSWER_S)
        except RunAgain as error:
            if not failure:
                raise
            alone = _failed_alone([f"process {jax.process_index()}: {failure}"])
            raise RunAgain(alone) from error
        every = [json.loads(text) for text in texts]
        # The texts of one failure may differ, such as by the name of the device.
        if len({(bool(why), operation) for why, operation, *_ in every}) > 1:
            failures = [
                f"process {process}: {why} at operation {operation}"
                for process, (why, operation, *_) in enumerate(every)
                if why
            ]
            raise RunAgain(_failed_alone(failures))
        parts = sorted((start, part) for *_, start, part in every)
        return [number for _, part in parts for number in part]

    def _examined(self, state: State, batch: Batch, seen: int) -> Origin:
        for kind, arrays in (("parameter", state.params), ("model state", state.extras)):
            found = {name: self._reader.badness(arrays[name]) for name in sorted(arrays)}
            if bad := [name for name in found if found[name]]:
                worst = _WORDS[max(found.values())]
                return Origin(
                    f"{worst} in the {kind} {_listed(bad)} before the step: an earlier step "
                    "computed it, or the weights that the run started from contain it"
                )

        def function(params: Arrays, extras: Arrays, batch: Batch, seen: jax.Array) -> Any:
            grads, sums, *_ = self._gradients(params, extras, batch, seen)
            return means(grads, sums)

        at = jnp.asarray(seen, jnp.uint32, device=state.examples_seen.sharding)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(
            state.params, state.extras, batch, at
        )
        rows = len(jax.tree.leaves(batch)[0])
        arguments = [
            *(_Value(array, names=(name,)) for name, array in sorted(state.params.items())),
            *(_Value(array) for array in jax.tree.leaves(state.extras)),
            *(self._of_batch(name, batch[name]) for name in sorted(batch)),
            _Value(at),
        ]
        names = sorted(shape[1])
        one = _Pass(rows, self._accumulate, len(names), self._reader)
        try:
            results = one.run(closed.jaxpr, closed.consts, arguments, _Place(), first=0)
        except _Found as found:
            return found.args[0]  # type: ignore[no-any-return]
        loss, grads = results[0], dict(zip(names, results[1:], strict=True))
        if loss.bad:
            return loss.origin or Origin("a constant NaN/Inf of the model is in the loss")
        if bad := [name for name, grad in grads.items() if grad.bad]:
            origins = [grads[name].origin for name in bad if grads[name].origin]
            origin = origins[0] if origins else Origin("a constant NaN/Inf is in a gradient")
            return origin._replace(
                what=origin.what.replace("forward pass", "backward pass"),
                more=f"; the loss is finite, and the gradient of {_listed(bad)} is not",
            )
        largest = {name: float(jnp.abs(grad.array).max()) for name, grad in grads.items()}
        name = max(largest, key=largest.__getitem__)
        if largest[name] > float(jnp.finfo(jnp.float32).max) ** 0.5:
            return Origin(
                f"the gradients are finite, but their norm is not: the gradient of {name} is up to "
                f"{largest[name]:.2g}, whose square exceeds float32"
            )
        return Origin(
            "not reproduced: a second computation of the step, one operation at a time, has only "
            "finite values; if this happens again, check the devices with --loop.replay_every"
        )

    def _of_batch(self, name: str, array: jax.Array) -> _Value:
        """Returns an array of the batch, whose NaN/Inf may be legal."""
        bad, origin = self._reader.badness(array), None
        if bad:
            rows = self._reader.rows(array, bad, len(array))
            origin = Origin(f"{_WORDS[bad]} is in the batch's {name!r}", rows)
        return _Value(array, bad, origin, of_batch=True, by_row=True)


class _Pass:
    """Evaluates jaxprs operation by operation.

    Args:
        rows: examples of the batch.
        accumulate: microbatches.
        gradients: number of gradients, which are the first values that the microbatches add up; the
            loss follows.
        reader: reads values.
    """

    def __init__(self, rows: int, accumulate: int, gradients: int, reader: "_Reader") -> None:
        self._rows, self._accumulate, self._gradients = rows // accumulate, accumulate, gradients
        self._reader = reader
        self._count = 0

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        arguments: Sequence[_Value],
        place: _Place,
        first: int | None = None,
    ) -> list[_Value]:
        """Returns the results of a jaxpr.

        Args:
            jaxpr: an open one.
            constants: of it.
            arguments: of it.
            place: where it is.
            first: the result that is computed first.

        Raises:
            _Found: the result ``first`` is bad.
        """
        known: dict[Any, _Value] = {}

        def read(atom: Any) -> _Value:
            if isinstance(atom, jax.extend.core.Literal):
                return _Value(atom.val, self._reader.badness(atom.val))
            return known[atom]

        # A value is released after its last use.
        left = collections.Counter(_variables(jaxpr.outvars))
        for equation in jaxpr.eqns:
            left.update(_variables(equation.invars))
        given = [_Value(array, self._reader.badness(array)) for array in constants]
        known.update(zip(jaxpr.constvars, given, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        target = None if first is None else jaxpr.outvars[first]
        needed = _needed(jaxpr, target)
        for equation in sorted(jaxpr.eqns, key=lambda one: id(one) not in needed):
            inputs = [read(atom) for atom in equation.invars]
            for atom in _variables(equation.invars):
                left[atom] -= 1
                if not left[atom]:
                    del known[atom]
            for variable, value in zip(
                equation.outvars, self._evaluated(equation, inputs, place), strict=True
            ):
                if left[variable]:
                    known[variable] = value
                if variable is target and value.bad and value.origin:
                    raise _Found(value.origin)
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluated(self, equation: Any, inputs: list[_Value], place: _Place) -> list[_Value]:
        """Returns the results of an operation."""
        self._count += 1
        self._reader.operation += 1
        place = place._replace(stack=f"{place.stack}/{equation.source_info.name_stack}")
        if (
            equation.primitive.name == "scan"
            and self._accumulate > 1
            and equation.params["length"] == self._accumulate
            and not place.inside
            and "jvp" not in place.stack
        ):  # of the microbatches: its program would be the step itself
            return self._scan(equation, inputs, place, microbatches=True)
        arrays = jax.block_until_ready(bind(equation, [one.array for one in inputs]))
        plain = [self._labeled(equation, inputs, array) for array in arrays]
        worst = max((one.bad for one in plain), default=_FINE)
        if not worst:
            return plain
        inside: Sequence[_Value | None] | None = None
        first = equation
        if all(one.bad != _NAN for one in inputs):
            if equation.primitive.name == "shard_map":
                first = self._first_on_a_device(equation, inputs, worst)
            inside = self._inside(equation, inputs, place, worst)
        return [
            value._replace(origin=self._origin(first, inputs, value, place, within))
            if value.bad
            else value
            for value, within in zip(plain, inside or [None] * len(plain), strict=True)
        ]

    def _origin(
        self,
        equation: Any,
        inputs: Sequence[_Value],
        value: _Value,
        place: _Place,
        within: _Value | None,
    ) -> Origin | None:
        """Returns where a bad result of an operation began; None if it is a legal constant.

        Args:
            equation: the operation.
            inputs: of it.
            value: its result.
            place: of the operation.
            within: the same result, if the inside of the operation was evaluated.
        """
        if within is not None and within.bad:
            return within.origin
        before = max((one for one in inputs if one.origin), key=lambda one: one.bad, default=None)
        if before is not None:
            return before.origin
        if value.bad != _NAN and any(one.bad for one in inputs):
            return None
        return self._began(equation, inputs, value, place)

    def _labeled(self, equation: Any, inputs: Sequence[_Value], array: Any) -> _Value:
        """Returns a result of an operation, without the origin of its NaN/Inf."""
        own = dict.fromkeys(name for one in inputs if not one.of_batch for name in one.names)
        latest = max((one for one in inputs if one.names), key=lambda one: one.made, default=None)
        names = tuple(own) or (() if latest is None else latest.names)
        length = array.shape[0] if getattr(array, "ndim", 0) else 0
        leading = {one.array.shape[0] for one in inputs if one.by_row}
        by_row = bool(leading) and not _contracts(equation, inputs)
        by_row &= length in (self._rows, *leading) or (
            equation.primitive.name == "reshape" and length % self._rows == 0 and length > 0
        )
        of_batch = any(one.of_batch for one in inputs)
        bad = self._reader.badness(array)
        return _Value(array, bad, None, names, of_batch, by_row, self._count)

    def _inside(
        self, equation: Any, inputs: list[_Value], place: _Place, worst: int
    ) -> list[_Value] | None:
        """Evaluates the inside of an operation, given its worst result; None if it has none."""
        name, parameters = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, inputs, place, worst)
        if name == "while":
            return self._while(equation, inputs, place, worst)
        if name == "cond":
            closed = parameters["branches"][self._reader.number(inputs[0].array)]
            return self.run(closed.jaxpr, closed.consts, inputs[1:], place)
        closed = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        if closed is None or not name.startswith(_CALLS):
            return None
        jaxpr, constants = (
            (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        )
        return self.run(jaxpr, constants, inputs, place)

    def _first_on_a_device(self, equation: Any, inputs: Sequence[_Value], worst: int) -> Any:
        """Returns the operation inside a ``shard_map`` that is the first with a result as bad.

        One program evaluates all of them, since their results differ between the devices.
        """
        parameters = equation.params
        mesh, jaxpr = parameters["mesh"], parameters["jaxpr"]

        def levels(*arguments: Any) -> jax.Array:
            found: list[Any] = []

            def tap(_: Any, values: list[Any]) -> list[Any]:
                floats = [one for one in values if jnp.issubdtype(one.dtype, jnp.floating)]
                found.append(jnp.stack([jnp.int32(0), *(_worst(jnp, one) for one in floats)]).max())
                return values

            evaluate(jaxpr, (), arguments, tap)
            return jnp.stack(found)[None]

        on_all = jax.shard_map(
            levels,
            mesh=mesh,
            in_specs=parameters["in_specs"],
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=parameters["check_vma"],
        )
        of_each = self._reader.read(on_all, [one.array for one in inputs])
        bad = np.flatnonzero(of_each.max(0) >= worst)
        return jaxpr.eqns[bad[0]] if len(bad) else equation

    def _scan(
        self,
        equation: Any,
        inputs: list[_Value],
        place: _Place,
        worst: int = _MINUS_INF,
        *,
        microbatches: bool = False,
    ) -> list[_Value]:
        """Evaluates a scan by iteration, up to the first one with a result that is as bad."""
        parameters = equation.params
        body, order, results = parameters["jaxpr"], range(parameters["length"]), list[_Value]()
        # What is split by iteration has one more axis outside. jax 0.12 does not store the numbers.
        carries = _same_axes(equation.outvars, body.jaxpr.outvars)
        constants = _same_axes(equation.invars, body.jaxpr.invars) - carries
        fixed, carry = inputs[:constants], inputs[constants:][:carries]
        for number in reversed(order) if parameters["reverse"] else order:
            name = "microbatch" if microbatches else "iteration"
            within = place._replace(inside=f"{place.inside}, {name} {number}")
            if microbatches:
                within = within._replace(microbatch=number)
            each = [
                one._replace(array=one.array[number], by_row=microbatches and one.of_batch)
                for one in inputs[constants + carries :]
            ]
            results = self.run(
                body.jaxpr,
                body.consts,
                [*fixed, *carry, *each],
                within,
                first=self._gradients if microbatches else None,
            )
            carry = results[:carries]
            targets = carry[: self._gradients] if microbatches else results
            if any(one.bad >= worst and one.origin for one in targets):
                break
        return results

    def _while(
        self, equation: Any, inputs: list[_Value], place: _Place, worst: int
    ) -> list[_Value]:
        """Evaluates a loop by iteration, up to the first one with a result that is as bad."""
        parameters = equation.params
        test, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
        of_test = inputs[: parameters["cond_nconsts"]]
        of_body = inputs[len(of_test) :][: parameters["body_nconsts"]]
        carry, number = inputs[len(of_test) + len(of_body) :], 0
        while self._reader.number(
            self.run(test.jaxpr, test.consts, [*of_test, *carry], place)[0].array
        ):
            where = place._replace(inside=f"{place.inside}, iteration {number}")
            carry = self.run(body.jaxpr, body.consts, [*of_body, *carry], where)
            if any(one.bad >= worst and one.origin for one in carry):
                break
            number += 1
        return carry

    def _began(
        self, equation: Any, inputs: Sequence[_Value], value: _Value, place: _Place
    ) -> Origin:
        """Describes an operation that computes NaN/Inf from finite values."""
        names = ""
        if value.names:
            direct = any(one.names and not one.of_batch for one in inputs)
            kind = "parameter" if len(value.names) == 1 else "parameters"
            names = f" {'with' if direct else 'after'} the {kind} {_listed(value.names)}"
        phase = "the sums after the backward pass"
        if "transpose(" in place.stack:
            phase = "the backward pass"
        elif "jvp" in place.stack or not value.of_batch:
            phase = "the forward pass"
        rows: tuple[int, ...] = ()
        if value.by_row:
            rows = self._reader.rows(value.array, value.bad, self._rows)
            rows = tuple(row * self._accumulate + place.microbatch for row in rows)
        line, in_ops = _lines(equation)
        operation = equation.primitive.name + (f" in {in_ops}" if in_ops else "")
        return Origin(
            f"{line} ({operation}{place.inside}){names}",
            rows,
            f"{_WORDS[value.bad]} begins in {phase}",
        )


def _failed_alone(failures: Sequence[str]) -> str:
    return (
        f"loop.find_nan did not end the same way in all processes ({_listed(failures)}), so they "
        "cannot continue together: resume with --resume latest, which does not try it again"
    )


class _Reader:
    """Reads values, with the same results in all processes, and ends in all of them alike.

    Otherwise the processes would evaluate different operations, and wait for each other forever.

    Args:
        mesh: over all devices.
        still_alive: called at each array.
        stopping: whether this process must stop.

    Attributes:
        operation: number of the newest operation that all processes compute together: one of the
            step, or a reduction of what was read.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        still_alive: Callable[[], None],
        stopping: Callable[[], object],
    ) -> None:
        self.operation = 0
        self._still_alive, self._stopping = still_alive, stopping
        self._of_all = process_group.Exchange(mesh, largest=("value", "stop"))
        self._whole = replicated(mesh)
        self._worst = jax.jit(functools.partial(_worst, jnp), out_shardings=self._whole)
        self._places = jax.jit(_places, static_argnums=(1, 2), out_shardings=self._whole)

    def badness(self, value: Any) -> int:
        """Returns how bad a value is; anything but floating-point numbers is fine."""
        array = value if hasattr(value, "dtype") else np.asarray(value)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return _FINE
        if not isinstance(array, jax.Array):  # a literal, the same in all processes
            return int(_worst(np, np.asarray(array)))
        if _on_cpu(array):  # a program for each shape would take half of the time
            parts = [one.data for one in array.addressable_shards]
            parts = parts[:1] if array.is_fully_replicated else parts
            return self._agreed(max(_worst(np, np.asarray(one)) for one in parts))
        return self._agreed(self._worst(array))

    def number(self, value: Any) -> int:
        """Returns the integer or truth value of a scalar."""
        return self._agreed(value)

    def rows(self, array: jax.Array, bad: int, rows: int) -> tuple[int, ...]:
        """Returns the examples with a bad value, of an array whose first axis is that of them."""
        self.operation += 1
        return tuple(np.flatnonzero(np.asarray(self._places(array, bad, rows))).tolist())

    def read(self, function: Callable[..., jax.Array], arguments: Sequence[Any]) -> np.ndarray:
        """Returns the result of a function of arrays."""
        self.operation += 1
        return np.asarray(jax.jit(function, out_shardings=self._whole)(*arguments))

    def _agreed(self, value: Any) -> int:
        """Returns the largest value of all processes.

        Raises:
            RuntimeError: a process must stop.
        """
        self._still_alive()
        self.operation += 1
        found = self._of_all.now({"value": float(value), "stop": float(bool(self._stopping()))})
        if found["stop"]:
            raise RuntimeError("the run must stop")
        return int(found["value"])


def _on_cpu(array: jax.Array) -> bool:
    return any(one.platform == "cpu" for one in array.devices())


def _worst(library: Any, array: Any) -> Any:
    """Returns how bad an array is; ``library`` is numpy or jax.numpy."""
    nan, inf = library.isnan(array).any(), (array == np.inf).any()
    minus_inf = (array == -np.inf).any()
    return library.stack([_NAN * nan, _INF * inf, _MINUS_INF * minus_inf]).max()


def _places(array: jax.Array, bad: int, rows: int) -> jax.Array:
    """Returns which rows of an array have a bad value, bool [rows]."""
    return (jnp.isnan(array) if bad == _NAN else jnp.isinf(array)).reshape(rows, -1).any(1)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables among the arguments of an operation; the others are literals."""
    return [atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)]


def _same_axes(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Returns how many variables have the same number of axes outside a scan and inside it."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in pairs)


def _needed(jaxpr: Any, target: Any) -> Collection[int]:
    """Returns the ids of the operations that compute a variable."""
    if target is None:
        return ()
    wanted, needed = {target}, set()
    for equation in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(equation.outvars):
            needed.add(id(equation))
            wanted.update(_variables(equation.invars))
    return needed


def _contracts(equation: Any, inputs: Sequence[_Value]) -> bool:
    """Returns whether an operation sums over the examples."""
    parameters = equation.params
    if "dimension_numbers" in parameters and equation.primitive.name == "dot_general":
        axes = parameters["dimension_numbers"][0]
        return any(one.by_row and 0 in of for one, of in zip(inputs, axes, strict=False))
    if equation.primitive.name == "conv_general_dilated":
        return bool(parameters["dimension_numbers"].lhs_spec[0] != 0)
    return equation.primitive.name.startswith("reduce") and 0 in parameters.get("axes", ())


def _lines(equation: Any) -> tuple[str, str]:
    """Returns the line of the model that an operation comes from, and that of ``ops``, if any."""
    in_ops = ""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():  # from the inside out
        name = frame.file_name
        if _never_a_model(name):
            continue
        line = f"{_shown(name)}:{frame.line_num}"
        if name.startswith(_OPS):
            in_ops = in_ops or line
        elif name.startswith(_MODELS) or not name.startswith(f"{_PACKAGE}{os.sep}"):
            return line, in_ops
        else:  # the step, which calls the model
            return in_ops or line, ""
    return in_ops or "an unknown line", ""


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


def _examples(rows: Sequence[int], ids: Sequence[int], seen: int) -> str:
    """Describes examples of a batch.

    Args:
        rows: of the batch.
        ids: of all its examples.
        seen: examples seen before it.
    """
    if not rows:
        return ""
    if len(rows) == len(ids) > 1:
        return f", in all {len(ids)} examples of the batch"
    listed = _listed([f"{ids[row]} (position {seen + row})" for row in rows])
    return f", in {'example' if len(rows) == 1 else 'examples'} {listed}"
