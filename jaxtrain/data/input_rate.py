"""Predicts how many examples per second a host can load: cores x rate per core.

The rates were measured (benchmarks/LOG.md, "Video input" and "Text input"), on two machines where
two are given; ``plan --rate-per-core`` replaces them, for example by what ``doctor`` measured.
"""

import dataclasses
import math
from typing import Any, Literal

from jaxtrain import config
from jaxtrain.data import worker_count

CORES_PER_GPU = 12
"""Assumed: 96 cores for 8 A100, H100, or H200 in Azure's ND96asr_v4, ND96isr_H100_v5, and
ND96isr_H200_v5, the fewest of the large clouds. A core is what the cloud calls a vCPU."""

_FRAMES, _HEIGHT, _WIDTH = 12, 480, 720  # the clips of the measurements


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input, and the measured rate of one core.

    Attributes:
        low: per second per core, on the slower of two machines (2 cores of an Intel Xeon, beside
            other work).
        high: per second per core, on the faster one (2 cores of an AMD EPYC, idle).
        fixed: for clips, the fraction of the time that depends neither on the clip nor on its
            examples.
        each: for clips, the fraction that each example takes for its frames, of whatever size.
        cut: for clips, the fraction that is proportional to the pixels of the examples, which are
            fewer with ``data.crop``. The rest is proportional to those of the clip.
    """

    what: str
    unit: str
    low: float
    high: float
    fixed: float = 0.0
    each: float = 0.0
    cut: float = 0.0

    def per_core(self, run: config.Run, decoded: float) -> tuple[float, float]:
        """Returns the least and the most examples/s of a core, for the examples of a run.

        Args:
            decoded: clips that are decoded for each example.
        """
        if self.unit == "tokens":
            size = float(run.model.tokens_per_example())
        else:
            clip, example = map(_relative_pixels, (run.model, run.training_model))
            decoding = self.fixed + (1 - self.fixed - self.each - self.cut) * clip
            own = self.each * run.model.frames / _FRAMES + self.cut * example
            size = decoding * decoded + own
        return self.low / size, self.high / size


def _relative_pixels(model: Any) -> float:
    """Returns the pixels of a model's clips, relative to those of the measurements."""
    pixels: int = model.frames * model.height * model.width
    return pixels / (_FRAMES * _HEIGHT * _WIDTH)


KINDS = {
    # `high` was measured beside other work on cores like the faster machine's. `low` is not
    # measured, but scaled by the rates of H.264 clips on both machines, 11.0 and 22.7. Of a clip's
    # 21 ms, opening the file takes 0.5. What each example and its pixels take was measured with
    # data.crop and data.crops_per_clip (benchmarks/LOG.md).
    "clips": Kind("clips of pieces", "clips", 22.9, 47.3, fixed=0.03, each=0.005, cut=0.1),
    "clips, resized on the host": Kind(
        *("clips of pieces, resized on the host", "clips", 13.9, 28.7),
        fixed=0.02,
        each=0.016,
        cut=0.43,
    ),
    "masked text": Kind("text, masked", "tokens", 1.59e6, 1.59e6),
    "causal text": Kind("text, causal", "tokens", 13.4e6, 13.4e6),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What is known about the hosts that will load the data.

    Attributes:
        cores: CPU cores of a host; None assumes :data:`CORES_PER_GPU`.
        per_core: examples/s of a core, measured; replaces the table.
    """

    cores: int | None = None
    per_core: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """The predicted input of a host.

    Attributes:
        kind: key of :data:`KINDS`.
        per_core: least and most examples/s of a core.
        assumed: whether ``cores`` is an assumption.
        rate: least and most examples/s of the host.
        seconds: least and most seconds to load the host's part of a batch.
        measured: whether the rate was given instead of taken from the table.
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
    waits: Literal["yes", "maybe", "no"] = "no"
    advice: tuple[str, ...] = ()


def predict(run: config.Run, gpus: int, nodes: int, host: Host, step: tuple[float, float]) -> Input:
    """Predicts the input of a host.

    Args:
        step: least and most seconds of a step without waiting.
    """
    predicted = _without_step(run, gpus, nodes, host)
    if predicted.seconds[1] <= step[0]:
        return predicted
    return dataclasses.replace(
        predicted,
        waits="yes" if predicted.seconds[0] > step[1] else "maybe",
        advice=tuple(_advice(run, predicted, gpus, nodes, host, step)),
    )


def _without_step(run: config.Run, gpus: int, nodes: int, host: Host) -> Input:
    """Predicts how fast a host loads examples."""
    kind = _kind(run)
    cores = host.cores or CORES_PER_GPU * gpus
    rows = run.data.batch_size / nodes
    whole_rows = max(1, round(rows))
    workers = run.data.workers
    if workers is None:
        workers = worker_count.chosen(run.data, cores, rows=whole_rows, devices=gpus, on_cpu=False)
    # A single reader still has the clip of its previous batch.
    reads = 1.0
    if workers > 1 or nodes > 1:
        reads = worker_count.reads_per_block(whole_rows, workers, gpus, run.data.block)
    per_core = KINDS[kind].per_core(run, reads / run.data.block)
    what = KINDS[kind].what
    if host.per_core is not None:
        what, per_core = "as measured (--rate-per-core)", (host.per_core, host.per_core)
    low, high = (rate * max(1, min(workers, cores)) for rate in per_core)
    return Input(
        kind=kind,
        what=what,
        per_core=per_core,
        cores=cores,
        assumed=host.cores is None,
        workers=workers,
        rate=(low, high),
        seconds=(rows / high, rows / low),
        measured=host.per_core is not None,
    )


def _kind(run: config.Run) -> str:
    """Returns the key of a kind."""
    kind: str | None = run.data.input_kind
    if kind is not None:
        return kind
    return "clips" if run.data.converts_on_device(run.model) else "clips, resized on the host"


def _advice(
    run: config.Run,
    predicted: Input,
    gpus: int,
    nodes: int,
    host: Host,
    step: tuple[float, float],
) -> list[str]:
    """Returns what to do about input that may be slower than the step, in numbers."""
    lines = []
    used = min(predicted.workers, predicted.cores)
    if not predicted.measured and predicted.kind == "clips, resized on the host":
        device = dataclasses.replace(run, data=dataclasses.replace(run.data, convert_on="device"))
        clips = _without_step(device, gpus, nodes, host).per_core
        factor = math.sqrt(math.prod(clips) / math.prod(predicted.per_core))
        lines.append(f"--data.convert_on device: {factor:.1f} times the clips/s")
    if getattr(run.data, "crop", None) is not None:
        several = 2 * run.data.crops_per_clip
        more = dataclasses.replace(run.data, crops_per_clip=several)
        by_table = dataclasses.replace(host, per_core=None)
        now, then = (
            _without_step(variant, gpus, nodes, by_table).rate[0]
            for variant in (run, dataclasses.replace(run, data=more))
        )
        if then > 1.05 * now:  # if the batch is not a multiple, clips are decoded more than once
            lines.append(f"--data.crops_per_clip {several}: {then / now:.1f} times the examples/s")
    if run.data.workers is not None and used < predicted.cores - worker_count.LOOP_CORES:
        lines.append(f"--data.workers None: uses {predicted.cores} cores instead of {used}")
    low, high = (
        math.ceil(run.data.batch_size / nodes / (seconds * rate))
        for seconds, rate in zip(reversed(step), reversed(predicted.per_core), strict=True)
    )
    if high > used:
        span = f"{low} to {high}" if low < high else str(high)
        lines.append(f"hosts with cores for {span} workers, instead of {used}")
    return lines
