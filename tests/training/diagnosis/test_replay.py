"""Steps that are computed twice: flipped bits are found, and the device is named if it is known."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import small_checkpoint
from jax.sharding import PartitionSpec
from program import (
    PROGRAM,
    TINY_MLM,
    losses,
    two_processes,
    write_corpus,
)
from training import toy
from training.wrong_device import FAULTY

from jaxtrain import config
from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.optim.schedule import Scalars
from jaxtrain.sharding import AXES, batch_sharding
from jaxtrain.training import preflight
from jaxtrain.training.diagnosis.replay import Difference, Replay, compare, twice
from jaxtrain.training.run_progress import Criterion, RunProgress


def test_a_step_is_computed_twice_from_the_same_state() -> None:
    stepper = toy.stepper(toy.Config(), data=2, fsdp=4, accumulate=2)
    batch = jax.device_put(toy.random_batch(stepper.spec), batch_sharding(stepper.rule.mesh))
    states = [jax.tree.map(jnp.copy, stepper.state) for _ in range(3)]
    scalars = stepper.scalars()
    following, metrics, difference = twice(stepper.compiled, states[0], batch, scalars)
    assert difference is None
    same = jax.tree.leaves(stepper.compiled(states[1], batch, scalars))
    for array, expected in zip(jax.tree.leaves((following, metrics)), same, strict=True):
        np.testing.assert_array_equal(array, expected)
    other = jax.tree.map(lambda array: -array, batch)
    given = iter([batch, other])
    changing = lambda state, _, scalars: stepper.compiled(state, next(given), scalars)  # noqa: E731
    difference = twice(changing, states[2], batch, scalars)[2]
    assert difference is not None
    assert len(difference.devices) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_any_flipped_bit_of_a_device_is_found(dtype: str) -> None:
    mesh, rng = toy.mesh_of(2, 2), np.random.default_rng(0)
    split, whole = PartitionSpec(AXES), PartitionSpec()
    size = jnp.dtype(dtype).itemsize
    values = rng.integers(2 if dtype == "bool" else 1 << 8 * size, size=(8, 3))
    bits = values.astype(f"uint{8 * size}")

    def placed(bits: np.ndarray, spec: PartitionSpec = split) -> jax.Array:
        return jax.make_array_from_callback(
            bits.shape, jax.NamedSharding(mesh, spec), lambda at: bits.view(jnp.dtype(dtype))[at]
        )

    same = {"copies": placed(bits, whole), "part": placed(bits)}
    assert compare(same, {"copies": placed(bits, whole), "part": placed(bits)}) is None
    for bit in range(1 if dtype == "bool" else 8 * size):
        wrong, row = bits.copy(), int(rng.integers(8))
        wrong[row, 1] ^= wrong.dtype.type(1 << bit)
        assert compare(same, same | {"part": placed(wrong)}) == Difference("part", (row // 2,)), bit
        assert compare(same, same | {"copies": placed(wrong, whole)}) == Difference(
            "copies", (0, 1, 2, 3)
        )
        both = {"copies": placed(bits, whole), "part": placed(wrong), "second": placed(wrong)}
        assert compare(same | {"second": placed(bits)}, both) == Difference(
            "part and 1 more", (row // 2,)
        )


def test_a_nan_equals_itself_and_signs_of_zero_count() -> None:
    whole = jax.NamedSharding(toy.mesh_of(1, 1), PartitionSpec())

    def placed(*values: float) -> dict[str, jax.Array]:
        return {"x": jax.device_put(np.asarray(values, np.float32), whole)}

    assert compare(placed(np.nan, 0.0), placed(np.nan, 0.0)) is None
    assert compare(placed(np.nan, 0.0), placed(np.nan, -0.0)) == Difference("x", (0,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Small:
    """A state with a value on each of two devices."""

    w: jax.Array
    step: jax.Array


def at(step: int, values: Sequence[int] = (0, 0)) -> Any:
    mesh = toy.mesh_of(1, 2)
    specs = PartitionSpec(AXES), PartitionSpec()
    split, whole = (jax.NamedSharding(mesh, spec) for spec in specs)
    return Small(jax.device_put(np.asarray(values), split), jax.device_put(np.asarray(step), whole))


SCALARS = Scalars(0, 0, ())  # Stepping does not read them


class Stepping:
    """Returns prepared values, as a step does; a bad one does not count."""

    def __init__(self, *values: list[int], bad: bool = False) -> None:
        self.values, self.bad = list(values), bad

    def __call__(self, state: Any, batch: Any, scalars: Any) -> Any:
        return at(int(state.step) + (not self.bad), self.values.pop(0)), {}


class Saved:
    """The checkpoints of a run on a disk."""

    def __init__(self, run: Path) -> None:
        self.last_equal: int | None = None
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
    run: Path, step: Any, done: int = 0, uploader: Any = None, await_save: Any = lambda: None
) -> tuple[Replay, Saved]:
    saved: Any = Saved(run)
    progress = RunProgress.read(run, CRITERION, Position(done, examples_seen=done))
    names = ["device 0 on host a", "device 1 on host b"]
    return Replay(step, names, saved, progress, done, await_save, print, uploader), saved


def recorded(run: Path, done: int = 1000) -> int | None:
    return RunProgress.read(run, CRITERION, Position(done, examples_seen=done)).last_equal


def test_a_difference_moves_checkpoints_since_the_last_agreement(tmp_path: Path) -> None:
    for step, kinds in ((2, ("checkpoints",)), (3, ("best",)), (4, ("checkpoints",))):
        small_checkpoint.write(tmp_path, step, kinds)
    small_checkpoint.write(tmp_path, 6, ("checkpoints", "best"))
    first, saved = replays(tmp_path, Stepping([1, 2], [1, 2]), done=0)
    following, _ = first(3, at(3), {}, SCALARS)
    assert following.w.tolist() == [1, 2]  # type: ignore[attr-defined]
    assert saved.last_equal == recorded(tmp_path) == 4
    # A later start remembers it, and waits for a save in the background.
    again, saved = replays(
        tmp_path,
        Stepping([1, 2], [1, 3]),
        done=6,
        await_save=lambda: small_checkpoint.write(tmp_path, 7),
    )
    assert saved.last_equal == 4
    with pytest.raises(RunAgain) as caught:
        again(7, at(7), {}, SCALARS)
    message = str(caught.value)
    assert (
        "step 8 was computed twice with different results: state.w on device 1 on host b" in message
    )
    assert "the checkpoints after step 4, the last one computed twice with equal" in message
    assert "are in aside/: resume with --resume latest; if this device is named" in message
    assert pointer.steps(tmp_path / "checkpoints") == [2, 4]
    reasons = small_checkpoint.aside(tmp_path)
    assert list(reasons) == [6, 7]
    assert reasons[6].startswith("suspect: step 8 was computed twice")
    assert pointer.steps(tmp_path / "best") == [3]
    assert small_checkpoint.choose("latest", tmp_path) == tmp_path / "checkpoints/4.json"


def test_after_a_bad_step_the_state_before_it_is_right(tmp_path: Path) -> None:
    """A checkpoint of the number of steps that the loop expected does not exist yet."""
    one, saved = replays(tmp_path, Stepping([1, 2], [1, 2], bad=True))
    one(3, at(3), {}, SCALARS)
    assert saved.last_equal == recorded(tmp_path) == 3


def test_no_launcher_resumes_from_a_checkpoint_that_cannot_be_moved(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 2)
    (tmp_path / "aside").write_text("in the way")
    one, _ = replays(tmp_path, Stepping([1, 2], [1, 3]))
    with pytest.raises(InputError, match=r"after step 0, .* cannot be moved to aside/"):
        one(3, at(3), {}, SCALARS)
    one, _ = replays(
        tmp_path / "other", Stepping([1, 2], [1, 3]), uploader=Copy("no route to host")
    )
    with pytest.raises(InputError, match=r"cannot be moved to aside/ \(no route to host\)"):
        one(3, at(3), {}, SCALARS)


def test_the_copy_in_a_bucket_is_told(tmp_path: Path) -> None:
    copy = Copy()
    one, _ = replays(tmp_path, Stepping([1, 2], [1, 3]), done=4, uploader=copy)
    with pytest.raises(RunAgain, match=r"after step 4, .* are in aside/: resume"):
        one(7, at(7), {}, SCALARS)
    assert copy.moved == [4]


def test_after_a_rollback_later_steps_no_longer_count(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 3)
    one, saved = replays(tmp_path, Stepping([1, 2], [1, 2], [1, 2], [5, 6]))
    one(3, at(3), {}, SCALARS)
    one.rewound(Position(step=2))
    assert saved.last_equal == recorded(tmp_path) == 2  # nor for a start after that
    with pytest.raises(
        RunAgain, match=r"state\.w on 2 devices, so it is unknown which one is wrong;"
    ):
        one(5, at(5), {}, SCALARS)
    with pytest.raises(InputError, match=r"is intact \(damaged or suspect ones are in aside/"):
        small_checkpoint.choose("latest", tmp_path)


def test_the_state_at_the_first_start_with_checks_counts_as_right(tmp_path: Path) -> None:
    replays(tmp_path, Stepping(), done=9)
    assert recorded(tmp_path) == 9
    replays(tmp_path, Stepping(), done=12)  # ended before its first check
    assert recorded(tmp_path) == 9


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
    planted = re.search(r"wrong is (\d+);", text)
    assert planted, text
    where = f"device {planted[1]} (cpu) of process 1 on host broken-host; the state is discarded"
    assert text.count(where) == 2, text  # in the message of each process
    assert pointer.steps(tmp_path / "faulty/checkpoints") == [2]
    assert list(small_checkpoint.aside(tmp_path / "faulty")) == [3]
    codes, text = ended("faulty", "--resume", "latest")
    assert codes == {0}, text
    assert "step 2 of 6" in text
    assert losses(tmp_path / "faulty") == losses(tmp_path / "undisturbed")
