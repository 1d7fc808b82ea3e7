"""Train Flax models with one jitted, mesh-sharded step.

The Python API: :func:`train`, :func:`compare`, :func:`load_model`, :func:`load_config`, and
:func:`plan`. Importing this package loads no jax; the functions import what they need.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxtrain.errors import InputError, RunAgain

IMPORTED_AT = time.time()
"""When a command began, seconds since 1970. The process may be older: a shell may become Python."""

_Changes = Mapping[str, Any] | None

if TYPE_CHECKING:
    from jaxtrain.comparison.experiment import Comparison
    from jaxtrain.comparison.side import At
    from jaxtrain.config import Precision, Run
    from jaxtrain.inference.model import Model
    from jaxtrain.planning.planner import Plan
    from jaxtrain.reporting.result import TrainResult

__all__ = ["InputError", "RunAgain", "compare", "load_config", "load_model", "plan", "train"]


def load_config(name: str | Path, overrides: Mapping[str, Any] | None = None) -> "Run":
    """Loads a config.

    Args:
        name: of a shipped config, such as ``"h100_16"``, or the path of a ``.py`` file.
        overrides: dotted name -> value, such as ``{"optim.peak_lr": 3e-4}``.

    Returns:
        The run. ``run.override({...})`` returns another one with fields changed.

    Raises:
        InputError: no such config or field, or a value that it does not take.
    """
    from jaxtrain import config
    from jaxtrain.config import invocation

    _check_types(name=(name, str), overrides=(overrides, _Changes))
    with invocation.from_python():
        run = config.load(str(name))
        return run.override(overrides) if overrides else run


def _check_types(**arguments: tuple[Any, Any]) -> None:
    """Checks the types of arguments, each with what it takes.

    Raises:
        InputError: has a message for each wrong argument.
    """
    from jaxtrain.config import field_values

    problems = [
        f"{name} takes {field_values.takes(annotation)}, not {value!r}"
        for name, (value, annotation) in arguments.items()
        if not field_values.matches(field_values.plain(value), annotation)
    ]
    if problems:
        raise InputError(*problems)


def train(
    config: "str | Path | Run",
    *,
    steps: int | None = None,
    output_dir: str | Path | None = None,
    resume: str | int | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    simulate_devices: int | None = None,
    track: Sequence[str] = (),
    quiet: bool = False,
) -> "TrainResult":
    """Trains, and returns when the run has ended.

    Ctrl-C, or the stop button of a notebook, ends the run after the current step, with a
    checkpoint; ``resume="latest"`` continues it. So does SIGTERM, and this function returns: a
    program that a scheduler may preempt looks at ``result.finished`` before it does more.

    Args:
        config: a name, a path, or what :func:`load_config` returned.
        steps: length of the run; None takes the config's.
        output_dir: run directory; None makes ``output/NAME/<UTC time>``.
        resume: ``"latest"``, a step, or a checkpoint; None starts a new run.
        overrides: as for :func:`load_config`.
        simulate_devices: virtual CPU devices, to try a mesh without GPUs; before jax is used.
        track: trackers that record the run, too: ``"wandb"``, ``"trackio"``, ``"mlflow"``.
        quiet: print only warnings and errors; ``log.txt`` in the run directory has every line.

    Raises:
        InputError: wrong use or input.
        RunAgain: a temporary failure, such as a full disk or an active run in the directory.
        KeyboardInterrupt: Ctrl-C before the first step, or twice: nothing is saved.
    """
    from jaxtrain.config import Run, invocation

    _check_types(
        config=(config, str | Run),
        steps=(steps, int | None),
        output_dir=(output_dir, str | None),
        resume=(resume, str | int | None),
        overrides=(overrides, _Changes),
        simulate_devices=(simulate_devices, int | None),
        track=((track,) if isinstance(track, str) else track, tuple[str, ...]),
        quiet=(quiet, bool),
    )
    from jaxtrain.training import session
    from jaxtrain.xla import platform

    platform.use_cpu_without_driver(os.environ)
    with invocation.from_python():
        run = config if isinstance(config, Run) else load_config(config)
        changes = dict(overrides or {})
        if steps is not None:
            changes |= {"loop.steps": steps, "loop.epochs": None, "loop.tokens_per_param": None}
        return session.train(
            run.override(changes) if changes else run,
            output_dir=None if output_dir is None else str(output_dir),
            resume=None if resume is None else str(resume),
            simulate_devices=simulate_devices,
            track=[track] if isinstance(track, str) else track,
            quiet=quiet,
        )


def load_model(
    source: "str | Path | TrainResult",
    *,
    precision: "Precision" = "float32",
    config: str | Path | None = None,
) -> "Model":
    """Loads a trained model.

    Args:
        source: a result of :func:`train`, a run directory, a checkpoint, a weights file, or a model
            on the Hugging Face Hub, such as ``"hf:org/model"`` or ``"hf:org/model@revision"``.
        precision: of the computation; ``"bfloat16"`` is faster on GPUs.
        config: the config that it was trained with, a ``.py`` file; required only for your own
            model, which this file defines or imports.

    Returns:
        The model; ``generate``, ``fill_mask``, ``encode``, ``decode``, and ``evaluate`` work if
        its kind has them.

    Raises:
        InputError: no model is there, or it cannot be read.
        RunAgain: the Hub cannot be reached now.
    """
    from jaxtrain.config import Precision, invocation

    path = getattr(source, "directory", source)  # of a TrainResult
    _check_types(source=(path, str), precision=(precision, Precision), config=(config, str | None))
    from jaxtrain.inference.model import Model
    from jaxtrain.xla import platform

    platform.use_cpu_without_driver(os.environ)
    with invocation.from_python():
        return Model(cast(str | Path, path), precision, config)


def compare(
    config: "str | Path",
    other: "str | Path | None" = None,
    *,
    change: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    metric: str | None = None,
    practical: float | None = None,
    at: "At" = "steps",
    fit_time: str | None = None,
    pairs: int = 20,
    hours: float | None = None,
    output_dir: str | Path | None = None,
    runs: str | Path | None = None,
    keep_checkpoints: bool = False,
    simulate_devices: int | None = None,
    quiet: bool = False,
) -> "Comparison":
    """Tells whether a change of a config is better, by pairs of runs that share their seed.

    It stops at a verdict; to continue after an interruption, call it again with the same arguments.

    Args:
        config: a name or a path; side a.
        other: likewise; None is ``config`` with ``change``.
        change: as ``overrides``, of side b only.
        overrides: as for :func:`load_config`, of both sides.
        metric: of the last validation; None takes ``checkpoint.best_metric``.
        practical: a difference below it does not matter.
        at: what the sides have in common: ``"steps"`` or ``"flops"``.
        fit_time: such as ``"5m"``: the steps of each side follow from it, and from the time of a
            step, which is measured once.
        pairs: the most pairs.
        hours: no pair begins after that many hours of training.
        output_dir: folder of the results; None makes ``output/compare/NAME-ID``.
        runs: folder of the runs, which several comparisons can share; None is ``runs`` in it.
        keep_checkpoints: keep those of runs that are judged.
        simulate_devices: virtual CPU devices of each run.
        quiet: print nothing.

    Raises:
        InputError: wrong use, or a run that cannot end well.
        RunAgain: only temporary failures.
    """
    from jaxtrain import comparison, terminal
    from jaxtrain.comparison.experiment import Question, seconds
    from jaxtrain.comparison.side import At, Side
    from jaxtrain.config import field_values, invocation
    from jaxtrain.storage.atomic import expanded

    _check_types(
        config=(config, str),
        other=(other, str | None),
        change=(change, _Changes),
        overrides=(overrides, _Changes),
        metric=(metric, str | None),
        practical=(practical, float | None),
        at=(at, At),
        fit_time=(fit_time, str | None),
        pairs=(pairs, int),
        hours=(hours, float | None),
        output_dir=(output_dir, str | None),
        runs=(runs, str | None),
        keep_checkpoints=(keep_checkpoints, bool),
        simulate_devices=(simulate_devices, int | None),
        quiet=(quiet, bool),
    )

    def side(name: "str | Path", fields: Mapping[str, Any]) -> Side:
        load_config(name, fields)  # refuses values of the wrong type
        arguments = [
            word
            for field, value in fields.items()
            for word in (f"--{field}", *field_values.as_arguments(field_values.plain(value)))
        ]
        return Side(str(name), tuple(arguments), " ".join([str(name), *arguments]))

    with invocation.from_python():
        common = overrides or {}
        question = Question(
            sides=(side(config, common), side(other or config, {**common, **(change or {})})),
            metric=metric,
            practical=practical,
            at=at,
            fit_s=None if fit_time is None else seconds(fit_time),
            pairs=pairs,
            hours=hours,
            keep_checkpoints=keep_checkpoints,
            simulate_devices=simulate_devices,
        )
        (answer,) = comparison.compare(
            question,
            None if output_dir is None else expanded(output_dir),
            None if runs is None else expanded(runs),
            (lambda line: None) if quiet else terminal.out,
        )
        return answer


def plan(
    config: "str | Path | Run",
    *,
    gpu: str | None = None,
    gpus: str | None = None,
    price_per_gpu_hour: float | None = None,
    overrides: Mapping[str, Any] | None = None,
    cores: int | None = None,
    rate_per_core: float | None = None,
    efficiency: "str | Path | None" = None,
) -> "Plan":
    """Predicts memory, time, input, and cost of a run on GPUs, without any.

    Args:
        config: a name, a path, or what :func:`load_config` returned.
        gpu: such as ``"h100"``; None takes the one in the config's name.
        gpus: nodes x GPUs per node, such as ``"2x8"``; None takes the config's mesh.
        price_per_gpu_hour: in any currency; None omits the cost.
        overrides: as for :func:`load_config`.
        cores: CPU cores of each node, which load the data; None assumes 12 per GPU.
        rate_per_core: examples/s that a core loads, as measured; None takes recorded rates.
        efficiency: a file that ``jaxtrain bench --efficiency`` wrote on the same kind of GPU; None
            assumes a range.

    Raises:
        InputError: wrong use, or the step cannot be compiled.
    """
    from jaxtrain.config import Run, invocation
    from jaxtrain.planning.planner import predict

    _check_types(
        config=(config, str | Run),
        gpu=(gpu, str | None),
        gpus=(gpus, str | None),
        price_per_gpu_hour=(price_per_gpu_hour, float | None),
        overrides=(overrides, _Changes),
        cores=(cores, int | None),
        rate_per_core=(rate_per_core, float | None),
        efficiency=(efficiency, str | None),
    )
    with invocation.from_python():
        return predict(
            config if isinstance(config, Run) else str(config),
            gpu=gpu,
            devices=gpus,
            price=price_per_gpu_hour,
            changes=overrides or {},
            cores=cores,
            rate_per_core=rate_per_core,
            efficiency=None if efficiency is None else Path(efficiency),
        )
