"""Tests that the replay buffer returns each window's entries and never moves them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.models.video_ae.replay_buffer import ReplayBuffer


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
    assert not replay.draw(first).there_N.any()
    for number in range(each):
        replay.keep(*batch(number, windows), first + number / each)
    for number in range(each):
        drawn = replay.draw(first + number / each + 0.5 / each)
        images, context = batch(number, windows)
        assert drawn.there_N.tolist() == [True] * shelves + [False] * (windows - shelves)
        np.testing.assert_array_equal(drawn.images_NHWC[:shelves], images[:shelves])
        np.testing.assert_array_equal(drawn.context_NhwC[:shelves], context[:shelves])
    replay.keep(*batch(7, windows), first + 0.999)
    assert replay.draw(first + 0.999).images_NHWC[0, 0, 0, 0] == 7


def test_buffered_windows_never_cross_devices() -> None:
    devices = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(devices, PartitionSpec("fsdp"))
    replay = ReplayBuffer(32, (4, 4, 3), (1, 1, 1))
    graph, kept = nnx.split(replay)

    def step(kept: Any, images: jax.Array, context: jax.Array, draws: jax.Array) -> Any:
        made = nnx.merge(graph, kept)
        found = made.draw(draws)
        made.keep(images, context, draws)
        return found, nnx.state(made)

    images, context = batch(0, 16)
    given = jax.device_put((kept, images, context, jnp.zeros((16,))), rows)
    compiled = jax.jit(step, out_shardings=rows).lower(*given).compile().as_text()
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert name not in compiled
