"""Compiles attention in several ways for a GPU that is not there, and counts bytes.

    python benchmarks/attention_variants.py [--gpu h100] [--devices 8]

One call, forward and backward, with the sizes of a layer of `bert_base_h200_8`: 32 sequences of 512
per device, 12 heads of 64, bfloat16, queries, keys and values in one array. Requires jax's CUDA
plugin (extra ``cuda12``). "moved" is what instructions read and write, the split and the joining of
the array included (0.45 GB).
"""

import argparse
import functools
import os
import re
from collections.abc import Callable

os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import results
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from jax.experimental.pallas.ops.gpu import attention as pallas
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.ops import attention, per_device
from jaxtrain.planning import cards
from jaxtrain.xla import hlo, operations

BATCH, LENGTH, HEADS, WIDTH = 32, 512, 12, 64
DOCUMENTS = 16  # the most in a sequence, for packed offsets
BLOCKS = pallas.BlockSizes(64, 64, 32, 32, 32, 32)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Stores all scores."""
    with per_device.tracing(platform="cpu"):
        return attention.attend(q, k, v, _same(segments_BS))


def lengths(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Uses cuDNN with the number of keys, as for padding."""
    return attention.attend(q, k, v, (segments_BS > 0)[:, None])


def mask(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Uses cuDNN with a mask [B, 1, S, S], as for documents."""
    return attention.attend(q, k, v, _same(segments_BS))


def packed(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Uses cuDNN with offsets of documents, here all of the same length."""
    size = LENGTH // DOCUMENTS
    starts = jnp.broadcast_to(
        jnp.arange(DOCUMENTS, dtype=jnp.int32) * size, (q.shape[0], DOCUMENTS)
    )
    offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    found: jax.Array = cudnn.dot_product_attention(
        *(q, k, v),
        q_seqlen=jnp.full_like(starts, size),
        kv_seqlen=jnp.full_like(starts, size),
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=WIDTH**-0.5,
        mask_type=cudnn.MaskType.PADDING,
    )
    return found


def triton(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """Uses jax's Pallas kernel with segment ids, on each device; deprecated since jax 0.11."""
    call = functools.partial(pallas.mha, sm_scale=WIDTH**-0.5, block_sizes=BLOCKS)
    over = PartitionSpec(_mesh.axis_names)
    each = jax.shard_map(call, mesh=_mesh, in_specs=(over,) * 4, out_specs=over, check_vma=False)
    return each(q, k, v, segments_BS)


def _same(segments_BS: jax.Array) -> jax.Array:
    return segments_BS[:, :, None] == segments_BS[:, None]


_mesh: jax.sharding.Mesh
WAYS = (plain, lengths, mask, packed, triton)


def compiled(way: Callable[..., jax.Array], mesh: jax.sharding.Mesh) -> jax.stages.Compiled:
    """Compiles the call and the gradient of the array of queries, keys and values."""

    def loss(qkv: jax.Array, segments_BS: jax.Array) -> jax.Array:
        with per_device.tracing(platform="cuda", mesh=mesh):
            found = way(*(qkv[:, :, part] for part in range(3)), segments_BS)
        return jnp.square(found.astype(jnp.float32)).sum()

    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    batch = BATCH * mesh.size
    qkv = jax.ShapeDtypeStruct((batch, LENGTH, 3, HEADS, WIDTH), jnp.bfloat16, sharding=rows)
    segments = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32, sharding=rows)
    traced = jax.jit(jax.value_and_grad(loss)).trace(qkv, segments)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def main() -> None:
    """Prints a line for each way, and records it if requested."""
    global _mesh
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h100", help="short name of the card (default: h100)")
    parser.add_argument("--devices", type=int, default=1, help="number of devices (default: 1)")
    results.add_flags(parser)
    flags = parser.parse_args()
    card = cards.card(flags.gpu)
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(card),
        topology=f"1x1x{flags.devices}",
    )
    types = (AxisType.Auto,) * 2
    _mesh = jax.make_mesh((1, flags.devices), ("data", "fsdp"), types, devices=found.devices)
    if card.capability >= (9, 0):
        # jax asks the local GPU, and there is none.
        cudnn.check_compute_capability = lambda capability: True
    for way in WAYS:
        try:
            program = compiled(way, _mesh)
        except NotImplementedError as error:
            result = f"not supported: {error}"
        else:
            text = program.as_text() or ""
            scores = re.search(rf"\[(?:{BATCH},{HEADS}|{BATCH * HEADS}),{LENGTH},{LENGTH}\]", text)
            sent = sum(one.times * one.wire_bytes for one in hlo.collectives(text, flags.devices))
            result = (
                f"{operations.moved_bytes(text) / 1e9:.3f} GB moved, "
                f"{program.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB of temporaries, "
                f"{'with' if scores else 'no'} array [B, N, S, S], {sent / 1e6:.1f} MB sent"
            )
        what = f"attention, forward and backward: {way.__name__}"
        print(f"{what}: {result}", flush=True)
        if flags.results:
            command = f"python benchmarks/attention_variants.py --gpu {flags.gpu}"
            command += f" --devices {flags.devices}" if flags.devices > 1 else ""
            results.append_row(flags.results, f"compiled for {card.name}", what, result, command)


if __name__ == "__main__":
    main()
