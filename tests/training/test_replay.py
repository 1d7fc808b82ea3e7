"""Steps that are computed twice: a flipped bit is found, and what was saved since then is moved."""

import dataclasses
import errno
import os
import subprocess
import sys
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_checkpoint
import toy
from program import (
    PROGRAM,
    TINY_MLM,
    environment,
    losses,
    train,
    two_processes,
    write_corpus,
)
from wrong_device import FAULTY

from jaxtrain import config
from jaxtrain.checkpoint import pointer, resume
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.sharding import batch_sharding
from jaxtrain.training import loop, preflight
from jaxtrain.training.replay import Replay, differences
from jaxtrain.training.run_progress import Criterion, RunProgress
from jaxtrain.training.step import jit_train_step


def with_a_flipped_bit(array: jax.Array, shard: int, element: int, bit: int) -> jax.Array:
    """Returns a copy of an array in which one device has a wrong bit."""
    parts = [one.data for one in array.addressable_shards]
    number = shard % len(parts)
    content = np.array(parts[number])
    flat = content.reshape(-1).view(np.uint8)
    if array.dtype == bool:
        flat[element % flat.size] ^= 1
    else:
        flat[element % flat.size] ^= 1 << bit
    parts[number] = jax.device_put(content, parts[number].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def planted(tree: Any, rng: np.random.Generator) -> tuple[Any, int]:
    """Returns a pytree with a flipped bit in one of its arrays, and the device that has it."""
    leaves, structure = jax.tree.flatten(tree)
    number = int(rng.integers(len(leaves)))
    shard = int(rng.integers(len(leaves[number].addressable_shards)))
    device = leaves[number].addressable_shards[shard].device.id
    element, bit = int(rng.integers(1 << 30)), int(rng.integers(8))
    leaves[number] = with_a_flipped_bit(leaves[number], shard, element, bit)
    return jax.tree.unflatten(structure, leaves), device


MESHES: list[dict[str, Any]] = [
    {"data": 2, "fsdp": 4},
    {"data": 1, "fsdp": 8, "shard": "none"},
    {"data": 2, "fsdp": 4, "shard": "optimizer", "accumulate": 2},
]


def stepped(how: dict[str, Any]) -> tuple[toy.Stepper, Any, Any]:
    """Returns a stepper, its compiled step, and a batch."""
    stepper = toy.stepper(toy.Config(), **how)
    step = jit_train_step(stepper.step, stepper.target, stepper.rule.mesh, donate=False)
    batch = jax.device_put(toy.random_batch(stepper.spec), batch_sharding(stepper.rule.mesh))
    return stepper, step, batch


@pytest.mark.parametrize("how", MESHES, ids=str)
def test_two_hundred_flipped_bits_in_results_are_found(how: dict[str, Any]) -> None:
    """And the device that alone has another result is named."""
    stepper, step, batch = stepped(how)
    result = step(stepper.state, batch)
    assert differences(result, step(stepper.state, batch)) == ""
    rng = np.random.default_rng(0)
    for _ in range(200 // len(MESHES) + 1):
        wrong, device = planted(result, rng)
        assert f" on device {device} (cpu)" in differences(result, wrong)


@pytest.mark.parametrize("how", MESHES, ids=str)
def test_wrong_bits_in_what_a_step_reads_are_found_if_they_change_it(how: dict[str, Any]) -> None:
    stepper, step, batch = stepped(how)
    rng, seen = np.random.default_rng(1), 0
    result = step(stepper.state, batch)
    for _ in range(30):
        other = step(planted(stepper.state, rng)[0], batch)
        same = jax.tree.map(
            lambda a, b: all(
                np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
                for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
            ),
            result,
            other,
        )
        assert (differences(result, other) == "") == all(jax.tree.leaves(same))
        seen += not all(jax.tree.leaves(same))
    assert seen > 5


def test_a_nan_equals_itself_and_signs_of_zero_count() -> None:
    one = {"a": jnp.asarray([jnp.nan, 0.0]), "b": jnp.asarray([True, False])}
    assert differences(one, jax.tree.map(jnp.copy, one)) == ""
    assert differences(one, one | {"a": jnp.asarray([jnp.nan, -0.0])}).startswith("a on ")
    assert differences(one, one | {"b": jnp.asarray([True, True])}).startswith("b on ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "uint32"])
def test_every_bit_of_every_type_counts(dtype: str) -> None:
    array = jnp.arange(4).astype(dtype)
    for byte in range(array.dtype.itemsize):
        for bit in range(8):
            wrong = with_a_flipped_bit(array, 0, byte, bit)
            assert differences({"x": array}, {"x": wrong}) != ""


class Step:
    """A step with prepared results."""

    def __init__(self, *results: int) -> None:
        self.results = list(results)

    def __call__(self, state: Any, batch: Any) -> Any:
        return {"x": jnp.asarray(self.results.pop(0))}, {"loss": jnp.asarray(1.0)}


class Saved:
    """The checkpoints of a run on a disk."""

    def __init__(self, run: Path) -> None:
        self.agreed: int | None = None
        self.run = run

    def suspect_after(self, step: int, why: str) -> None:
        CheckpointStore(Folder(self.run)).set_aside_after(step, "suspect", why)


class Copy:
    """Stands for the copy of a run in a bucket."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.moved = problem, list[int]()

    def suspect_after(self, step: int, why: str) -> str:
        self.moved.append(step)
        return self.problem


CRITERION = Criterion(None, None, "")


def replays(
    run: Path, step: Any, done: int = 0, mirror: Any = None, settle: Any = lambda: None
) -> tuple[Replay, Saved]:
    saved: Any = Saved(run)
    progress = RunProgress.read(run, CRITERION, Position(done, seen=done))
    return Replay(step, saved, progress, done, settle, print, mirror), saved


def recorded(run: Path, done: int = 1000) -> int | None:
    return RunProgress.read(run, CRITERION, Position(done, seen=done)).agreed


def test_a_difference_moves_checkpoints_since_the_last_agreement(tmp_path: Path) -> None:
    for step, kinds in ((2, ("checkpoints",)), (3, ("best",)), (4, ("checkpoints",))):
        small_checkpoint.write(tmp_path, step, kinds)
    small_checkpoint.write(tmp_path, 6, ("checkpoints", "best"))
    first, saved = replays(tmp_path, Step(1, 1), done=0)
    assert jax.tree.map(float, first(3, None, None)) == ({"x": 1.0}, {"loss": 1.0})
    assert saved.agreed == recorded(tmp_path) == 4
    # A later start remembers it, and waits for a save in the background.
    again, saved = replays(
        tmp_path, Step(1, 2), done=6, settle=lambda: small_checkpoint.write(tmp_path, 7)
    )
    assert saved.agreed == 4
    with pytest.raises(RunAgain) as caught:
        again(7, None, None)
    message = str(caught.value)
    assert "step 8 was computed twice with different results: 0.x on 1 devices" in message
    assert "the checkpoints after step 4, the last one computed twice with equal" in message
    assert "are in suspect/: resume with --resume latest" in message
    assert pointer.steps(tmp_path / "checkpoints") == [2, 4]
    assert pointer.steps(tmp_path / "suspect/checkpoints") == [6, 7]
    assert pointer.steps(tmp_path / "suspect/best") == [6]
    assert "step 8 was computed twice" in (tmp_path / "suspect/checkpoints/6.txt").read_text()
    assert resume.choose("latest", tmp_path, tmp_path) == tmp_path / "checkpoints/4.json"


def test_no_launcher_resumes_from_a_checkpoint_that_cannot_be_moved(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 2)
    (tmp_path / "suspect").write_text("in the way")
    one, _ = replays(tmp_path, Step(1, 2))
    with pytest.raises(InputError, match=r"a checkpoint after step 0, .* cannot be moved to susp"):
        one(3, None, None)
    one, _ = replays(tmp_path / "other", Step(1, 2), mirror=Copy("no route to host"))
    with pytest.raises(InputError, match=r"cannot be moved to suspect/ \(no route to host\)"):
        one(3, None, None)


def test_the_copy_in_a_bucket_is_told(tmp_path: Path) -> None:
    copy = Copy()
    one, _ = replays(tmp_path, Step(1, 2), done=4, mirror=copy)
    with pytest.raises(RunAgain, match=r"after step 4, .* are in suspect/: resume"):
        one(7, None, None)
    assert copy.moved == [4]


def test_after_a_rollback_later_steps_no_longer_count(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 3)
    one, saved = replays(tmp_path, Step(1, 1, 1, 2))
    one(3, None, None)
    one.rewound(Position(done=2))
    assert saved.agreed == recorded(tmp_path) == 2  # nor for a start after that
    with pytest.raises(RunAgain):
        one(5, None, None)
    with pytest.raises(InputError, match=r"no checkpoint .* is intact \(all are in suspect/"):
        resume.choose("latest", tmp_path, tmp_path)


def test_the_state_at_the_first_start_with_checks_counts_as_right(tmp_path: Path) -> None:
    replays(tmp_path, Step(), done=9)
    assert recorded(tmp_path) == 9
    replays(tmp_path, Step(), done=12)  # ended before its first check
    assert recorded(tmp_path) == 9


def test_a_record_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = replays(tmp_path, Step(1, 1))

    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxtrain.training.run_progress.write_whole", full)
    one(3, None, None)
    assert "progress.json cannot be written (No space left" in capsys.readouterr().out
    assert recorded(tmp_path) == 0  # the older step stays


def test_a_rollback_of_the_loop_reaches_the_replay() -> None:
    setup, position = unittest.mock.MagicMock(), Position(done=2)
    setup.rollback.return_value = ("restored", position)
    assert loop._roll_back(setup, "state") == "restored"  # type: ignore[arg-type]
    setup.replay.rewound.assert_called_once_with(position)


def test_gpus_need_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load("demo_mlm", ["--loop.replay_every", "4"])
    assert list(preflight._replay(run)) == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (problem,) = preflight._replay(run)
    assert "add --deterministic True" in problem
    assert list(preflight._replay(dataclasses.replace(run, deterministic=True))) == []
    with pytest.raises(InputError, match="add --deterministic True"):
        preflight.check(run, resumes=False)


LENGTH = ("--data.path", "corpus", "--loop.steps", 6, "--checkpoint.every", 1)
CHECKED = (*TINY_MLM, *LENGTH, "--checkpoint.keep", 1, "--loop.replay_every", 2)


@pytest.mark.long
def test_a_run_returns_to_the_last_checkpoint_that_agreed(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    each = (*CHECKED, "--simulate-devices", 2, "--mesh.data", 2, "--mesh.fsdp", 1)
    train(tmp_path, *each, "--output-dir", "undisturbed")
    wrong = subprocess.run(
        [sys.executable, "-c", FAULTY, *map(str, each), "--output-dir", "faulty"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert wrong.returncode == 75, wrong.stdout + wrong.stderr
    assert "step 4 was computed twice with different results" in wrong.stderr
    assert "on host broken-host" in wrong.stderr
    assert pointer.steps(tmp_path / "faulty/checkpoints") == [2]
    assert pointer.steps(tmp_path / "faulty/suspect/checkpoints") == [3]
    text = train(tmp_path, *each, "--output-dir", "faulty", "--resume", "latest")
    assert "step 2 of 6" in text
    assert losses(tmp_path / "faulty") == losses(tmp_path / "undisturbed")


@pytest.mark.long
def test_two_processes_end_when_a_device_of_one_is_wrong(tmp_path: Path) -> None:
    write_corpus(tmp_path)

    def ended(output: str, *more: object, program: Sequence[str] = PROGRAM) -> tuple[set[int], str]:
        mesh = ("--simulate-devices", 4, "--mesh.data", 4, "--mesh.fsdp", 1)
        flags = (*CHECKED, *mesh, "--output-dir", output, *more)
        last = {"JAX_LAST_PROCESS": "1"}
        with two_processes(tmp_path, *flags, both=last, program=program) as started:
            texts = [process.communicate(timeout=400)[0] for process in started]
        return {process.returncode for process in started}, "\n".join(texts)

    codes, text = ended("undisturbed")
    assert codes == {0}, text
    codes, text = ended("faulty", program=("-c", FAULTY))
    assert codes == {75}, text
    assert "wrong is " in text
    assert text.count("(process 1 on host broken-host)") == 2, text  # each names both processes
    assert pointer.steps(tmp_path / "faulty/checkpoints") == [2]
    assert pointer.steps(tmp_path / "faulty/suspect/checkpoints") == [3]
    codes, text = ended("faulty", "--resume", "latest")
    assert codes == {0}, text
    assert "step 2 of 6" in text
    assert losses(tmp_path / "faulty") == losses(tmp_path / "undisturbed")


@pytest.mark.long
def test_no_false_alarm_in_twenty_thousand_steps() -> None:
    """Each is computed twice, from the state after the one before, on new examples."""
    stepper, step, _ = stepped({"shard": "optimizer", "data": 1, "fsdp": 2, "accumulate": 2})
    state = stepper.state
    batches = [
        jax.device_put(toy.random_batch(stepper.spec, seed), batch_sharding(stepper.rule.mesh))
        for seed in range(20)
    ]
    for number in range(20_000):
        batch = batches[number % 20]
        first, second = step(state, batch), step(state, batch)
        assert differences(first, second) == "", number
        state = first[0]
    assert int(state.step) == 20_000
