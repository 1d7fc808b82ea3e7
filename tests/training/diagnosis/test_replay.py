"""Steps that are computed twice: flipped bits are found, and the device is named if it is known."""

import collections
import dataclasses
import errno
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_checkpoint
import toy
from jax.sharding import Mesh, PartitionSpec
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
from jaxtrain.optim import build as optim
from jaxtrain.sharding import AXES, batch_sharding
from jaxtrain.training import preflight, skip_step
from jaxtrain.training.diagnosis.replay import Difference, Replay, compare, twice
from jaxtrain.training.run_progress import Criterion, RunProgress
from jaxtrain.training.step import build_train_step

KINDS = ("activations", "gradients", "results")


def flipped(array: Any, mesh: Mesh, spec: PartitionSpec, fault: jax.Array) -> jax.Array:
    """Flips one bit of an array on one device, inside a compiled function.

    Args:
        array: float32.
        mesh: over all devices.
        spec: how the array is split over them.
        fault: int32: kind (ignored), number of the array (ignored), device, element, bit.
    """

    def local(part: jax.Array, fault: jax.Array) -> jax.Array:
        place = jax.lax.axis_index(AXES[0]) * jax.lax.axis_size(AXES[1])
        here = place + jax.lax.axis_index(AXES[1]) == fault[2]
        bits = jax.lax.bitcast_convert_type(part.reshape(-1), jnp.uint32)
        flip = (jnp.uint32(1) << fault[4].astype(jnp.uint32)) * here
        # Not at[].set(): XLA may compute that element a second time, with other rounding.
        bits ^= flip * (jnp.arange(bits.size) == fault[3] % bits.size)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).reshape(part.shape)

    wrong = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    return wrong(array, fault)


class Faulty(NamedTuple):
    """A compiled step of a toy with a place for a fault.

    The fault is in the batch, on which all activations of a device depend, in a gradient after its
    sum over the devices, or in a parameter of the new state.
    """

    stepper: toy.Stepper
    step: Any

    def state(self) -> Any:
        return jax.tree.map(jnp.copy, self.stepper.state)

    def found(self, batch: Any, fault: tuple[int, ...]) -> Difference | None:
        """Computes a step twice, the first time with the fault."""
        faults = iter([fault, (-1, 0, 0, 0, 0)])

        def step(state: Any, batch: Any) -> Any:
            return self.step(state, batch, np.asarray(next(faults), np.int32))

        return twice(step, self.state(), batch)[2]


@functools.cache
def faulty(shard: str = "params", data: int = 2, fsdp: int = 4, accumulate: int = 1) -> Faulty:
    how: Any = {"data": data, "fsdp": fsdp, "shard": shard, "accumulate": accumulate}
    stepper = toy.stepper(toy.Config(), **how)
    definition, mesh = stepper.definition, stepper.rule.mesh
    stored = definition.trained(definition.stored(stepper.rule))
    trained = optim.make_optimizer(toy.OPTIM, 100, definition.trained(definition.params))

    def planted(state: Any, batch: Any, fault: jax.Array) -> Any:
        def at(kind: str, number: int, array: Any, spec: PartitionSpec) -> Any:
            wrong = flipped(array, mesh, spec, fault)
            here = (fault[0] == KINDS.index(kind)) & (fault[1] == number)
            return jax.lax.cond(here, lambda: wrong, lambda: array)

        def receive(batch: Any) -> Any:
            return batch | {"x": at("activations", 0, batch["x"], PartitionSpec(AXES))}

        def each(kind: str, arrays: Any) -> Any:
            return {
                name: at(kind, number, arrays[name], stored[name].spec)
                for number, name in enumerate(sorted(stored))
            }

        def update(grads: Any, *others: Any) -> Any:
            return trained.update(each("gradients", grads), *others)

        step = build_train_step(
            definition,
            optax.GradientTransformation(trained.init, update),
            optim.schedule(toy.OPTIM, 100),
            stepper.rule,
            skip_step.detector(toy.OPTIM),
            precision="float32",
            accumulate=accumulate,
            seed=1,
            receive=receive,
        )
        following, metrics = step(state, batch)
        params = following.params | each("results", following.params)
        return dataclasses.replace(following, params=params), metrics

    where = jax.tree.map(lambda leaf: leaf.sharding, stepper.target)
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        planted,
        in_shardings=(where, batch_sharding(mesh), whole),
        out_shardings=(where, whole),
        donate_argnums=0,
    )
    fault = jax.ShapeDtypeStruct((5,), jnp.int32)
    return Faulty(stepper, jitted.lower(stepper.target, stepper.spec, fault).compile())


