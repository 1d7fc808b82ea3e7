"""Predicts how many examples per second a host can load: cores x rate per core.

The rates were measured (benchmarks/LOG.md, "Input" and "Text input"), on two machines where two are
given; ``plan --measure-input`` measures them again, on this machine and its data.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from jaxtrain import config
from jaxtrain.data import worker_count
from jaxtrain.errors import InputError

Source = Literal["videos", "clips"]

CORES_PER_GPU = 12
"""Assumed: 96 cores for 8 A100, H100, or H200 in Azure's ND96asr_v4, ND96isr_H100_v5, and
ND96isr_H200_v5, the fewest of the large clouds. A core is what the cloud calls a vCPU."""

_FRAMES, _HEIGHT, _WIDTH = 12, 480, 720  # the clips of the measurements


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input, and the measured rate of one core.

    Attributes:
        what: describes it.
        unit: what is counted.
        least: per second per core, on the slower of two machines (2 cores of an Intel Xeon, beside
            other work).
        most: per second per core, on the faster one (2 cores of an AMD EPYC, idle).
        fixed: for clips, the fraction of the time that does not depend on the clip's pixels; the
            rest is proportional to frames x height x width.
    """

    what: str
    unit: str
    least: float
    most: float
    fixed: float = 0.0

    def per_core(self, model: Any) -> tuple[float, float]:
        """Returns the least and the most examples/s of a core, for the examples of a model."""
        if self.unit == "tokens":
            size = float(model.tokens_per_example())
        else:
            pixels = model.frames * model.height * model.width
            size = self.fixed + (1 - self.fixed) * pixels / (_FRAMES * _HEIGHT * _WIDTH)
        return self.least / size, self.most / size


KINDS = {
    # Of a clip's 217 ms, 15 are its own frames: cropping and scaling. Decoding the frames before
    # them does not depend on the clip, but on the file: these are 1280x720.
    "videos": Kind("videos of 1280x720 with distant keyframes", "clips", 1.9, 4.6, fixed=0.93),
    # `most` was measured beside other work on cores like the faster machine's. `least` is not
    # measured, but scaled by the rates of H.264 clips on both machines, 11.0 and 22.7. Of a clip's
    # 21 ms, opening the file takes 0.5.
    "clips": Kind("prepared clips", "clips", 22.9, 47.3, fixed=0.03),
    "clips, resized on the host": Kind(
        "prepared clips, resized on the host", "clips", 13.9, 28.7, fixed=0.02
    ),
    "masked text": Kind("text, masked", "tokens", 1.59e6, 1.59e6),
    "causal text": Kind("text, causal", "tokens", 13.4e6, 13.4e6),
}


