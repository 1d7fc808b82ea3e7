"""Predicts the memory, time, and cost of a run from its compiled step. Pure arithmetic.

:mod:`jaxtrain.cost.step_time` predicts the time of a step.
"""

import dataclasses
from collections.abc import Iterable

from jaxtrain import config
from jaxtrain.config.gates import Gate
from jaxtrain.cost.cards import Card
from jaxtrain.cost.step_cost import CUDNN
from jaxtrain.cost.step_time import Range, StepTime
from jaxtrain.data.contract import MOST_PREPARATION_S, Estimate
from jaxtrain.data.input_rate import Input
from jaxtrain.formats import GIB
from jaxtrain.planning.compilation import CompiledStep
from jaxtrain.xla.gpu_memory import MEMORY_FRACTION

DRIVER = 0.7 * GIB
"""The part of the memory printed by nvidia-smi that CUDA does not see. From error messages with
CUDA's total: 0.48 GiB on an RTX 5090 (31.36), 0.54 on an H100 (79.11), 0.67 on an A800 (79.33)."""

# Memory that the runtime uses besides the compiled program, bytes per device, assumed. On one H100,
# the sums for a whole step agreed with the allocator's peak: 24.63 GiB planned (with CUDNN) and
# 24.13 measured for the video autoencoder, 12.10 and 12.04 for BERT base, 26.85 and 27.35 for a
# GPT. The first two are outside XLA's pool, as is the driver's, and must fit there: that peak does
# not include them.
CONTEXT = 0.7 * GIB
"""CUDA's context, the libraries' kernels, the compiled program."""
NCCL = {"one device": 0.0, "one node": 0.5 * GIB, "several nodes": 1.0 * GIB}
"""NCCL's buffers and channels."""

HOUR_S = 3600.0
START_S = 60.0
"""Assumed: imports, connecting the processes, opening the data, starting the workers. On two
CPU cores, a run of ``demo`` took 9 s for it (benchmarks/RESULTS.md, "first step after")."""
FORWARD = 1 / 3
"""Work of a validation example as a fraction of a training example's, if they are equally large: a
forward pass without the backward pass, which is twice as much."""
SAMPLE_S = {"image": 0.16e-6, "clip": 0.44e-6}
"""Seconds per pixel to encode a sample: as PNG; or as MP4, and as GIF for TensorBoard. Process 0
does it while the GPUs wait. Measured on one CPU core (benchmarks/RESULTS.md, "the samples of a
validation")."""
REPLAYED = 1.1
"""Steps that a step of ``loop.replay_every`` takes in addition: the second computation, a copy of
the state, and the comparison (benchmarks/RESULTS.md, "a replayed step"). Measured on a CPU."""
SAVE_S = 0.1
"""A save of a small state blocks the loop for 0.02 to 0.09 s (benchmarks/RESULTS.md, "a save
blocks")."""
SAVE_BYTES_PER_S = 1e9
"""Assumed: rate at which a host copies its part of the state before training continues."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device.

    Attributes:
        rows: purpose -> bytes needed.
        capacity: bytes that a program can use.
        spare: bytes left over; negative if the run does not fit.
        outside: user of memory outside XLA's pool -> bytes, assumed.
    """

    rows: dict[str, float]
    needed: float
    capacity: float
    spare: float
    outside: dict[str, float]
    total: float


@dataclasses.dataclass(frozen=True)
class RunTime:
    """Predicted time and cost of a complete run, in the best and in the worst case.

    Attributes:
        steps: length of the run; None if it depends on the data.
        seconds: purpose -> seconds; None if the length is unknown.
        price: per GPU-hour, in any currency.
        money: cost of all GPUs; None without a price or hours.
        gates: gate of ``loop.gates`` -> hours until the validation that decides it.
    """

    steps: int | None
    steps_per_second: Range
    seconds: dict[str, Range] | None
    hours: Range | None
    price: float | None
    money: Range | None
    gates: dict[str, Range] = dataclasses.field(default_factory=dict)


def money(hours: Range, devices: int, price: float | None) -> Range | None:
    """Returns what hours of all GPUs cost; None without a price per GPU-hour."""
    return None if price is None else (hours[0] * devices * price, hours[1] * devices * price)


