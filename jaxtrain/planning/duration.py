"""Predicts how long a complete run takes, by what it spends the time on. Pure arithmetic."""

from collections.abc import Mapping

from jaxtrain import config
from jaxtrain.planning.input_rate import Input

Range = tuple[float, float]
"""Seconds in the best and in the worst case."""

START_S = 60.0
"""Assumed: imports, connecting the processes, opening indexed data, starting the workers. On two
CPU cores, a run of ``demo`` took 9 s for it (benchmarks/RESULTS.md, "first step after")."""

FORWARD = 1 / 3
"""Work of a validation example as a fraction of a training example's: a forward pass without the
backward pass, which is twice as much."""

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


def seconds(
    run: config.Run,
    steps: int,
    step: Range,
    found: Input,
    *,
    checkpoint: int,
    compile_s: float,
    nodes: int,
    samples: Mapping[str, int],
) -> dict[str, Range]:
    """Predicts the seconds of a run for each purpose.

    Args:
        run: the config.
        steps: length of the run.
        step: seconds per step without waiting.
        found: the input of a host.
        checkpoint: bytes of the state that a checkpoint stores.
        compile_s: seconds of the compilation, as measured while planning.
        nodes: number of hosts; each saves its part of the state.
        samples: pixels of a validation's images and clips, by the keys of :data:`SAMPLE_S`.
    """
    waits = [max(given, own) - own for given, own in zip(found.seconds, step, strict=True)]
    validations = steps // run.loop.eval_every if run.loop.eval_every else 0
    batches = run.loop.eval_examples / run.data.batch_size
    samples_s = validations * sum(SAMPLE_S[kind] * pixels for kind, pixels in samples.items())
    saves = steps // run.checkpoint.every + 1
    every = run.loop.replay_every  # and the last step
    replayed = {"replayed steps": _scaled(-(-steps // every) * REPLAYED, step)} if every else {}
    save_s = SAVE_S + checkpoint / nodes / SAVE_BYTES_PER_S
    return {
        "start": (START_S, START_S),
        "compilation": (compile_s, compile_s),
        "steps": _scaled(steps, step),
        **replayed,
        "waiting for input": _scaled(steps, waits),
        # Validation examples are loaded once, and then stay in the host's memory.
        "validation": (
            _validation(validations, batches, step[0], found.seconds[0]) + samples_s,
            _validation(validations, batches, step[1], found.seconds[1]) + samples_s,
        ),
        "saves": (saves * save_s, saves * save_s),
    }


def _scaled(count: float, seconds: Range | list[float]) -> Range:
    return count * seconds[0], count * seconds[1]


def _validation(count: int, batches: float, step_s: float, input_s: float) -> float:
    return batches * (count * FORWARD * step_s + (input_s if count else 0.0))