@dataclasses.dataclass(frozen=True)
class LoaderRate:
    """The measured rate of the real loader on this machine.

    Attributes:
        examples_per_second: with all its workers.
        workers: their number; 0 for the main process.
        cores: CPU cores that they could use.
        path: the data.
    """

    examples_per_second: float
    workers: int
    cores: int
    path: str

    @property
    def per_core(self) -> float:
        """Examples/s per core at work."""
        return self.examples_per_second / max(1, min(self.workers, self.cores))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What is known about the hosts that will load the data.

    Attributes:
        cores: CPU cores of a host; None assumes :data:`CORES_PER_GPU`.
        source: ``clips`` for the output of ``prepare clips``, ``videos`` for others; None looks at
            the data, or assumes ``videos``.
        measured: replaces the table.
    """

    cores: int | None = None
    source: Source | None = None
    measured: LoaderRate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """The predicted input of a host.

    Attributes:
        kind: key of :data:`KINDS`.
        what: describes the kind, and how it is known.
        per_core: least and most examples/s of a core.
        cores: CPU cores of the host.
        assumed: whether ``cores`` is an assumption.
        workers: worker processes.
        rate: least and most examples/s of the host.
        seconds: least and most seconds to load the host's part of a batch.
        measured: whether the rate was measured on this machine.
    """

    kind: str
    what: str
    per_core: tuple[float, float]
    cores: int
    assumed: bool
    workers: int
    rate: tuple[float, float]
    seconds: tuple[float, float]
    measured: bool


def predict(run: config.Run, gpus: int, nodes: int, host: Host) -> Input:
    """Predicts the input of a host.

    Args:
        run: the config.
        gpus: GPUs of a host.
        nodes: number of hosts.
        host: what is known about them.

    Raises:
        InputError: the kind of source does not fit the config's data.
    """
    kind, how = _kind(run, host.source)
    known = KINDS[kind]
    what = f"{known.what} ({how})"
    per_core = known.per_core(run.model)
    if host.measured is not None:
        what = f"{host.measured.path}, measured on this machine"
        per_core = (host.measured.per_core, host.measured.per_core)
    cores = host.cores or CORES_PER_GPU * gpus
    rows = run.data.batch_size / nodes
    workers = run.data.workers
    if workers is None:
        workers = worker_count.chosen(
            run.data, cores, rows=max(1, round(rows)), devices=gpus, on_cpu=False
        )
    least, most = (one * max(1, min(workers, cores)) for one in per_core)
    return Input(
        kind=kind,
        what=what,
        per_core=per_core,
        cores=cores,
        assumed=host.cores is None,
        workers=workers,
        rate=(least, most),
        seconds=(rows / most, rows / least),
        measured=host.measured is not None,
    )


def _kind(run: config.Run, source: Source | None) -> tuple[str, str]:
    """Returns the key of a kind, and how it is known."""
    own: str | None = getattr(run.data, "input_kind", None)
    if own is not None:
        if source is not None:
            raise InputError(
                f"--source {source} is for videos; the data of {run.name} is text: omit it"
            )
        return own, "from the config"
    how, on_device = "--source", run.data.convert_on != "host"
    if source is None:
        source, how = "videos", "assumed; --source clips plans for prepared clips"
        if run.data.path is not None and Path(run.data.path).expanduser().exists():
            prepared = run.data.is_prepared(Path(run.data.path).expanduser())
            source, how = ("clips" if prepared else "videos"), f"from {run.data.path}"
            on_device = run.data.converts_on_device(run.model)
    if source == "clips" and not on_device:
        return "clips, resized on the host", how
    return source, how


def advice(
    run: config.Run,
    found: Input,
    step: tuple[float, float],
    *,
    gpus: int,
    nodes: int,
) -> list[str]:
    """Returns what to do about input that is slower than the step, in numbers; may be empty.

    Args:
        run: the config.
        found: the predicted input of a host.
        step: least and most seconds of a step without waiting.
        gpus: GPUs of a host.
        nodes: number of hosts.
    """
    if found.seconds[1] <= step[0]:
        return []
    rows = run.data.batch_size / nodes
    lines = []
    if not found.measured and found.kind == "videos":
        lines.append(
            "jaxtrain prepare clips, once: " + _faster(run, found, KINDS["clips"], step, rows)
        )
    limited = min(found.workers, found.cores)
    if run.data.workers is not None and limited < found.cores - worker_count.LOOP_CORES:
        lines.append(
            f"--data.workers None uses the host's {found.cores} cores instead of {limited}"
        )
    least, most = (
        math.ceil(rows / (seconds * rate))
        for seconds, rate in zip(reversed(step), reversed(found.per_core), strict=True)
    )
    if most > limited:
        span = f"{least} to {most}" if least < most else str(most)
        lines.append(f"hosts with cores for {span} workers, instead of {limited}")
    # Hosts with fewer GPUs usually have fewer cores, too, so the cores must be known.
    known = not found.assumed and found.seconds[0] > step[1]
    if known and (fewer := _fewer(run, found, step, gpus, nodes)):
        lines.append(
            f"--gpus {nodes}x{fewer}: {fewer * nodes} GPUs instead of {gpus * nodes}, on hosts "
            f"with as many cores ({found.cores}): the same speed at {fewer / gpus:.0%} of the GPU "
            "price"
        )
    return lines


def _faster(
    run: config.Run, found: Input, other: Kind, step: tuple[float, float], rows: float
) -> str:
    """Compares the input with that from another kind of source."""
    per_core = other.per_core(run.model)
    factor = math.sqrt(math.prod(per_core) / math.prod(found.per_core))
    cores = max(1, min(found.workers, found.cores))
    least, most = (rows / (one * cores) for one in reversed(per_core))
    verdict = "fast enough" if most <= step[0] else "which may be fast enough"
    if least > step[1]:
        verdict = "still slower than the step"
    return f"{factor:.1f} times the clips/s, {verdict}"


def _fewer(
    run: config.Run, found: Input, step: tuple[float, float], gpus: int, nodes: int
) -> int | None:
    """Returns the fewest GPUs per host whose step, at its slowest, still waits for the input."""
    return next(
        (
            count
            for count in range(1, gpus)
            if run.data.batch_size % (count * nodes) == 0
            and step[1] * gpus / count <= found.seconds[0]
        ),
        None,
    )
