"""The config of a run: ``Run`` and its sections.

A config file in ``configs/`` builds one :class:`Run`; :func:`load` finds it by name, applies the
overrides of the command line and checks it before any device is touched. The classes of
``Run.model`` and ``Run.data`` are next to the code that reads them.
"""

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from jaxtrain.config import bounds, field_values, files, invocation, metrics, overrides
from jaxtrain.config.gates import Gate
from jaxtrain.errors import InputError, Problem, shortest_path
from jaxtrain.storage import addresses

Precision = Literal["bfloat16", "float32"]
Shard = Literal["params", "optimizer", "none"]
BadUpdates = Literal["off", "skip", "rollback"]
Schedule = Literal["cosine", "linear", "constant", "trapezoid"]

_PATHS = ("data.path", "data.more_paths", "data.val_path")

# Steps and sizes of batches are int32 on the devices; only documents are counted beyond that.
_LARGEST, _LARGEST_COUNT = 2**31 - 1, 2**63 - 1
_LARGE = ("data.max_examples",)
_COUNTS = ("data.batch_size", "data.prefetch")  # also of data outside the package


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average(bounds.Section):
    """Moving average (EMA) of the parameters. Validation, samples, and exports use it."""

    section = "optim.average"

    rule: Literal["ema", "ramp"] = "ema"
    """EMA warm-up: the decay after n averaged steps is at most (1 + n) / (10 + n) (ema), or n / 10
    (ramp), as in TAEHV's recipe, which uses decay 0.95."""
    decay: Annotated[float, bounds.Bounds(above=0, below=1)] = 0.999
    """EMA decay: the fraction of the average that is kept each time, below 1."""
    every: bounds.Count = 1
    """Interval at which the parameters enter the average, in steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(bounds.Section):
    """Muon for the matrices of a model's blocks. See https://kellerjordan.github.io/posts/muon/.

    The embedding and the output layer use AdamW with their own learning rates, all other parameters
    AdamW with optim.peak_lr. All follow one schedule.
    """

    section = "optim.muon"

    peak_lr: bounds.Positive = 0.02
    """Peak learning rate of the matrices, multiplied by max(1, outputs / inputs)^0.5."""
    embedding_lr: bounds.Positive = 0.2
    """AdamW peak learning rate of the embedding, multiplied by the model's factor for its width."""
    unembedding_lr: bounds.Positive = 0.004
    """AdamW peak learning rate of the output layer, multiplied by the model's factor for its
    width."""
    momentum: bounds.Fraction = 0.95
    """Muon momentum after the momentum warm-up."""
    first_momentum: bounds.Fraction = 0.85
    """Muon momentum at the first step; it rises linearly to momentum."""
    momentum_steps: Annotated[int, bounds.Bounds(least=0)] = 300
    """Length of the momentum warm-up, in steps."""
    last_momentum: bounds.Fraction | None = None
    """Muon momentum at the end of the run, to which it falls linearly during the warm-down of
    optim.schedule trapezoid. None keeps momentum."""
    equilibrate: bool = False
    """Scale the part of the momentum that belongs to each output of a matrix to one norm, before
    the matrix is orthogonalized."""
    polar_express: bool = False
    """Orthogonalize with the five different polynomials of Polar Express, which come closer than
    five times the same one."""
    variance_b2: bounds.Fraction | None = None
    """Divide the update of each output of a matrix, or of each input if there are more of them, by
    the root of its mean square, whose decay per step this is; the norm of the matrix's update stays
    the same. None turns it off."""
    cautious_decay: bool = False
    """Apply optim.weight_decay to matrices only where it agrees with the update in sign, and lower
    it from the first to the last step to zero, by half a cosine."""
    scalar_lr: bounds.Positive = 0.5
    """AdamW peak learning rate of trained scalars, multiplied by the model's factor for each of
    them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimizer and learning rate: AdamW, or with optim.muon Muon for matrices and AdamW for the
    rest. A step is one optimizer step; schedules count steps."""

    peak_lr: bounds.Positive
    """Learning rate at the end of the warm-up."""
    schedule: Schedule
    """Learning rate after the warm-up. cosine: cosine decay to zero; linear: linear decay to zero;
    constant: the peak; trapezoid (WSD, warmup-stable-decay): the peak, then linear decay to zero or
    optim.warmdown_to."""
    warmup_steps: int | None = None
    """Length of the linear warm-up from zero, in steps. Set this or warmup_fraction."""
    warmup_fraction: bounds.Fraction | None = None
    """Length of the warm-up as a fraction of all steps, rounded down. Set this or warmup_steps."""
    warmdown_fraction: bounds.Share = 0.2
    """trapezoid only: length of the final decay as a fraction of all steps, rounded down."""
    warmdown_to: bounds.Share = 0.0
    """trapezoid only: the learning rate at the end, as a fraction of the peak."""
    b1: bounds.Fraction = 0.9
    """AdamW beta1: decay of the mean of gradients, per step."""
    b2: bounds.Fraction = 0.95
    """AdamW beta2: decay of the mean of squared gradients, per step."""
    eps: bounds.Positive = 1e-8
    """AdamW epsilon, added to the root of the mean of squared gradients."""
    weight_decay: float = 1e-2
    """Weight decay per step, multiplied by the learning rate, in AdamW and Muon; not applied to
    biases, norms, and the embedding and output layer of GPT and Llama, for which model.recipe 2026
    has values of its own."""
    accumulate: bounds.Count = 1
    """Gradient accumulation: microbatches per step. More microbatches need less
    memory; data.batch_size stays the global batch size."""
    max_grad_norm: bounds.Positive | None = 1.0
    """Gradient clipping: the largest global norm. None turns it off."""
    muon: Muon | None = None
    """Muon for the matrices of models that support it. None uses AdamW for all parameters."""
    average: Average | None = None
    """Moving average of the parameters, which needs as much memory as they do. None turns it
    off."""
    bad_updates: BadUpdates = "rollback"
    """What to do with a bad step: one whose loss or gradient is NaN/Inf, or whose gradient norm is
    above bad_norm. off: ignore the norm, and end the run at NaN/Inf; skip: keep the parameters,
    continue with the next examples, and end the run after bad_in_a_row bad steps; rollback: like
    skip, but after bad_in_a_row bad steps, restore the newest checkpoint and continue with the
    examples after the bad ones."""
    bad_norm: bounds.Positive | None = 20.0
    """Largest gradient norm of a good step, as a multiple of the median of the last 128 good steps.
    Norms are compared after as many good steps as the warm-up has, and at least 32. None turns it
    off."""
    bad_in_a_row: bounds.Count = 10
    """Number of consecutive bad steps after which the run ends or rolls back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """The device mesh: data x fsdp devices."""

    data: bounds.Count
    """Number of groups of fsdp devices; each group holds a full copy of the state."""
    fsdp: bounds.Count
    """Number of devices that share one copy of parameters and optimizer state."""
    shard: Shard
    """What is sharded along fsdp. params: parameters and optimizer state, with each block gathered
    where it is used (ZeRO-3); optimizer: the same, but parameters are gathered once per step
    (effectively ZeRO-2); none: nothing."""
    min_shard_elements: int = 2**14
    """Smallest array that is sharded, in elements; smaller ones are replicated."""
    auto: bool = False
    """Fit the run to the available devices: whenever it starts or resumes, choose data, fsdp, and
    optim.accumulate, but keep data.batch_size, so that training does not change, up to rounding."""

    @property
    def devices(self) -> int:
        """Number of devices of the run."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Length of the run, logging, and validation. Set one of steps, epochs, tokens_per_param."""

    steps: bounds.Count | None = None
    """Length of the run, in steps."""
    epochs: bounds.Count | None = None
    """Length of the run, in passes over the training examples, rounded down to full batches."""
    tokens_per_param: bounds.Positive | None = None
    """Length of the run, in training tokens per parameter of the model."""
    log_every: bounds.Count
    """Interval between lines on the console and in metrics.jsonl, in steps."""
    eval_every: bounds.Count | None = None
    """Interval between validations, in steps. None turns it off."""
    eval_examples: bounds.Count
    """Number of validation examples, the same ones each time; if there are fewer, all of them."""
    hang_timeout_s: bounds.Positive | None = 1800.0
    """Hang detection: seconds without progress after which the run prints its stacks and exits
    with code 75. None turns it off."""
    stop_timeout_s: bounds.Positive = 300.0
    """Longest time from SIGTERM to the end of the run, in seconds. Usually the run finishes the
    current step or validation batch, saves, and ends; after this time it ends without saving."""
    replay_every: bounds.Count | None = None
    """Check of the devices: interval at which a step is computed twice and compared bit by bit, in
    steps. 120 costs about 1% of the time, and the memory for a second state. After a difference,
    the run exits with code 75, and resumes from the newest checkpoint up to the last equal results.
    GPUs require deterministic. None turns it off."""
    find_nan: bool = False
    """At the first bad step with NaN/Inf of each start, compute the step again with a check after
    each operation, to find the line of the model and the operation that computes the first NaN. It
    takes two to three times as long to compile as the step, and may need more device memory."""
    max_hours: bounds.Positive | None = None
    """Time limit, in hours since the start of the program. Then the run finishes the current step,
    saves, and ends with exit code 130, after which launchers do not restart it. Each start of the
    run has the full time. None turns it off."""
    record_examples: bool = False
    """Write the examples of each step to examples.jsonl (examples.<process>.jsonl)."""
    gates: tuple[str, ...] = ()
    """What a run must have reached, such as "val/psnr > 24 at 5000": the first validation after
    5000 steps or more must meet it, or the run saves and ends there with exit code 4, after which
    launchers do not restart it. Several are separated by spaces, each in quotes."""
    early_stop_patience: bounds.Count | None = None
    """Early stopping: number of validations without a better checkpoint.best_metric, less than the
    run has. None turns it off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How often checkpoints are saved, and which are kept."""

    every: bounds.Count
    """Interval between checkpoints, in steps."""
    keep: bounds.Count
    """Number of newest checkpoints to keep, in addition to the best one, the newest whose step is a
    multiple of checkpoint.every, and with loop.replay_every the newest up to the last equal
    results."""
    best_metric: str | None = None
    """Validation metric whose best checkpoint is kept, such as val/psnr. None turns it off."""
    best_mode: Literal["max", "min"] | None = None
    """Whether a larger (max) or a smaller (min) best_metric is better. Needed only for a metric
    whose direction is unknown."""
    mirror: str | None = None
    """Folder in a bucket, s3://BUCKET/PATH or gs://BUCKET/PATH, to which the run directory is
    copied while training continues. A resume uses the newest complete checkpoint of the two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    name: str = ""
    """Name of the run; by default, the name of the config file. The run directory is
    output/NAME/TIME."""
    seed: Annotated[int, bounds.Bounds(least=0, most=2**32 - 1)] = 42
    """Random seed for parameters, example order, augmentation, and masks."""
    precision: Precision = "bfloat16"
    """Precision of the computation; parameters, optimizer state, losses, and metrics stay
    float32."""
    deterministic: bool = False
    """On GPUs, use only deterministic kernels, which are slower. On CPUs, all kernels are
    deterministic."""
    model: Any
    """The model."""
    data: Any
    """The data."""
    optim: Optim
    mesh: Mesh
    loop: Loop
    checkpoint: Checkpoint

    @property
    def microbatch_size(self) -> int:
        """Examples per device and microbatch."""
        return max(1, self.data.batch_size // (self.mesh.devices * self.optim.accumulate))

    def batch_spec(self, batch_size: int) -> dict[str, Any]:
        """Returns the arrays of a training batch as the workers make them (:meth:`received`)."""
        spec: dict[str, Any] = self.model.batch_spec(batch_size)
        return self.data.sent(spec, self.model) if hasattr(self.data, "sent") else spec

    def received(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays that the model requires, from those of :meth:`batch_spec`."""
        if not hasattr(self.data, "received"):
            return batch
        return cast(dict[str, Any], self.data.received(batch, self.model))

    def override(self, changes: Mapping[str, Any]) -> "Run":
        """Returns the run with fields changed, after the checks of the command line.

        Args:
            changes: dotted name -> value, such as ``{"optim.peak_lr": 3e-4}``; see
                :func:`jaxtrain.config.overrides.replaced`.

        Raises:
            InputError: no such field, a value that it does not take, or values that do not fit
                each other.
        """
        with invocation.from_python():
            changed = overrides.replaced(self, changes)
            validate(changed)
        return changed


