"""A side of a comparison, and what a process finds out about it before anything is trained.

Results of a side are results of what its runs compute. :func:`examine` finds the *identity* of
that: the config, the programs of the step, the first state, and the validation without the places
of their source lines, the learning rates of the steps, the examples and the code that loads them,
weights that are read from files, the versions of the packages, and the kind of device. An edit that
changes none of these, such as one of a docstring or a command, leaves the identity as it is.

A run has no time to trace all its programs twice. It records a digest of its source files instead
(:class:`jaxtrain.telemetry.events.StepCompiled`), and :mod:`jaxtrain.comparison.identities` which
of these digests have been examined for an identity.
"""

import ast
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxtrain.comparison.code import Code
from jaxtrain.errors import InputError

At = Literal["steps", "flops"]

_LEAST_STEPS, _MEASURED_S = 5, 5.0
_NO_OTHER_LENGTH = ("--loop.epochs", "None", "--loop.tokens_per_param", "None")
_STEPS_OF_SCHEDULE = 1000
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Side:
    """What a side trains.

    Attributes:
        code: the commit whose code it is; None for the code of this process.
    """

    config: str
    overrides: tuple[str, ...]
    description: str
    code: Code | None = None

    @property
    def config_in_its_code(self) -> str:
        """Returns what its config is called where its code is."""
        return self.config if self.code is None else self.code.path_of(self.config)

    @property
    def folder(self) -> Path | None:
        """Returns the folder of its code; None for the code of this process."""
        return None if self.code is None else self.code.folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a side before it is trained.

    Attributes:
        parts: what is part of the identity -> digest.
        length: overrides that set the length, if the config does not.
        step_s: seconds of a step, as measured on this machine.
    """

    name: str
    seed: int
    metric: str
    mode: Literal["max", "min"]
    parts: Mapping[str, str]
    code: str
    data: str
    steps: int
    length: tuple[str, ...]
    flops: float
    step_s: float

    @property
    def identity(self) -> str:
        """Returns one digest of all parts."""
        return _digest(self.parts)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Facts":
        """Returns what ``dataclasses.asdict`` turned into JSON."""
        return cls(**{**values, "length": tuple(values["length"])})


def check(run: Any, metric: str | None, side: str) -> tuple[str, Literal["max", "min"]]:
    """Checks that a config can be compared; returns the metric, and which values are better.

    Args:
        metric: None takes ``checkpoint.best_metric``.
    """
    from jaxtrain.config import metrics

    metric = metric or run.checkpoint.best_metric
    if metric is None:
        raise InputError(
            "checkpoint.best_metric is None: name what is compared with --metric, such as val/loss"
        )
    mode = metrics.describe(metric, metrics.table(metrics.added_by(run.model))).better
    if mode is None or not metric.startswith("val/"):
        raise InputError(
            f"--metric {metric}: use a validation metric that is better when larger or smaller, "
            "such as val/loss"
        )
    if run.loop.eval_every is None:
        raise InputError(
            f"side {side} has no validation: set --loop.eval_every, such as to its steps"
        )
    return metric, mode


def examine(request: dict[str, Any], send: Any) -> None:
    """Sends ``{"say": line}`` for each line to print, and at the end ``{"facts": ...}``.

    It runs in a process of its own, with the devices of a run.

    Args:
        request: ``config``, ``overrides``, ``metric``, ``side``, ``simulate_devices``; ``flops``
            of a run, to which its steps are fitted, or None; ``fit_s``, the seconds to which they
            are fitted, or None; ``known``, the folder of :class:`identities.Identities`.
    """
    from jaxtrain import config
    from jaxtrain.comparison.identities import Identities

    overrides = [*request["overrides"]]
    run = config.load(request["config"], overrides)
    metric, mode = check(run, request["metric"], request["side"])
    with _devices(run, request) as run:
        probe = _Probe(run, lambda line: send({"say": line}))
        known = Identities(Path(request["known"]))
        step_s = known.step_s(probe.program)
        if step_s is None:
            step_s = probe.step_s()
            known.measured(probe.program, step_s)
        wanted, length = None, tuple[str, ...]()
        if request["fit_s"] is not None:
            wanted = request["fit_s"] / step_s
        elif request["flops"] is not None:
            wanted = request["flops"] / probe.step_flops
        if wanted is not None:
            length = fitted(run, probe.built.total, wanted)
            probe = _Probe(
                _fitted_to_devices(config.load(request["config"], [*overrides, *length])),
                lambda line: None,
            )
    facts = Facts(
        name=run.name,
        seed=run.seed,
        metric=metric,
        mode=mode,
        parts=probe.parts,
        code=probe.code,
        data=probe.data,
        steps=probe.built.total,
        length=length,
        flops=probe.step_flops * probe.built.total,
        step_s=step_s,
    )
    known.examined(facts.identity, facts.parts, facts.code)
    send({"facts": dataclasses.asdict(facts)})


def fitted(run: Any, before: int, steps: float) -> tuple[str, ...]:
    """Returns the overrides of a run of other length, whose schedule keeps its shape."""
    count, warmup = max(1, round(steps)), run.optim.warmup_steps
    length = ("--loop.steps", str(count), *_NO_OTHER_LENGTH)
    if warmup is None:
        return length
    return (*length, "--optim.warmup_steps", str(warmup and max(1, warmup * count // before)))


@contextlib.contextmanager
def _devices(run: Any, request: Mapping[str, Any]) -> Iterator[Any]:
    """Prepares this process as a run does; yields the config, fitted to the devices."""
    from jaxtrain.distributed import process_group
    from jaxtrain.jobs import worker_process
    from jaxtrain.ops import cpu
    from jaxtrain.storage import cache
    from jaxtrain.xla import gpu_memory, options

    gpu_memory.reserve_memory(os.environ)
    if request["simulate_devices"] or process_group.will_use_cpu(os.environ):
        cpu.keep_freed()
    process_group.connect({}, request["simulate_devices"])
    process_group.check_accelerator(os.environ)
    options.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
    with worker_process.started_by_us():
        yield _fitted_to_devices(run)


def _fitted_to_devices(run: Any) -> Any:
    from jaxtrain.config.mesh_fit import fit_to_present_devices

    return fit_to_present_devices(run)[0]


class _Probe:
    """Opens the data of a config, and builds and lowers its programs.

    The seed is 0 in the programs: runs of all pairs compute the same.
    """

    def __init__(self, run: Any, say: Any) -> None:
        import jax

        from jaxtrain import config, versions
        from jaxtrain.checkpoint import resume
        from jaxtrain.distributed import consistency
        from jaxtrain.sharding import make_mesh
        from jaxtrain.storage.atomic import expanded
        from jaxtrain.training import first_state, setup
        from jaxtrain.training.model_flops import model_flops
        from jaxtrain.training.state import checksums, jit_init
        from jaxtrain.training.step import build_eval_step, jit_eval_step
        from jaxtrain.training.step_setup import build_step_setup, validation_batch_size

        model = first_state.with_source(run, say)
        sources = setup.open_sources(run, model, None, say)
        seeded = dataclasses.replace(run, seed=0)
        self.built = built = build_step_setup(
            seeded, make_mesh(run.mesh), len(sources.train), lambda line: None
        )
        self.step_flops = model_flops(run.training_model) * run.data.batch_size
        with built.lowering():
            self.step = built.trace_step().lower()
        first = jit_init(built.definition, built.optimizer, built.target, built.rule, 0).lower()
        evaluate = build_eval_step(
            built.definition, built.rule, precision=run.precision, method="evaluate"
        )
        jitted: Any = jit_eval_step(
            evaluate, built.target, built.rule.mesh, deterministic=run.deterministic
        )
        batch = run.model.batch_spec(validation_batch_size(run, len(sources.val)))
        validation = jitted.lower(built.target.params, built.target.extras, batch)
        settings = config.to_dict(run)
        del settings["seed"]
        weights = (
            {} if model.init_from is None else resume.digest_of_weights(expanded(model.init_from))
        )
        self.code = consistency.digest_of(consistency.code_digests(run))
        self.data = setup.digest_of_data(sources)
        self.parts = {
            "the config": _digest(settings),
            "the program of the step": _digest(self.step.as_text()),
            "the program of the first state": _digest(first.as_text()),
            "the program of the validation": _digest(validation.as_text()),
            "the schedule": _of_schedule(built),
            "the data": self.data,
            "the code that loads the data": _code_of_data(consistency.code_files(run), run),
            "the weights": _digest([weights, checksums(first_state.weights_from_files(built))]),
            "the versions": _digest(versions.versions()),
            "the devices": _digest([device.device_kind for device in jax.devices()]),
        }

    @property
    def program(self) -> str:
        """Returns a digest of what the time of a step follows from.

        Sides that differ in a rate, or in their data, train equally many steps in a time. Measured
        for each, they differed by up to 12% on a busy machine.
        """
        names = ("the program of the step", "the versions", "the devices")
        return _digest([self.parts[name] for name in names])

    def step_s(self) -> float:
        """Measures a step: the median of several, without the input pipeline."""
        import jax

        from jaxtrain.bench import measurement, timing

        batch = measurement.synthetic_batch(self.built)
        with self.built.lowering():
            step = self.step.compile()
        state = self.built.fresh_state()

        scalars = self.built.schedule.scalars(0)

        def once() -> None:
            nonlocal state
            state, metrics = step(state, batch, scalars)
            jax.block_until_ready(metrics)

        return timing.measure(once, at_least=_LEAST_STEPS, at_most_s=_MEASURED_S).median_s


def _of_schedule(built: Any) -> str:
    """Returns a digest of the rates, decays, and momenta, of at most a thousand steps or so.

    They are arguments of the step's program.
    """
    interval = -(-built.total // _STEPS_OF_SCHEDULE)
    steps = [*range(0, built.total, interval), built.total]
    return _digest([built.total, [built.schedule.scalars(step).values.tolist() for step in steps]])


def _code_of_data(files: Mapping[str, Path], run: Any) -> str:
    """Returns a digest of the code that loads examples, without comments and docstrings."""
    import inspect

    own = Path(inspect.getfile(type(run.data))).absolute()
    trees = {}
    for name, path in sorted(files.items()):
        if name.startswith("jaxtrain/data/") or path == own:
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
                    del node.body[0]
            trees[name] = ast.dump(tree)
    return _digest(trees)


def _digest(value: Any) -> str:
    from jaxtrain.storage import cache

    return hashlib.sha256(cache.digest(value).encode()).hexdigest()[:16]
