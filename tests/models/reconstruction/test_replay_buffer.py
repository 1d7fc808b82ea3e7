"""Tests that the replay buffer returns each window's entries and never moves them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain import config
from jaxtrain.cost.hlo import collectives
from jaxtrain.models.reconstruction.replay_buffer import ReplayBuffer
from jaxtrain.sharding import ShardingRule, batch_sharding, make_mesh
from jaxtrain.training.state import ModelDefinition


def batch(number: float, windows: int) -> tuple[jax.Array, jax.Array]:
    """Returns windows and contexts whose values identify the batch and the window."""
    own = number + jnp.arange(windows) / 64
    return jnp.broadcast_to(own.reshape(-1, 1, 1, 1), (windows, 4, 4, 3)), own.reshape(-1, 1, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize(("slots", "windows"), [(8, 4), (9, 4), (4, 4), (3, 4), (1, 4)])
def test_each_window_draws_its_own_entries(slots: int, windows: int) -> None:
    replay = ReplayBuffer(slots, (4, 4, 3), (1, 1, 1))
    shelves, each = min(slots, windows), max(1, slots // windows)
    first = jnp.zeros((windows,))
    assert not replay.draw(first).filled_N.any()
    for number in range(each):
        replay.keep(*batch(number, windows), first + number / each)
    for number in range(each):
        drawn = replay.draw(first + number / each + 0.5 / each)
        images, context = batch(number, windows)
        assert drawn.filled_N.tolist() == [True] * shelves + [False] * (windows - shelves)
        np.testing.assert_array_equal(drawn.images_NHWC[:shelves], images[:shelves])
        np.testing.assert_array_equal(drawn.context_NhwC[:shelves], context[:shelves])
    replay.keep(*batch(7, windows), first + 0.999)
    assert replay.draw(first + 0.999).images_NHWC[0, 0, 0, 0] == 7


@pytest.mark.parametrize(
    "settings",
    [
        config.Mesh(data=1, fsdp=8, shard="optimizer"),
        config.Mesh(data=2, fsdp=4, shard="params"),
        config.Mesh(data=8, fsdp=1, shard="none"),
    ],
)
def test_buffered_windows_never_cross_devices(settings: config.Mesh) -> None:
    """Windows are wider and higher than the number of slots, and larger than is replicated."""
    mesh = make_mesh(settings)
    definition = ModelDefinition(lambda _: ReplayBuffer(32, (64, 64, 3), (1, 1, 1)))
    stored = definition.extra_shardings(ShardingRule(mesh, settings))
    assert {sharding.spec for sharding in stored.values()} == {PartitionSpec(("data", "fsdp"))}

    def step(kept: Any, images: jax.Array, context: jax.Array, draws: jax.Array) -> Any:
        replay = definition.module({}, kept)
        drawn = replay.draw(draws)
        replay.keep(images, context, draws)
        return drawn, definition.extras_of(replay)

    _, kept = definition.init(jax.random.key(0))
    of_batch = jnp.zeros((16, 64, 64, 3)), jnp.zeros((16, 1, 1, 1)), jnp.zeros((16,))
    rows = batch_sharding(mesh)
    jitted = jax.jit(step, in_shardings=(stored, rows, rows, rows), out_shardings=(rows, stored))
    assert not collectives(jitted.lower(kept, *of_batch).compile().as_text(), 8)


def test_a_buffer_that_the_devices_do_not_divide_is_replicated() -> None:
    settings = config.Mesh(data=1, fsdp=8, shard="optimizer")
    definition = ModelDefinition(lambda _: ReplayBuffer(33, (64, 64, 3), (1, 1, 1)))
    stored = definition.extra_shardings(ShardingRule(make_mesh(settings), settings))
    assert {sharding.spec for sharding in stored.values()} == {PartitionSpec()}
