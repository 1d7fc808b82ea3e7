"""Compiles the GPT for GPUs with unrolled layers, and with a scan over stacked layers.

    python benchmarks/scanned_blocks.py [--config gpt_h100_8] [--section.field value ...]

Compiles the config's real training step (with AdamW only) in both forms, without GPUs, and prints
one JSON object for each: seconds to trace and to compile, temporaries, bytes read and written, and
communication volume. Requires the extra `cuda12`.
"""

import argparse
import dataclasses
import json
import os
import time
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # otherwise the plugin requires a driver

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config
from jaxtrain.models import causal, gpt
from jaxtrain.ops import layers, per_device
from jaxtrain.planning import cards
from jaxtrain.sharding import GatheredParam, make_mesh
from jaxtrain.training import step_setup
from jaxtrain.xla import hlo, operations

GIB = 2**30


def main() -> None:
    """Compiles both forms and prints their costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="gpt_h100_8")
    parser.add_argument("--gpu", default="h100", choices=cards.CARDS)
    flags, overrides = parser.parse_known_args()
    run = config.load(flags.config, overrides)
    run = dataclasses.replace(run, optim=dataclasses.replace(run.optim, muon=None))
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card(flags.gpu)),
        topology=f"1x1x{run.mesh.devices}",
    )
    mesh = make_mesh(run.mesh, described.devices)
    scanned = _ScannedConfig(**vars(run.model))
    for name, model in (("unrolled", run.model), ("scanned", scanned)):
        print(json.dumps({"blocks": name} | _compiled(run, model, mesh)), flush=True)


def _compiled(run: config.Run, model: gpt.Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    built = step_setup.build_without_data(dataclasses.replace(run, model=model), mesh)
    began = time.perf_counter()
    with per_device.tracing(platform="cuda"):
        lowered = built.trace_step().lower(lowering_platforms=("cuda",))
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    text = compiled.as_text()
    sent = sum(one.wire_bytes * one.times for one in hlo.collectives(text, run.mesh.devices))
    return {
        "config": run.name,
        "layers": model.depth,
        "trace_s": round(traced - began, 1),
        "compile_s": round(done - traced, 1),
        "temporaries_gib": round(compiled.memory_analysis().temp_size_in_bytes / GIB, 2),
        "moved_gb": round(operations.moved_bytes(text) / 1e9, 1),
        "sent_mb": round(sent / 1e6, 1),
        "jax": jax.__version__,
    }


class _ScannedConfig(gpt.Config):
    """Configures the same network with stacked parameters."""

    def build(self, rngs: nnx.Rngs) -> "_ScannedGPT":  # type: ignore[override]
        return _ScannedGPT(self, rngs)


class _ScannedGPT(gpt.GPT):
    """A GPT with one block, whose parameters have the layers as their first axis."""

    def __init__(self, config: gpt.Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        graph, first, *_ = nnx.split(self.blocks[0], nnx.Param)
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(self.blocks)), first)
        self.blocks = nnx.merge(graph, stacked)  # type: ignore[assignment]

    def encode(self, tokens_BS: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Computes token ids -> [B, S, D] with a scan over the layers."""
        cos_SI, sin_SI = self.angles(tokens_BS.shape[1])
        x_BSD = layers.remat(causal.Embedding.__call__, self.remat)(self.wte, tokens_BS, keys_B)
        graph, variables = nnx.split(self.blocks)
        flat = dict(nnx.to_flat_state(variables))
        shards = {path: nnx.Param.get_value(leaf) for path, leaf in flat.items()}

        def body(x_BSD: jax.Array, slices: Any) -> tuple[jax.Array, None]:
            leaves = [(path, _of_layer(flat[path], slices[path])) for path in flat]
            block = nnx.merge(graph, nnx.from_flat_state(leaves))
            block_of = layers.remat(causal.Block.__call__, self.remat)
            return block_of(block, x_BSD, cos_SI, sin_SI), None

        return jax.lax.scan(body, x_BSD, shards)[0]


def _of_layer(stack: Any, shard: jax.Array) -> Any:
    """Returns one layer's variable, gathered in the loop; the layer axis is not sharded."""
    stored: NamedSharding = stack.get_metadata()["stored"]
    assert not stored.spec or stored.spec[0] is None, f"{stored}: the layer axis is sharded"
    of_layer = NamedSharding(stored.mesh, PartitionSpec(*stored.spec[1:]))
    return GatheredParam(shard, stored=of_layer)


if __name__ == "__main__":
    main()
