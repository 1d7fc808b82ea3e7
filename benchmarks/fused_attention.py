"""Checks cuDNN's fused attention against the plain path on a GPU, and times both.

    python benchmarks/fused_attention.py

Fails if an output or a gradient of the fused call is further from a float32 computation than twice
the error of the plain path in bfloat16, or if the gradient of a masked language model differs. It
is skipped only where jax sees no GPU: cuDNN's attention has no other implementation.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results
from flax import nnx

from jaxtrain.models import mlm
from jaxtrain.ops import attention, per_device

# B, S, N, K: a layer of bert_base_h200_8, of mlm_h200_8, of gpt_h100_8, and a length that is not a
# multiple of cuDNN's blocks of 128, with which backward passes with a mask have had bugs
# (pytorch#196678).
_BASE, _SMALL, _GPT, _ODD = (
    (32, 512, 12, 64),
    (96, 256, 8, 32),
    (4, 2048, 10, 128),
    (8, 192, 12, 64),
)
# Those that configs use, and the odd length: a case takes 20 s on an H100, almost all of it to
# compile.
CASES = (
    *(("causal", shape) for shape in (_GPT, _ODD)),
    *(("padding", shape) for shape in (_BASE, _SMALL, _ODD)),
    *(("documents", shape) for shape in (_BASE, _GPT, _ODD)),
)
MODEL = mlm.Config(
    vocab_size=30_522, sequence_length=512, hidden=768, layers=2, heads=12, dropout=0.0
)
_FLOOR = 1e-3  # of an array that bfloat16 gets almost exactly
_MODEL_ERROR = 2e-2
_REPEATS = 20

Arrays = tuple[jax.Array, ...]


def visible(kind: str, batch: int, length: int) -> np.ndarray | None:
    """Returns which keys the queries see, as in :func:`jaxtrain.ops.attention.attend`.

    The first sequence has no padding, the last has a single token.
    """
    if kind == "causal":
        return None
    lengths = np.linspace(length, 1, batch).astype(int)
    padding = np.arange(length) >= lengths[:, None]
    if kind == "padding":
        return ~padding[:, None]
    sizes = 3 + np.arange(batch) * length // batch // 3
    segments = np.where(padding, 0, 1 + np.arange(length) // sizes[:, None])
    return segments[:, :, None] == segments[:, None]


def attend_on(platform: str, seen: np.ndarray | None) -> Callable[..., tuple[jax.Array, Arrays]]:
    """Returns (weights, q, k, v) -> output and gradients, as traced for a platform."""

    def output(*arrays: jax.Array) -> jax.Array:
        with per_device.tracing(platform=platform):
            visible = None if seen is None else jnp.asarray(seen)
            return attention.attend(*arrays, visible_BQS=visible)

    def both(weights: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, Arrays]:
        found, pull = jax.vjp(output, *arrays)
        return found, pull(weights.astype(found.dtype))

    return jax.jit(both)


def errors(kind: str, shape: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """Returns array -> the relative errors of the fused and of the plain path in bfloat16."""
    rng = np.random.default_rng(0)
    low = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(4)]
    seen = visible(kind, *shape[:2])
    with jax.default_matmul_precision("highest"):
        exact = attend_on("cpu", seen)(*(array.astype(jnp.float32) for array in low))
    ways = [attend_on(platform, seen)(*low) for platform in ("cuda", "cpu")]
    names = ("output", "queries", "keys", "values")
    return {
        name: (_error(fused, want), _error(plain, want))
        for name, fused, plain, want in zip(
            names, *(jax.tree.leaves(found) for found in (*ways, exact)), strict=True
        )
    }


def model_error(attend: str, config: mlm.Config = MODEL, batch: int = 8) -> float:
    """Returns the relative difference of a masked LM's gradients, traced for a GPU and a CPU."""
    config = dataclasses.replace(config, attend=attend)
    graph, params = nnx.split(config.build(nnx.Rngs(0)))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    rng = np.random.default_rng(0)
    drawn: dict[str, Any] = {
        name: rng.integers(5, 9 if name == "positions" else config.vocab_size, spec.shape)
        for name, spec in config.batch_spec(batch).items()
    }
    lengths = np.linspace(config.sequence_length, 16, batch).astype(int)
    padding = np.arange(config.sequence_length) >= lengths[:, None]
    drawn["tokens"][padding] = config.pad_id
    if attend == "document":
        drawn["segments"] = np.where(padding, 0, 1 + np.arange(config.sequence_length) // 9)
    drawn |= {name: np.ones_like(drawn[name], np.float32) for name in ("weight", "target_weights")}
    keys = jax.random.split(jax.random.key(0), batch)

    def gradients(platform: str) -> np.ndarray:
        def loss(params: Any, arrays: Any) -> jax.Array:
            with per_device.tracing(platform=platform):
                total: jax.Array = nnx.merge(graph, params).loss(arrays, keys)[0]
            return total

        found = jax.jit(jax.grad(loss))(params, jax.tree.map(jnp.asarray, drawn))
        return np.concatenate(
            [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(found)]
        )

    return _error(gradients("cuda"), gradients("cpu"))


def _error(found: Any, want: Any) -> float:
    found, want = (np.asarray(array, np.float64) for array in (found, want))
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def milliseconds(kind: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Times one forward and backward pass of the fused and of the plain path."""
    low = [jnp.ones(shape, jnp.bfloat16)] * 4
    found = []
    for platform in ("cuda", "cpu"):
        both = attend_on(platform, visible(kind, *shape[:2]))
        jax.block_until_ready(both(*low))
        began = time.perf_counter()
        last = [both(*low) for _ in range(_REPEATS)]
        jax.block_until_ready(last)
        found.append(1000 * (time.perf_counter() - began) / _REPEATS)
    return found[0], found[1]


def main() -> int:
    """Prints and records the errors and times; returns 1 if an error is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    flags = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"SKIPPED: jax runs on {jax.default_backend()}, and cuDNN's attention needs a GPU")
        return 0
    failed = 0
    for kind, shape in CASES:
        found = errors(kind, shape)
        # Written so that NaN fails.
        wrong = [name for name, (fused, plain) in found.items() if not fused <= 2 * plain + _FLOOR]
        fused_ms, plain_ms = milliseconds(kind, shape)
        listed = ", ".join(f"{name} {a:.1e} ({b:.1e})" for name, (a, b) in found.items())
        failed += _record(
            flags,
            f"cuDNN attention, {kind}, B {shape[0]}, S {shape[1]}, {shape[2]} heads of {shape[3]}",
            f"relative error, and of the plain path in bfloat16: {listed}; forward and backward "
            f"{fused_ms:.3f} ms against {plain_ms:.3f} ms",
            wrong,
        )
    for attend in ("sequence", "document"):
        error = model_error(attend)
        wrong = [] if error <= _MODEL_ERROR else ["gradient"]
        what = f"BERT base of 2 layers, attend {attend}, gradient on the fused and the plain path"
        failed += _record(flags, what, f"relative difference {error:.1e}", wrong)
    return min(failed, 1)


def _record(flags: argparse.Namespace, what: str, result: str, wrong: list[str]) -> int:
    if wrong:
        result = f"WRONG ({', '.join(wrong)}): {result}"
    print(f"{what}\n  {result}", flush=True)
    if flags.results:
        kind = jax.local_devices()[0].device_kind
        command = "python benchmarks/fused_attention.py"
        results.append_row(flags.results, kind, what, result, command)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
