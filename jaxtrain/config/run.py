"""What a run is: ``Run`` and its sections.

A config file under ``configs/`` builds one :class:`Run`; :func:`load` finds it by name, applies the
overrides of the command line and checks it before any device is touched. The classes of
``Run.model`` and ``Run.data`` stand beside the code that reads them.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxtrain.config import files, invocation, overrides
from jaxtrain.errors import InputError, Problem
from jaxtrain.storage import addresses

Precision = Literal["bfloat16", "float32"]
Shard = Literal["params", "optimizer", "none"]
BadUpdates = Literal["off", "skip", "rollback"]
Schedule = Literal["cosine", "linear", "constant", "trapezoid", "cosine_with_restarts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
    """An average of the parameters over updates; validations, samples and exports use it."""

    rule: Literal["ema", "ramp"] = "ema"
    """How much of the average stays when parameters enter after n others: ema: decay, or less at
    first, (1 + n) / (10 + n); ramp: n / 10 up to decay, as TAEHV's recipe has it (with 0.95). The
    first replace all."""
    decay: float = 0.999
    """Largest share of the average that stays, below 1."""
    every: int = 1
    """Updates between two entries."""

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise InputError(
                f"optim.average.decay={self.decay}: use a number between 0 and 1",
                about="optim.average.decay",
            )
        if self.every < 1:
            raise InputError(
                f"optim.average.every={self.every}: use at least 1", about="optim.average.every"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the matrices of a model's blocks (https://kellerjordan.github.io/posts/muon/).

    Embedding and output layer take AdamW at rates of their own, and what is left takes
    optim.peak_lr. All follow one schedule.
    """

    peak_lr: float = 0.02
    """Learning rate of the matrices, times (outputs / inputs)^0.5 where that is more than one."""
    embedding_lr: float = 0.2
    """AdamW's learning rate of the embedding, times the model's factor for its width."""
    unembedding_lr: float = 0.004
    """AdamW's learning rate of the output layer, times the model's factor for its width."""
    momentum: float = 0.95
    """Decay of the mean of gradients, per update."""
    first_momentum: float = 0.85
    """The decay at the first update; it rises in a line to momentum."""
    momentum_steps: int = 300
    """Length of that rise (updates)."""

    def __post_init__(self) -> None:
        for name in ("peak_lr", "embedding_lr", "unembedding_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"optim.muon.{name}={getattr(self, name)}: use a number above 0",
                    about=f"optim.muon.{name}",
                )
        for name in ("momentum", "first_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"optim.muon.{name}={getattr(self, name)}: use a number from 0 to below 1",
                    about=f"optim.muon.{name}",
                )
        if self.momentum_steps < 0:
            raise InputError(
                f"optim.muon.momentum_steps={self.momentum_steps}: use 0 or more",
                about="optim.muon.momentum_steps",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimizer and learning rate. A step is one update; schedules count updates."""

    peak_lr: float
    """Learning rate at the end of the warm-up."""
    schedule: Schedule
    """What follows the warm-up: half a cosine to zero, a line to zero, the peak throughout, the
    peak and then a line to zero (trapezoid), or several half cosines."""
    warmup_steps: int | None = None
    """Length of the linear warm-up from zero (updates). Set this or warmup_fraction."""
    warmup_fraction: float | None = None
    """Length of the warm-up as a share of all updates, rounded down. Set this or warmup_steps."""
    warmdown_fraction: float = 0.2
    """Trapezoid only: length of the last line to zero as a share of all updates, rounded down."""
    cycles: int = 1
    """cosine_with_restarts only: number of half cosines."""
    b1: float = 0.9
    """AdamW: decay of the mean of gradients, per update."""
    b2: float = 0.95
    """AdamW: decay of the mean of squared gradients, per update."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean of squared gradients."""
    weight_decay: float = 1e-2
    """AdamW: decay per update, times the learning rate; not applied to biases and norms."""
    accumulate: int = 1
    """Microbatches that make one update; memory falls with it, data.batch_size does not change."""
    max_grad_norm: float | None = 1.0
    """Gradients with a larger global norm are scaled down to it. None is off."""
    muon: Muon | None = None
    """Muon for the matrices of models that name them. None is AdamW for all, at peak_lr."""
    average: Average | None = None
    """Average of the parameters (in memory as large as they are); None is off."""
    bad_updates: BadUpdates = "rollback"
    """What becomes of an update whose loss or gradient is not finite, or whose gradient's norm is
    above bad_norm. off: norms are not looked at, and a number that is not finite ends the run;
    skip: the model stays as it is and the next examples are taken, until bad_in_a_row end the run;
    rollback: after bad_in_a_row the newest checkpoint is restored, and the run goes on behind those
    examples."""
    bad_norm: float | None = 20.0
    """Largest norm of a gradient after the warm-up (multiple of the median of the last 128
    updates). None is off."""
    bad_in_a_row: int = 10
    """Bad updates in a row after which the run ends or rolls back (updates)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices: data x fsdp of them."""

    data: int
    """Groups of devices that hold the same shards (devices along the axis)."""
    fsdp: int
    """Devices that share one copy of parameters and optimizer state (devices along the axis)."""
    shard: Shard
    """What is sharded along fsdp. params: all state, each block gathered where it is used (ZeRO-3);
    optimizer: all state, gathered once a step; none: nothing."""
    min_shard_elements: int = 2**14
    """Arrays with fewer elements stay whole on each device (elements)."""

    @property
    def devices(self) -> int:
        """Of the whole run."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Length of the run, and what happens how often. Set one of steps, epochs, tokens_per_param."""

    steps: int | None = None
    """Length of the run (updates)."""
    epochs: int | None = None
    """Length of the run (passes over the training examples); rounded down to whole batches."""
    tokens_per_param: float | None = None
    """Length of the run (training tokens for each parameter of the model)."""
    log_every: int
    """A line on the console and in metrics.jsonl (steps)."""
    eval_every: int | None = None
    """A validation (steps). None is off."""
    eval_examples: int
    """Validation examples, the same ones each time; all of them when there are fewer (examples)."""
    hang_timeout_s: float | None = 1800.0
    """Without progress for so long, the run prints its stacks and exits with 75 (seconds). None is
    off."""
    stop_timeout_s: float = 300.0
    """After SIGTERM the run ends within the running step, one batch of an evaluation and a save; at
    the latest after so long, without the save (seconds)."""
    record_examples: bool = False
    """Write the examples of each update to examples.jsonl (examples.<process>.jsonl)."""
    early_stop_patience: int | None = None
    """Stop after so many validations without a better checkpoint.best_metric. None is off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is saved."""

    every: int
    """A checkpoint (steps)."""
    keep: int
    """Newest checkpoints that stay on disk, and the newest that was saved at checkpoint.every; the
    best is kept apart (checkpoints)."""
    best_metric: str | None = None
    """Validation metric, such as val/psnr, whose best checkpoint is kept. None is off."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller best_metric is better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    name: str = ""
    """Its directory is output/NAME/TIME. Taken from the config's file name unless given."""
    seed: int = 42
    """Of parameters, order, augmentation and masks."""
    precision: Precision = "bfloat16"
    """Of the computation; parameters, optimizer state, losses and metrics stay float32."""
    deterministic: bool = False
    """On GPUs: only kernels that give the same bits each time, which are slower. CPUs always do."""
    model: Any
    """The model."""
    data: Any
    """The data."""
    optim: Optim
    mesh: Mesh
    loop: Loop
    checkpoint: Checkpoint

    @property
    def rows_at_once(self) -> int:
        """Examples of a microbatch on one device."""
        return self.data.batch_size // (self.mesh.devices * self.optim.accumulate)

    def override(self, changes: Mapping[str, Any]) -> "Run":
        """Returns the run with fields changed, after the checks of the command line.

        Args:
            changes: dotted name -> value, such as ``{"optim.peak_lr": 3e-4}``; see
                :func:`jaxtrain.config.overrides.replaced`.

        Raises:
            InputError: no such field, a value that it does not take, or values that do not fit
                each other.
        """
        changed = overrides.replaced(self, changes)
        validate(changed)
        return changed


def named(name_or_path: str) -> Run:
    """A config by the name it ships under, or by the path of its file; not yet checked.

    Config files derive from one another with it and ``dataclasses.replace``.

    Raises:
        InputError: no such config, or its file is wrong.
    """
    path = files.find(name_or_path)
    run = files.execute(path)
    if not isinstance(run, Run):
        raise InputError(f"{path} sets run to a {type(run).__name__}; it has to be a config.Run")
    run = dataclasses.replace(run, name=path.stem)
    shipped = path.parent == files.directory()
    _LOADED[path.stem if shipped else os.path.abspath(path)] = run
    return run


_LOADED: dict[str, Run] = {}
"""A config's name, or its file's absolute path -> the run as :func:`named` last read it.

:func:`as_typed` needs it. It is not a field of a run: fields are recorded, and two runs with equal
fields are the same run.
"""


def load(name_or_path: str, arguments: Sequence[str] = ()) -> Run:
    """A config with the overrides of a command line, checked.

    Args:
        name_or_path: ``"h100_16"`` or ``"mine/big.py"``.
        arguments: ``["--data.path", "clips", "--optim.peak_lr=1e-3"]``.

    Raises:
        InputError: in one line: what is wrong, and the nearest right one.
    """
    run = unchecked(name_or_path, arguments)
    validate(run)
    return run


def unchecked(name_or_path: str, arguments: Sequence[str]) -> Run:
    """As :func:`load`, for those who look for more :func:`problems` than the config's own.

    Raises:
        InputError: no such config or field, or a value of another kind than the field takes.
    """
    return overrides.apply(named(name_or_path), arguments)


def as_typed(run: Run) -> tuple[str, ...]:
    """The arguments that give a run: a config that this process loaded, and what differs from it.

    Returns:
        ``("--config", "demo", "--loop.steps", "20")``, or ``("--config", "/tmp/own.py")``; the
        fewest arguments, addresses without their query. Empty where no arguments give the run,
        such as one built in Python.
    """
    if run.name not in _LOADED and run.name in files.names():
        with contextlib.suppress(InputError):
            named(run.name)
    found = [
        (word, _changes(base, run))
        for word, base in _LOADED.items()
        if type(base.model) is type(run.model) and type(base.data) is type(run.data)
    ]
    for word, changes in sorted(found, key=lambda one: len(one[1])):
        with contextlib.suppress(InputError):
            if overrides.apply(_LOADED[word], changes) == run:
                config = invocation.shortest(word) if os.path.isabs(word) else word
                return addresses.scrubbed(("--config", config, *changes))
    return ()


def _changes(base: Run, run: Run) -> list[str]:
    """Overrides for each field of a run that differs from another's."""
    before = {leaf.name: leaf.value for leaf in overrides.leaves(base)}
    return [
        word
        for leaf in overrides.leaves(run)
        if leaf.name not in before or before[leaf.name] != leaf.value
        for word in (f"--{leaf.name}", *overrides.words(leaf.value))
    ]


def print_help(run: Run) -> None:
    """Prints each field of a config with its unit and default."""
    overrides.print_help(run, f"jaxtrain --config {run.name}")


def validate(run: Run) -> None:
    """Checks what can be checked without files and devices.

    Raises:
        InputError: holds all messages of :func:`problems`.
    """
    if found := problems(run):
        raise InputError(*found)


def problems(run: Run) -> list[str]:
    """What is wrong with a config by itself: each with the field, its value and the fix."""
    # Where a field has a value of another kind, the other checks cannot compute with it.
    return list(_check_fields(run)) or list(_check_sections(run))


def _check_fields(run: Run) -> Iterator[str]:
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
        if not overrides.matches(leaf.value, leaf.annotation):
            wanted = overrides.takes(leaf.annotation)
            near = overrides.nearest_value(str(leaf.value), leaf.annotation)
            hint = "" if near is None else f"; did you mean {near}?"
            yield Problem(f"{leaf.name} takes {wanted}, not {leaf.value!r}{hint}", leaf.name)
        elif any(isinstance(n, int | float) and not 0 <= n < math.inf for n in values):
            yield Problem(
                f"{leaf.name} is {leaf.value}; it has to be a finite number, not below zero",
                leaf.name,
            )
    for section, fields in _POSITIVE.items():
        for field in fields:
            yield from _check_value(run, section, field, lambda v: v > 0, "more than zero")


def _check_sections(run: Run) -> Iterator[str]:
    for field in ("b1", "b2", "warmup_fraction"):
        yield from _check_value(run, "optim", field, lambda v: v < 1, "below one")
    for section, field in (("optim", "warmdown_fraction"), ("data", "max_bad_share")):
        yield from _check_value(run, section, field, lambda v: v <= 1, "at most one")
    yield from _exactly_one(run.loop, "loop", ("steps", "epochs", "tokens_per_param"))
    yield from _exactly_one(run.optim, "optim", ("warmup_steps", "warmup_fraction"))
    if run.loop.steps is not None:
        try:
            check_warmup(run.optim, run.loop.steps)
        except InputError as error:
            yield from error.messages
    yield from _check_batch(run)
    yield from _check_best(run)
    if not 0 <= run.seed < 2**32:
        yield Problem(
            f"seed {run.seed} is not a number from 0 to 2^32 - 1: set another --seed", "seed"
        )


def check_warmup(optim: Optim, steps: int) -> None:
    """The warm-up has to be shorter than the run.

    Raises:
        InputError: it is not.
    """
    if optim.warmup_steps is not None and optim.warmup_steps >= steps:
        raise InputError(
            f"optim.warmup_steps {optim.warmup_steps} has to be less than the run's {steps} steps: "
            f"lower --optim.warmup_steps, or set it to None and --optim.warmup_fraction 0.1",
            about=("optim.warmup_steps", "optim.warmup_fraction", "loop.steps"),
        )


OLDER_CLASSES = {
    "jaxtrain.models.gpt.Config": "gpt",
    "jaxtrain.models.llama.Config": "llama",
    "jaxtrain.models.mlm.Config": "mlm",
    "jaxtrain.models.video_ae.config.Config": "video_ae",
    "jaxtrain.models.video_ae.losses.Adversary": "Adversary",
    "jaxtrain.models.video_ae.losses.Perceptual": "Perceptual",
    "jaxtrain.models.video_ae.losses.Teacher": "Teacher",
    "jaxtrain.data.text.Causal": "text.Causal",
    "jaxtrain.data.text.Masked": "text.Masked",
    "jaxtrain.data.video.Config": "video",
}
"""What files of versions before 0.2 call a class -> what :func:`to_dict` calls it."""


def to_dict(section: Any) -> dict[str, Any]:
    """A config as JSON holds it: nested dicts, tuples as lists; model and data with a short name.

    Addresses are without their query (:mod:`jaxtrain.storage.addresses`): what comes out is
    recorded. The name, such as ``gpt`` or ``text.Causal``, stays when modules move. What is read
    back from a file goes through :mod:`jaxtrain.models.from_file`, which takes no other names.
    """
    named = {} if type(section).__module__ == __name__ else {"class": _short_name(type(section))}
    return named | _fields(section)


def _fields(section: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            # Of a section that is declared, the field says the class.
            value = to_dict(value) if field.type is Any else _fields(value)
        result[field.name] = addresses.scrubbed(list(value) if isinstance(value, tuple) else value)
    return result


def _short_name(section: type[Any]) -> str:
    path = f"{section.__module__}.{section.__qualname__}"
    package, _, inside = section.__module__.removeprefix("jaxtrain.").partition(".")
    if path in OLDER_CLASSES or not section.__module__.startswith("jaxtrain."):
        return OLDER_CLASSES.get(path, path)
    name = inside.partition(".")[0] or package
    return name if section.__qualname__ == "Config" else f"{name}.{section.__qualname__}"


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config in :func:`to_dict` form as ``{"optim.peak_lr": 0.003, ...}``, in order.

    Classes have today's names, also those of an older file, which named declared sections too.
    """
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        elif key != "class" or not isinstance(value, str):
            found[prefix + key] = value
        elif prefix.count(".") == 1 or value not in OLDER_CLASSES:
            found[prefix + key] = OLDER_CLASSES.get(value, value)
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two configs in :func:`to_dict` form: ``"seed: 1 -> 2"``, in order."""
    left, right = flat(before), flat(after)
    return [
        f"{name}: {left.get(name, '(absent)')} -> {right.get(name, '(absent)')}"
        for name in {**left, **right}
        if name not in left or name not in right or left[name] != right[name]
    ]


_PATHS = ("data.path", "data.more_paths", "data.val_path")

# What remains is the detail of problems(). "Positive" holds where a field is not None.
_POSITIVE: dict[str, tuple[str, ...]] = {
    "optim": (
        *("peak_lr", "eps", "cycles", "accumulate", "max_grad_norm"),
        *("bad_norm", "bad_in_a_row"),
    ),
    "mesh": ("data", "fsdp"),
    "loop": (
        *("steps", "epochs", "tokens_per_param", "log_every", "eval_every", "eval_examples"),
        *("hang_timeout_s", "stop_timeout_s", "early_stop_patience"),
    ),
    "checkpoint": ("every", "keep"),
    "data": ("batch_size", "prefetch"),
}


def _check_value(
    run: Run, section: str, field: str, holds: Callable[[Any], bool], wanted: str
) -> Iterator[str]:
    value = getattr(getattr(run, section), field)
    # A value of another kind has its own message.
    if isinstance(value, int | float) and 0 <= value < math.inf and not holds(value):
        yield Problem(f"{section}.{field} is {value}; it has to be {wanted}", f"{section}.{field}")


def _exactly_one(section: Any, name: str, fields: tuple[str, ...]) -> Iterator[str]:
    given = [field for field in fields if getattr(section, field) is not None]
    if len(given) != 1:
        values = ", ".join(f"{name}.{field} {getattr(section, field)}" for field in fields)
        cure = (
            f"set one of --{name}." + f", --{name}.".join(fields)
            if not given
            else "set the others to None: " + " or ".join(f"--{name}.{f} None" for f in given)
        )
        message = f"exactly one of {', '.join(fields)} is needed ({values}); {cure}"
        yield Problem(message, *(f"{name}.{field}" for field in fields))


def _check_batch(run: Run) -> Iterator[str]:
    devices, microbatches = run.mesh.devices, run.optim.accumulate
    batch, unit = run.data.batch_size, devices * microbatches
    if batch % unit:
        below = max(batch // unit, 1) * unit
        yield Problem(
            f"data.batch_size {batch} cannot be split: it is the global batch, per device x "
            f"{devices} devices (mesh.data {run.mesh.data} x mesh.fsdp {run.mesh.fsdp}) x "
            f"{microbatches} microbatches (optim.accumulate), so a multiple of {unit}; the nearest "
            f"are {below} and {below + unit}",
            *("data.batch_size", "mesh.data", "mesh.fsdp", "optim.accumulate"),
        )


def _check_best(run: Run) -> Iterator[str]:
    metric = run.checkpoint.best_metric
    if metric is not None and not metric.startswith("val/"):
        yield Problem(
            f"checkpoint.best_metric '{metric}' is no validation metric (val/...)",
            "checkpoint.best_metric",
        )
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