def load(name_or_path: str, arguments: Sequence[str] = ()) -> Run:
    """Loads a config, applies the overrides of a command line, and checks the result.

    Args:
        name_or_path: ``"h100_16"`` or ``"mine/big.py"``.
        arguments: ``["--data.path", "clips", "--optim.peak_lr=1e-3"]``.

    Raises:
        InputError: has one line per problem, with the nearest valid name or value.
    """
    run = unchecked(name_or_path, arguments)
    validate(run)
    return run


def unchecked(name_or_path: str, arguments: Sequence[str]) -> Run:
    """Like :func:`load` without the check, for callers that report :func:`problems` themselves.

    Raises:
        InputError: no such config or field, or a value of the wrong type.
    """
    return overrides.apply(named(name_or_path), arguments)


def named(name_or_path: str) -> Run:
    """Returns a shipped config, or that of a file; not yet checked.

    A config file derives from another one with this function and ``dataclasses.replace``.

    Raises:
        InputError: no such config, or its file has an error.
    """
    path = files.find(name_or_path)
    run = files.execute(path)
    if not isinstance(run, Run):
        raise InputError(f"{path} sets run to a {type(run).__name__}; it must be a config.Run")
    run = dataclasses.replace(run, name=path.stem)
    shipped = path.parent == files.directory()
    _LOADED[path.stem if shipped else os.path.abspath(path)] = run
    return run


