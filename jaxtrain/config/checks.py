"""Checks a config, as far as possible without files and devices: all problems at once."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxtrain.config import bounds, field_values, metrics, overrides
from jaxtrain.config.gates import Gate
from jaxtrain.errors import InputError, Problem
from jaxtrain.storage import addresses

if TYPE_CHECKING:
    from jaxtrain.config.run import Checkpoint, Loop, Optim, Run

_PATHS = ("data.path", "data.more_paths", "data.val_path")

# Steps and sizes of batches are int32 on the devices; only documents are counted beyond that.
_LARGEST, _LARGEST_COUNT = 2**31 - 1, 2**63 - 1
_LARGE = ("data.max_examples",)
_COUNTS = ("data.batch_size", "data.prefetch")  # also of data outside the package


def validate(run: "Run") -> None:
    """Checks a config, as far as possible without files and devices.

    Raises:
        InputError: has all messages of :func:`problems`.
    """
    if messages := problems(run):
        raise InputError(*messages)


def problems(run: "Run") -> list[str]:
    """Returns the problems of a config, each with the field, its value, and the fix."""
    # If a value has the wrong type, the other checks cannot compute with it.
    return list(_check_fields(run)) or list(_check_sections(run))


def _check_fields(run: "Run") -> Iterator[str]:
    for leaf in overrides.leaves(run):
        values = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        try:
            for value in values:
                if isinstance(value, str):
                    addresses.refuse_user(value, leaf.name)
                    if leaf.name in _PATHS and addresses.is_address(value):
                        addresses.check(value, leaf.name)
        except InputError as error:
            yield Problem(str(error), leaf.name)
        if not field_values.matches(leaf.value, leaf.annotation):
            wanted = field_values.takes(leaf.annotation)
            near = field_values.nearest(str(leaf.value), leaf.annotation)
            hint = "" if near is None else f"; did you mean {near}?"
            yield Problem(f"{leaf.name} takes {wanted}, not {leaf.value!r}{hint}", leaf.name)
            continue
        # The fields of a model may be negative and larger, if their types have no bounds.
        of_model = leaf.name.startswith("model.")
        smallest = None if of_model else int(leaf.name in _COUNTS)
        largest = _LARGEST_COUNT if of_model or leaf.name in _LARGE else _LARGEST
        default_bounds = {
            int: bounds.Bounds(least=smallest, most=largest),
            float: bounds.Bounds(least=smallest),
        }
        if fix := bounds.problem(leaf.annotation, leaf.value, default_bounds):
            text = " ".join(field_values.as_arguments(leaf.value))
            of_steps = leaf.name.endswith((".steps", ".every")) and str(largest) in fix
            hint = " (steps, not tokens)" if of_steps else ""
            yield Problem(f"{leaf.name}={text}: {fix}{hint}", leaf.name)


def _check_sections(run: "Run") -> Iterator[str]:
    yield from _exactly_one(run.loop, "loop", ("steps", "epochs", "tokens_per_param"))
    yield from _exactly_one(run.optim, "optim", ("warmup_steps", "warmup_fraction"))
    if run.loop.steps is not None:
        try:
            check_warmup(run.optim, run.loop.steps)
        except InputError as error:
            yield from error.messages
        try:
            check_patience(run.loop, run.loop.steps)
        except InputError as error:
            yield from error.messages
    if (
        run.optim.muon is not None
        and run.optim.muon.last_momentum is not None
        and run.optim.schedule != "trapezoid"
    ):
        yield Problem(
            f"optim.muon.last_momentum={run.optim.muon.last_momentum} needs a warm-down, which "
            f"optim.schedule={run.optim.schedule} does not have: set --optim.schedule trapezoid, "
            "or --optim.muon.last_momentum None",
            "optim.muon.last_momentum",
        )
    yield from _check_batch(run)
    yield from _check_cadence(run.checkpoint)
    yield from _check_best(run)
    yield from _check_gates(run)


def check_warmup(optim: "Optim", steps: int) -> None:
    """Checks that the warm-up is shorter than the run.

    Raises:
        InputError: it is not.
    """
    if optim.warmup_steps is not None and optim.warmup_steps >= steps:
        raise InputError(
            f"optim.warmup_steps {optim.warmup_steps} must be less than the run's {steps} steps: "
            f"lower --optim.warmup_steps, or set it to None and --optim.warmup_fraction 0.1",
            about=("optim.warmup_steps", "optim.warmup_fraction", "loop.steps"),
        )


def most_patience(loop: "Loop", steps: int) -> int:
    """Returns how many validations of a run of so many steps can follow the best one."""
    return 0 if loop.eval_every is None else -(-steps // loop.eval_every) - 1


def check_patience(loop: "Loop", steps: int) -> None:
    """Checks that early stopping can end the run.

    Raises:
        InputError: it cannot: there are too few validations.
    """
    patience, max_patience = loop.early_stop_patience, most_patience(loop, steps)
    if patience is not None and loop.eval_every is not None and patience > max_patience:
        fix = f"--loop.early_stop_patience {max_patience} or less, or " if max_patience else ""
        raise InputError(
            f"loop.early_stop_patience {patience} can never be reached: a run of {steps} steps, "
            f"validated every {loop.eval_every}, has {max_patience + 1} "
            f"validation{'s' if max_patience else ''}: set {fix}--loop.early_stop_patience None",
            about=("loop.early_stop_patience", "loop.eval_every", "loop.steps"),
        )


def best_mode(run: "Run") -> metrics.Mode | None:
    """Returns whether ``checkpoint.best_metric`` is better when larger or smaller.

    None without a metric.
    """
    if run.checkpoint.best_metric is None:
        return None
    known = metrics.table(metrics.added_by(run.model))
    return metrics.describe(run.checkpoint.best_metric, known).better


def _exactly_one(section: Any, name: str, fields: tuple[str, ...]) -> Iterator[str]:
    set_fields = [field for field in fields if getattr(section, field) is not None]
    if len(set_fields) != 1:
        values = ", ".join(f"{name}.{field} {getattr(section, field)}" for field in fields)
        fix = (
            f"set one of --{name}." + f", --{name}.".join(fields)
            if not set_fields
            else "set the others to None: " + " or ".join(f"--{name}.{f} None" for f in set_fields)
        )
        message = f"exactly one of {', '.join(fields)} must be set ({values}); {fix}"
        yield Problem(message, *(f"{name}.{field}" for field in fields))


def _check_batch(run: "Run") -> Iterator[str]:
    if run.mesh.auto:  # mesh_fit checks the devices that are there
        return
    devices, microbatches = run.mesh.devices, run.optim.accumulate
    batch, unit = run.data.batch_size, devices * microbatches
    if batch % unit:
        below = max(batch // unit, 1) * unit
        yield Problem(
            f"data.batch_size {batch} cannot be split: it is the global batch, per device x "
            f"{devices} devices (mesh.data {run.mesh.data} x mesh.fsdp {run.mesh.fsdp}) x "
            f"{microbatches} microbatches (optim.accumulate), so a multiple of {unit}: use "
            f"{below} or {below + unit}",
            *("data.batch_size", "mesh.data", "mesh.fsdp", "optim.accumulate"),
        )


def _check_cadence(checkpoint: "Checkpoint") -> Iterator[str]:
    every, milestones = checkpoint.every, checkpoint.milestones
    if isinstance(every, str) and checkpoint.every_s is None:
        yield Problem(
            f"checkpoint.every={every}: use a number of steps, or a time such as 90s, 10m, or 1.5h",
            "checkpoint.every",
        )
    elif milestones is not None and (isinstance(every, str) or milestones % every):
        cure = "set --checkpoint.every to steps"
        if not isinstance(every, str):
            cure = f"set --checkpoint.milestones {max(1, round(milestones / every)) * every}"
        yield Problem(
            f"checkpoint.milestones={milestones} is not a multiple of checkpoint.every={every}: "
            f"{cure}, or --checkpoint.milestones None",
            *("checkpoint.milestones", "checkpoint.every"),
        )


def _check_best(run: "Run") -> Iterator[str]:
    metric = run.checkpoint.best_metric
    if metric is not None and not metric.startswith("val/"):
        yield Problem(
            f"checkpoint.best_metric '{metric}' is not a validation metric (val/...)",
            "checkpoint.best_metric",
        )
    elif metric is not None:
        yield from _check_direction(metric, run.model)
    if metric is not None and run.loop.eval_every is None:
        yield Problem(
            f"checkpoint.best_metric {metric} needs validations, but loop.eval_every is None: set "
            "--loop.eval_every, or --checkpoint.best_metric None",
            *("checkpoint.best_metric", "loop.eval_every"),
        )
    if run.loop.early_stop_patience is not None and metric is None:
        yield Problem(
            f"loop.early_stop_patience {run.loop.early_stop_patience} needs a metric to watch: set "
            "--checkpoint.best_metric, or --loop.early_stop_patience None",
            *("loop.early_stop_patience", "checkpoint.best_metric"),
        )


def _check_gates(run: "Run") -> Iterator[str]:
    steps = run.loop.steps
    for text in run.loop.gates:
        try:
            gate = Gate.parse(text)
        except ValueError as error:
            yield Problem(f"loop.gates: {error}", "loop.gates")
            continue
        if not gate.metric.startswith("val/"):
            yield Problem(
                f"loop.gates '{text}': {gate.metric} is not a validation metric (val/...)",
                "loop.gates",
            )
        if run.loop.eval_every is None:
            yield Problem(
                f"loop.gates '{text}' needs validations, but loop.eval_every is None: set "
                "--loop.eval_every",
                *("loop.gates", "loop.eval_every"),
            )
        if steps is not None and gate.step > steps:
            yield Problem(
                f"loop.gates '{text}' is after the end of the run ({steps} steps): use a smaller "
                "step, or raise --loop.steps",
                *("loop.gates", "loop.steps"),
            )


def _check_direction(name: str, model: Any) -> Iterator[str]:
    known = metrics.table(metrics.added_by(model))
    if metrics.describe(name, known).better is None:
        choices = [f"val/{key}" for key, metric in known.items() if metric.better]
        near = difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else "use another, such as val/loss."
        yield Problem(
            f"checkpoint.best_metric {name}: it is unknown whether larger or smaller is better: "
            f"{hint} A model names the direction of its own metrics in its method metrics",
            "checkpoint.best_metric",
        )
