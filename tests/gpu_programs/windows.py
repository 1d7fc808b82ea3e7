"""Windows of attention in programs compiled for an H100, without one; requires ``cuda12``."""

import re

import jax
import jax.numpy as jnp
import pytest
from gpu_programs.described_gpus import h100s

from jaxtrain import config
from jaxtrain.ops import attention, per_device
from jaxtrain.sharding import make_mesh
from jaxtrain.training import step_setup


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


def test_local_layers_of_modern_bert_attend_in_blocks() -> None:
    """No array has all pairs of positions for each head."""
    changes = ["--model.layers", "3", "--data.batch_size", "4", "--optim.accumulate", "1"]
    run = config.load("ettin_150m_h100_8", [*changes, "--mesh.fsdp", "1"])
    built = step_setup.build_without_data(run, make_mesh(run.mesh, h100s(1)))
    with per_device.tracing(platform="cuda"):
        text = built.trace_step().lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    calls = [line for line in text.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    assert len(calls) == 3 * 2
    assert sum("bf16[16,1,256,384]" in line for line in calls) == 2 * 2
    assert not re.search(r"\[4,12,1024,1024\]", text)
