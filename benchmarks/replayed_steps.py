"""Computes each of many steps twice from the same state and batch, and counts differences.

Without a fault there must be none: each one would end a run with ``loop.replay_every``. Usage::

    python benchmarks/replayed_steps.py --steps 20000
"""

import argparse
import sys
import time

import jax
import word_batches

from jaxtrain import config
from jaxtrain.sharding import batch_sharding, make_mesh
from jaxtrain.training import replay, step_setup

_BATCHES = 20
_TINY = (
    *("--model.hidden", "32", "--model.ff", "64", "--model.layers", "2", "--model.heads", "2"),
    *("--model.vocab_size", "300", "--model.sequence_length", "32", "--model.dropout", "0.1"),
    *("--data.batch_size", "8", "--optim.accumulate", "2", "--mesh.min_shard_elements", "64"),
    *("--loop.epochs", "None", "--loop.steps", "100000", "--mesh.data", "1", "--mesh.fsdp", "2"),
)


def main() -> None:
    """Runs the steps; exits with 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps to compute twice")
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

    run = config.load("demo_mlm", _TINY)
    mesh = make_mesh(run.mesh)
    built = step_setup.build_without_data(run, mesh)
    step, state = built.compile_step(donate=False), built.fresh_state()
    batches = [
        jax.device_put(batch, batch_sharding(mesh))
        for batch in word_batches.masked(run.model, run.data.batch_size, _BATCHES)
    ]
    began, different = time.perf_counter(), 0
    for number in range(steps):
        batch = batches[number % _BATCHES]
        first = step(state, batch)
        if found := replay.differences(first, step(state, batch)):
            different += 1
            print(f"step {number + 1}: {found}", flush=True)
        state, values = first
        if (number + 1) % max(1, steps // 20) == 0:
            print(
                f"{number + 1} steps computed twice: {different} differ; "
                f"loss {float(values['loss']):.4f}; {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