_LOADED: dict[str, Run] = {}
"""Name of a config, or absolute path of its file -> the run as :func:`named` last read it.

For :func:`equivalent_arguments`. It is not a field of a run: fields are recorded, and two runs with
equal fields are the same run.
"""


def equivalent_arguments(run: Run) -> tuple[str, ...]:
    """Returns arguments that give a run: a config that this process loaded, and overrides.

    Returns:
        ``("--config", "demo", "--loop.steps", "20")``, or ``("--config", "/tmp/own.py")``; the
        fewest arguments, URLs without their query. Empty if no arguments give the run, for
        example because it was built in Python.
    """
    if run.name not in _LOADED and run.name in files.names():
        with contextlib.suppress(InputError):
            named(run.name)
    candidates = [
        (word, _changes(base, run))
        for word, base in _LOADED.items()
        if type(base.model) is type(run.model) and type(base.data) is type(run.data)
    ]
    for word, changes in sorted(candidates, key=lambda candidate: len(candidate[1])):
        with contextlib.suppress(InputError):
            if overrides.apply(_LOADED[word], changes) == run:
                config = shortest_path(word) if os.path.isabs(word) else word
                return addresses.scrubbed(("--config", config, *changes))
    return ()


def _changes(base: Run, run: Run) -> list[str]:
    """Returns overrides for the fields in which ``run`` differs from ``base``."""
    before = {leaf.name: leaf.value for leaf in overrides.leaves(base)}
    return [
        word
        for leaf in overrides.leaves(run)
        if leaf.name not in before or before[leaf.name] != leaf.value
        for word in (f"--{leaf.name}", *field_values.words(leaf.value))
    ]