def memory(step: CompiledStep, card: Card, gpus_per_node: int) -> Memory:
    """Predicts the memory that a device needs and has."""
    cost, devices = step.cost, step.cost.devices
    rows = {
        "parameters": float(step.parameters),
        "optimizer": float(step.optimizer),
        "batch": float(cost.arguments - step.parameters - step.optimizer),
        "temporaries": float(cost.temporaries),
        "outputs": float(cost.outputs),
        "second state": float(step.second_state),
        "program": float(cost.program),
        "cuDNN workspaces": CUDNN if cost.convolutions else 0.0,
    }
    extent = "one device" if devices == 1 else "one node"
    nccl = NCCL["several nodes" if devices > gpus_per_node else extent]
    outside = {"driver": DRIVER, "CUDA": CONTEXT, "NCCL": nccl}
    left = card.memory - sum(outside.values())
    capacity = min(MEMORY_FRACTION * (card.memory - DRIVER), left)
    needed = sum(rows.values())
    return Memory(rows, needed, capacity, capacity - needed, outside, float(card.memory))


def preparation_s(preparation: Iterable[Estimate], cores: int) -> float:
    """Predicts how long a run prepares its data; 0 for what it refuses to, as it takes too long."""
    seconds = (estimate.core_s / cores for estimate in preparation)
    return sum(each for each in seconds if each <= MOST_PREPARATION_S)


def run_time(
    run: config.Run,
    step: CompiledStep,
    time: StepTime,
    loading: Input,
    *,
    nodes: int,
    price: float | None,
    preparation_s: float = 0.0,
) -> RunTime:
    """Predicts how long a complete run takes, by what it spends the time on, and what it costs.

    Args:
        time: of a step without waiting for input.
    """
    compute = (time.best, time.worst)
    paced = tuple(max(pair) for pair in zip(compute, loading.seconds, strict=True))
    rates = (1 / paced[0], 1 / paced[1])
    if step.total is None:
        return RunTime(None, rates, None, None, price, None)
    steps, replay_every, compile_s = step.total, run.loop.replay_every, step.compile_s
    replays = -(-steps // replay_every) if replay_every else 0  # and the last step, as validations
    validations = -(-steps // run.loop.eval_every) if run.loop.eval_every else 0
    batches = run.loop.eval_examples / run.data.batch_size
    forward = FORWARD * run.validation_scale
    samples_s = validations * sum(SAMPLE_S[kind] * pixels for kind, pixels in step.samples.items())
    save_s = SAVE_S + step.checkpoint / nodes / SAVE_BYTES_PER_S

    def saves(training_s: float) -> float:
        every_s = run.checkpoint.every_s
        return steps // run.checkpoint.every_steps if every_s is None else training_s / every_s

    def case(end: int) -> dict[str, float]:
        # Validation examples are loaded once, and then stay in the host's memory.
        loading_s = loading.seconds[end] if validations else 0.0
        return {
            "start": START_S,
            "preparing data": preparation_s,
            "compilation": compile_s,
            "steps": steps * compute[end],
            "replayed steps": replays * REPLAYED * compute[end],
            "waiting for input": steps * (paced[end] - compute[end]),
            "validation": batches * (validations * forward * compute[end] + loading_s) + samples_s,
            "saves": save_s * (1 + saves(steps * paced[end])),
        }

    best, worst = case(0), case(1)
    hours = (sum(best.values()) / HOUR_S, sum(worst.values()) / HOUR_S)
    devices = run.mesh.devices

    def until(step: int) -> Range:
        """Hours until a step: what is spent before the first one, and a share of the rest."""
        before = START_S + preparation_s + compile_s
        return (
            (before + (hours[0] * HOUR_S - before) * step / steps) / HOUR_S,
            (before + (hours[1] * HOUR_S - before) * step / steps) / HOUR_S,
        )

    return RunTime(
        steps,
        rates,
        {name: (best[name], worst[name]) for name in best},
        hours,
        price,
        money(hours, devices, price),
        {
            text: until(Gate.parse(text).decided_at(run.loop.eval_every, steps))
            for text in run.loop.gates
        },
    )