def batch_of(one: Faulty) -> Any:
    return jax.device_put(toy.random_batch(one.stepper.spec), batch_sharding(one.stepper.rule.mesh))


@pytest.mark.parametrize(
    "how", [{}, {"shard": "none"}, {"shard": "optimizer", "accumulate": 2}], ids=str
)
def test_a_flipped_bit_is_found(how: Any) -> None:
    one = faulty(**how)
    batch, count = batch_of(one), len(one.stepper.definition.params)
    assert one.found(batch, (-1, 0, 0, 0, 0)) is None
    rng = np.random.default_rng(0)
    for kind, number in [(0, 0), (1, 0), (1, count - 1), (2, 0), (2, count // 2)]:
        device, element = int(rng.integers(8)), int(rng.integers(1 << 20))
        difference = one.found(batch, (kind, number, device, element, 22))
        assert difference is not None, (KINDS[kind], number)
        if kind == 2:
            assert difference.devices == (device,), (KINDS[kind], number, difference)


def test_a_flipped_bit_before_the_norm_is_in_the_results_of_several_devices() -> None:
    one = faulty()
    for kind in (0, 1):  # clipping multiplies each gradient by a function of the norm of all
        found = one.found(batch_of(one), (kind, 0, 5, 0, 26))
        assert found is not None
        assert len(found.devices) > 1


def test_the_state_is_not_changed_by_the_comparison() -> None:
    one = faulty()
    batch = batch_of(one)
    following, metrics, found = twice(
        lambda *given: one.step(*given, np.full(5, -1, np.int32)), one.state(), batch
    )
    assert found is None
    once, same = one.step(one.state(), batch, np.full(5, -1, np.int32))
    for array, expected in zip(
        jax.tree.leaves((following, metrics)), jax.tree.leaves((once, same)), strict=True
    ):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
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


class Stepping:
    """Returns prepared states with a value on each of two devices, as a step does."""

    def __init__(self, *states: list[int]) -> None:
        self.states = list(states)

    def __call__(self, state: Any, batch: Any) -> Any:
        split = jax.NamedSharding(toy.mesh_of(1, 2), PartitionSpec(AXES))
        return {"w": jax.device_put(np.asarray(self.states.pop(0)), split)}, {}


STATE: Any = {}


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
    names = ["device 0 on host a", "device 1 on host b"]
    return Replay(step, names, saved, progress, done, settle, print, mirror), saved


def recorded(run: Path, done: int = 1000) -> int | None:
    return RunProgress.read(run, CRITERION, Position(done, seen=done)).agreed


def test_a_difference_moves_checkpoints_since_the_last_agreement(tmp_path: Path) -> None:
    for step, kinds in ((2, ("checkpoints",)), (3, ("best",)), (4, ("checkpoints",))):
        small_checkpoint.write(tmp_path, step, kinds)
    small_checkpoint.write(tmp_path, 6, ("checkpoints", "best"))
    first, saved = replays(tmp_path, Stepping([1, 2], [1, 2]), done=0)
    following, _ = first(3, STATE, {})
    assert following["w"].tolist() == [1, 2]  # type: ignore[index]
    assert saved.agreed == recorded(tmp_path) == 4
    # A later start remembers it, and waits for a save in the background.
    again, saved = replays(
        tmp_path,
        Stepping([1, 2], [1, 3]),
        done=6,
        settle=lambda: small_checkpoint.write(tmp_path, 7),
    )
    assert saved.agreed == 4
    with pytest.raises(RunAgain) as caught:
        again(7, STATE, {})
    message = str(caught.value)
    assert (
        "step 8 was computed twice with different results: state.w on device 1 on host b" in message
    )
    assert "the checkpoints after step 4, the last one computed twice with equal" in message
    assert "are in suspect/: resume with --resume latest; if this device is named" in message
    assert pointer.steps(tmp_path / "checkpoints") == [2, 4]
    assert pointer.steps(tmp_path / "suspect/checkpoints") == [6, 7]
    assert pointer.steps(tmp_path / "suspect/best") == [6]
    assert "step 8 was computed twice" in (tmp_path / "suspect/checkpoints/6.txt").read_text()
    assert resume.choose("latest", tmp_path, tmp_path) == tmp_path / "checkpoints/4.json"


def test_no_launcher_resumes_from_a_checkpoint_that_cannot_be_moved(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 2)
    (tmp_path / "suspect").write_text("in the way")
    one, _ = replays(tmp_path, Stepping([1, 2], [1, 3]))
    with pytest.raises(InputError, match=r"a checkpoint after step 0, .* cannot be moved to susp"):
        one(3, STATE, {})
    one, _ = replays(tmp_path / "other", Stepping([1, 2], [1, 3]), mirror=Copy("no route to host"))
    with pytest.raises(InputError, match=r"cannot be moved to suspect/ \(no route to host\)"):
        one(3, STATE, {})


def test_the_copy_in_a_bucket_is_told(tmp_path: Path) -> None:
    copy = Copy()
    one, _ = replays(tmp_path, Stepping([1, 2], [1, 3]), done=4, mirror=copy)
    with pytest.raises(RunAgain, match=r"after step 4, .* are in suspect/: resume"):
        one(7, STATE, {})
    assert copy.moved == [4]


def test_after_a_rollback_later_steps_no_longer_count(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path, 3)
    one, saved = replays(tmp_path, Stepping([1, 2], [1, 2], [1, 2], [5, 6]))
    one(3, STATE, {})
    one.rewound(Position(done=2))
    assert saved.agreed == recorded(tmp_path) == 2  # nor for a start after that
    with pytest.raises(
        RunAgain, match=r"state\.w on 2 devices, so it is unknown which one is wrong;"
    ):
        one(5, STATE, {})
    with pytest.raises(InputError, match=r"no checkpoint .* is intact \(all are in suspect/"):
        resume.choose("latest", tmp_path, tmp_path)


def test_the_state_at_the_first_start_with_checks_counts_as_right(tmp_path: Path) -> None:
    replays(tmp_path, Stepping(), done=9)
    assert recorded(tmp_path) == 9
    replays(tmp_path, Stepping(), done=12)  # ended before its first check
    assert recorded(tmp_path) == 9


def test_a_record_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = replays(tmp_path, Stepping([1, 2], [1, 2]))

    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxtrain.training.run_progress.write_whole", full)
    one(3, STATE, {})
    assert "progress.json cannot be written (No space left" in capsys.readouterr().out
    assert recorded(tmp_path) == 0  # the older step stays


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
    assert "on device 1 (cpu) of process 0 on host broken-host; the state is" in wrong.stderr
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
    planted = re.search(r"wrong is (\d+);", text)
    assert planted, text
    where = f"device {planted[1]} (cpu) of process 1 on host broken-host; the state is discarded"
    assert text.count(where) == 2, text  # in the message of each process
    assert pointer.steps(tmp_path / "faulty/checkpoints") == [2]
    assert pointer.steps(tmp_path / "faulty/suspect/checkpoints") == [3]
    codes, text = ended("faulty", "--resume", "latest")
    assert codes == {0}, text
    assert "step 2 of 6" in text
    assert losses(tmp_path / "faulty") == losses(tmp_path / "undisturbed")


@pytest.mark.long
def test_two_hundred_flips(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts how many are found, and attributed, by kind; prints a table."""
    rng = np.random.default_rng(1)
    table: collections.Counter[tuple[str, str]] = collections.Counter()
    for number in range(200):
        one = faulty(*[("params", 2, 4, 1), ("none", 1, 8, 1), ("optimizer", 2, 4, 2)][number % 3])
        kind = number // 3 % 3
        device, element = int(rng.integers(8)), int(rng.integers(1 << 30))
        array = int(rng.integers(len(one.stepper.definition.params))) if kind else 0
        difference = one.found(batch_of(one), (kind, array, device, element, int(rng.integers(32))))
        table[KINDS[kind], "planted"] += 1
        table[KINDS[kind], "found"] += difference is not None
        devices = difference.devices if difference else ()
        table[KINDS[kind], "attributed"] += devices == (device,)
        table[KINDS[kind], "unknown"] += len(devices) > 1
    with capsys.disabled():
        for kind in KINDS:
            counts = ("planted", "found", "attributed", "unknown")
            print(kind, [table[kind, what] for what in counts])
    for kind in KINDS:
        assert table[kind, "found"] == table[kind, "planted"]
        assert table[kind, "found"] == table[kind, "attributed"] + table[kind, "unknown"]
    assert table["results", "attributed"] == table["results", "planted"]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_no_false_alarm_in_twenty_thousand_steps() -> None:
    """Each is computed twice, from the state after the one before, on new examples."""
    one = faulty("optimizer", 1, 2, 2)
    state, none = one.state(), np.full(5, -1, np.int32)
    batches = [
        jax.device_put(
            toy.random_batch(one.stepper.spec, seed), batch_sharding(one.stepper.rule.mesh)
        )
        for seed in range(20)
    ]
    for number in range(20_000):
        state, _, found = twice(lambda *given: one.step(*given, none), state, batches[number % 20])
        assert found is None, number
    assert int(state.step) == 20_000
