"""A rollback in a process with eight devices; test_bad_updates.py has complete runs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import small_checkpoint
from checkpoint.small_state import make_state, mesh_of, meta_of, target_of

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError
from jaxtrain.training import rollback
from jaxtrain.training.state import State, saved_part

CONSTANT = "lpips.conv.kernel"


def training_state(step: int) -> State:
    small = make_state(step, big=2**18)
    return State(
        step=small.step,
        examples_seen=small.examples_seen,
        params=small.params,
        extras={"norm.mean": jnp.full(4, step), CONSTANT: jnp.arange(4.0)},
        opt=small.opt,
        skip_step={"bad_in_a_row": jnp.uint32(2)},
    )


def test_a_checkpoint_that_a_rollback_abandons_is_not_resumed_from(tmp_path: Path) -> None:
    """Such as one that a stop saved: a kill before the next save would bring it back."""
    saver = CheckpointSaver(tmp_path, 2, print, 5)
    kinds: tuple[str, ...] = (pointer.CHECKPOINTS,)
    for step in (5, 7):
        saver.save(saved_part(training_state(step), [CONSTANT]), meta_of(step), kinds)
        kinds = (pointer.CHECKPOINTS, pointer.BEST)
    saver.wait()
    saver.close()
    state = training_state(8)
    target = target_of(saved_part(state, [CONSTANT]), mesh_of(8))
    said: list[str] = []
    _, position = rollback.Rollback(tmp_path, 5, target, said.append, lambda: "")(state)
    assert position.step == 5
    assert any("checkpoints/7 is superseded: moved to" in line for line in said)
    chosen = small_checkpoint.choose("latest", tmp_path, said.append)
    assert chosen is not None
    assert chosen.stem == "5"
    assert pointer.steps(tmp_path / "best") == [7]  # its validation still counts


def bytes_alive() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_rollback_needs_memory_for_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, 1)
    saver.save(saved_part(training_state(5), [CONSTANT]), meta_of(5))
    saver.wait()
    saver.close()
    state = training_state(7)
    target = target_of(saved_part(state, [CONSTANT]), mesh_of(8))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    alive: list[int] = []

    def measured(restore: Any, *arguments: Any, **flags: Any) -> Any:
        alive.append(bytes_alive())
        restored = restore(*arguments, **flags)
        alive.append(bytes_alive())
        return restored

    before = bytes_alive()
    monkeypatch.setattr(rollback, "restore", functools.partial(measured, rollback.restore))
    positions: list[Position] = []
    back = rollback.Rollback(tmp_path, 5, target, print, lambda state: "", rewound=positions.append)
    restored, position = back(state)
    assert alive[0] < before - 0.99 * size
    assert alive[1] < before + 0.01 * size

    assert positions == [position]
    assert (position.step, int(restored.step)) == (5, 5)
    assert int(restored.examples_seen) == 3 * 7
    assert int(restored.skip_step["bad_in_a_row"]) == 0
    np.testing.assert_array_equal(restored.extras[CONSTANT], np.arange(4.0))
    np.testing.assert_array_equal(restored.extras["norm.mean"], np.full(4, 5))
    expected = dataclasses.replace(
        training_state(5), examples_seen=restored.examples_seen, skip_step=restored.skip_step
    )
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_a_checkpoint_is_restored_three_times_in_a_row_at_most(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, 2)
    for step in (5, 10):
        saver.save(saved_part(training_state(step), [CONSTANT]), meta_of(step))
    saver.wait()
    saver.close()
    target = target_of(saved_part(training_state(7), [CONSTANT]), mesh_of(8))
    back = rollback.Rollback(tmp_path, 5, target, lambda line: None, lambda state: "lower the rate")
    assert back(training_state(12))[1].step == 10
    for _ in range(3):  # those to another checkpoint do not count
        assert back(training_state(7))[1].step == 5
    with pytest.raises(InputError, match="although checkpoint 5 was restored 3 times: lower the"):
        back(training_state(7))