def validate(run: Run) -> None:
    """Checks a config, as far as possible without files and devices.

    Raises:
        InputError: has all messages of :func:`problems`.
    """
    if messages := problems(run):
        raise InputError(*messages)


def problems(run: Run) -> list[str]:
    """Returns the problems of a config, each with the field, its value, and the fix."""
    # If a value has the wrong type, the other checks cannot compute with it.
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
        if not field_values.matches(leaf.value, leaf.annotation):
            wanted = field_values.takes(leaf.annotation)
            near = field_values.nearest(str(leaf.value), leaf.annotation)
            hint = "" if near is None else f"; did you mean {near}?"
            yield Problem(f"{leaf.name} takes {wanted}, not {leaf.value!r}{hint}", leaf.name)
            continue
        # The fields of a model may be negative and larger, if their types have no bounds.
        of_model = leaf.name.startswith("model.")
        least = None if of_model else int(leaf.name in _COUNTS)
        most = _LARGEST_COUNT if of_model or leaf.name in _LARGE else _LARGEST
        default_bounds = {
            int: bounds.Bounds(least=least, most=most),
            float: bounds.Bounds(least=least),
        }
        if fix := bounds.problem(leaf.annotation, leaf.value, default_bounds):
            shown = " ".join(field_values.words(leaf.value))
            of_steps = leaf.name.endswith((".steps", ".every")) and str(most) in fix
            hint = " (steps, not tokens)" if of_steps else ""
            yield Problem(f"{leaf.name}={shown}: {fix}{hint}", leaf.name)


def _check_sections(run: Run) -> Iterator[str]:
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
    yield from _check_best(run)
    yield from _check_gates(run)


def check_warmup(optim: Optim, steps: int) -> None:
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


