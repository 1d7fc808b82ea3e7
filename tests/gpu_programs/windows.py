"""Sliding windows in a program compiled for an H100, without having one; requires ``cuda12``."""

import re

import jax
import jax.numpy as jnp
import pytest
from gpu_programs.described_gpus import h100s

from jaxtrain.ops import attention, per_device


@pytest.mark.parametrize(("window", "length"), [(None, 0), (512, 513), (2047, 0)])
def test_fused_attention_has_the_window(window: int | None, length: int) -> None:
    """cuDNN counts the query itself, too; 0 is for all tokens."""
    mesh = jax.sharding.Mesh(h100s(1), ("data",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.ShapeDtypeStruct((2, 2048, 6, 128), jnp.bfloat16, sharding=placed)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.attend(q, k, v, window=window).astype(jnp.float32).sum()

    with per_device.tracing(platform="cuda"):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile().as_text()
    assert text is not None
    lengths = re.findall(r'__cudnn\$fmha.*"sliding_window_length": ?"?(\d+)', text)
    assert [int(one) for one in lengths] == [length] * 2  # forward and backward
    assert not re.search(r"\[[\d,]*2048,2048\]", text)