def most_patience(loop: Loop, steps: int) -> int:
    """Returns how many validations of a run of so many steps can follow the best one."""
    return 0 if loop.eval_every is None else -(-steps // loop.eval_every) - 1


def check_patience(loop: Loop, steps: int) -> None:
    """Checks that early stopping can end the run.

    Raises:
        InputError: it cannot: there are too few validations.
    """
    patience, most = loop.early_stop_patience, most_patience(loop, steps)
    if patience is not None and loop.eval_every is not None and patience > most:
        fix = f"--loop.early_stop_patience {most} or less, or " if most else ""
        raise InputError(
            f"loop.early_stop_patience {patience} can never be reached: a run of {steps} steps, "
            f"validated every {loop.eval_every}, has {most + 1} "
            f"validation{'s' if most else ''}: set {fix}--loop.early_stop_patience None",
            about=("loop.early_stop_patience", "loop.eval_every", "loop.steps"),
        )


def best_mode(run: Run) -> metrics.Mode | None:
    """Returns whether ``checkpoint.best_metric`` is better when larger or smaller.

    None without a metric.
    """
    if run.checkpoint.best_metric is None:
        return None
    known = metrics.table(metrics.added_by(run.model))
    return metrics.describe(run.checkpoint.best_metric, known).better or run.checkpoint.best_mode


def to_dict(section: Any) -> dict[str, Any]:
    """Converts a config to JSON types: nested dicts, tuples as lists.

    Model and data have an entry ``class`` with a short name, such as ``gpt`` or ``text.Causal``,
    which stays the same when modules move; :mod:`jaxtrain.models.from_file` reads them back and
    accepts no other names. The result is recorded, so URLs come without their query
    (:mod:`jaxtrain.storage.addresses`).
    """
    named = {} if type(section).__module__ == __name__ else {"class": _short_name(type(section))}
    return named | _fields(section)


def _fields(section: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            # Unless it is Any, the type of the field is the class of the section.
            value = to_dict(value) if field.type is Any else _fields(value)
        value = _as_text(list(value) if isinstance(value, tuple) else value)
        result[field.name] = addresses.scrubbed(value)
    return result


def _as_text(value: Any) -> Any:
    """Escapes bytes that are not UTF-8 in paths, which JSON and TensorBoard do not take."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _short_name(section: type[Any]) -> str:
    path = f"{section.__module__}.{section.__qualname__}"
    package, _, inside = section.__module__.removeprefix("jaxtrain.").partition(".")
    if not section.__module__.startswith("jaxtrain."):
        return path
    name = inside.partition(".")[0] or package
    return name if section.__qualname__ == "Config" else f"{name}.{section.__qualname__}"


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens the result of :func:`to_dict`: ``{"optim.peak_lr": 0.003, ...}``, in order."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[prefix + key] = value
    return values


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Compares two results of :func:`to_dict`: ``"seed: 1 -> 2"`` for each change, in order."""
    left, right = flat(before), flat(after)
    return [
        f"{name}: {left.get(name, '(absent)')} -> {right.get(name, '(absent)')}"
        for name in {**left, **right}
        if name not in left or name not in right or left[name] != right[name]
    ]


def _exactly_one(section: Any, name: str, fields: tuple[str, ...]) -> Iterator[str]:
    given = [field for field in fields if getattr(section, field) is not None]
    if len(given) != 1:
        values = ", ".join(f"{name}.{field} {getattr(section, field)}" for field in fields)
        fix = (
            f"set one of --{name}." + f", --{name}.".join(fields)
            if not given
            else "set the others to None: " + " or ".join(f"--{name}.{f} None" for f in given)
        )
        message = f"exactly one of {', '.join(fields)} must be set ({values}); {fix}"
        yield Problem(message, *(f"{name}.{field}" for field in fields))


def _check_batch(run: Run) -> Iterator[str]:
    if run.mesh.auto:  # sharding.fit_mesh checks the devices that are there
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


def _check_best(run: Run) -> Iterator[str]:
    metric = run.checkpoint.best_metric
    if metric is not None and not metric.startswith("val/"):
        yield Problem(
            f"checkpoint.best_metric '{metric}' is not a validation metric (val/...)",
            "checkpoint.best_metric",
        )
    elif metric is not None:
        yield from _check_mode(metric, run.checkpoint.best_mode, run.model)
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


def _check_gates(run: Run) -> Iterator[str]:
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


def _check_mode(name: str, mode: metrics.Mode | None, model: Any) -> Iterator[str]:
    known = metrics.table(metrics.added_by(model))
    better = metrics.describe(name, known).better
    if better is None and mode is None:
        choices = [f"val/{key}" for key, metric in known.items() if metric.better]
        near = difflib.get_close_matches(name, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Problem(
            f"checkpoint.best_metric {name}: it is unknown whether larger or smaller is better: "
            f"set --checkpoint.best_mode max or min{hint}",
            *("checkpoint.best_metric", "checkpoint.best_mode"),
        )
    if better is not None and mode not in (None, better):
        larger = "larger" if better == "max" else "smaller"
        yield Problem(
            f"checkpoint.best_mode {mode} contradicts checkpoint.best_metric {name}: {larger} "
            "values are better; set --checkpoint.best_mode None",
            *("checkpoint.best_mode", "checkpoint.best_metric"),
        )
