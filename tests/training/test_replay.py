"""Steps that are computed twice: flipped bits are found, and the device is named."""

import collections
import dataclasses
import errno
import functools
import os
import re
import subprocess
import sys
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec
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
from jaxtrain.checkpoint import layout, resume
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.optim import build as optim
from jaxtrain.sharding import AXES, batch_sharding
from jaxtrain.training import loop, preflight, replay, skip_step
from jaxtrain.training.replay import Difference, Probe, Replay, compare
from jaxtrain.training.step import build_train_step, jit_train_step

KINDS = ("activations", "gradients", "results")


class Planting(Probe):
    """Flips one bit of a value on one device, inside the compiled step, if its input says so."""

    counted: collections.Counter[str]
    fault: Any  # int32: kind, number of the value, device, element, bit

    def seen(self, what: str, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        number = len(self.names) if what == "activations" else self.counted[what]
        self.counted[what] += 1
        fault = self.fault
        on = (fault[0] == KINDS.index(what)) & (fault[1] == number)

        def local(part: jax.Array, on: jax.Array, fault: jax.Array) -> jax.Array:
            place = jax.lax.axis_index(AXES[0]) * jax.lax.axis_size(AXES[1])
            here = on & (place + jax.lax.axis_index(AXES[1]) == fault[2])
            kind = jnp.dtype(f"uint{8 * part.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(part.reshape(-1), kind)
            flip = (jnp.ones((), kind) << fault[4].astype(kind)) * here.astype(kind)
            # Not at[].set(): XLA may compute that element a second time, with other rounding.
            bits ^= flip * (jnp.arange(bits.size) == fault[3] % bits.size).astype(kind)
            return jax.lax.bitcast_convert_type(bits, part.dtype).reshape(part.shape)

        whole = PartitionSpec()
        wrong = jax.shard_map(
            local, mesh=self.mesh, in_specs=(spec, whole, whole), out_specs=spec, check_vma=False
        )
        return wrong(value, on, fault)


class Replayed(NamedTuple):
    """A compiled step with a place for a fault, and what its checksums are of."""

    stepper: toy.Stepper
    step: Any
    names: list[str]
    copies: dict[int, list[list[int]]]
    counts: tuple[int, int, int]  # of values by kind

    def checks(self, batch: Any, fault: tuple[int, ...] = (-1, 0, 0, 0, 0)) -> np.ndarray:
        return np.asarray(self(self.stepper.state, batch, fault)[2])

    def __call__(self, state: Any, batch: Any, fault: tuple[int, ...]) -> Any:
        return self.step(state, batch, np.asarray(fault, np.int32))


@functools.cache
def replayed(shard: str = "params", data: int = 2, fsdp: int = 4, accumulate: int = 1) -> Replayed:
    model = toy.Config()
    how: Any = {"data": data, "fsdp": fsdp, "shard": shard, "accumulate": accumulate}
    stepper = toy.stepper(model, **how)
    probe = Planting(stepper.rule.mesh)
    probe.counted = collections.Counter()
    definition = stepper.definition
    step = build_train_step(
        definition,
        optim.make_optimizer(toy.OPTIM, 100, definition.trained(definition.params)),
        optim.schedule(toy.OPTIM, 100),
        stepper.rule,
        skip_step.detector(toy.OPTIM),
        precision="float32",
        accumulate=accumulate,
        seed=1,
        probe=probe,
    )

    def planted(state: Any, batch: Any, fault: jax.Array) -> Any:
        probe.fault = fault
        return step(state, batch)

    where = jax.tree.map(lambda leaf: leaf.sharding, stepper.target)
    whole = jax.sharding.NamedSharding(stepper.rule.mesh, PartitionSpec())
    jitted = jax.jit(
        planted,
        in_shardings=(where, batch_sharding(stepper.rule.mesh), whole),
        out_shardings=(where, whole, whole),
    )
    fault = jax.ShapeDtypeStruct((5,), jnp.int32)
    traced = jitted.trace(stepper.target, stepper.spec, fault)
    _, metrics, checks = traced.out_info
    names, copies = replay.rows_of(probe, metrics, stepper.target, checks.shape[0])
    counts = len(probe.names), probe.counted["gradients"], probe.counted["results"] - len(metrics)
    return Replayed(stepper, traced.lower().compile(), names, copies, counts)


def batch_of(one: Replayed) -> Any:
    return jax.device_put(toy.random_batch(one.stepper.spec), batch_sharding(one.stepper.rule.mesh))


def found(one: Replayed, batch: Any, fault: tuple[int, ...]) -> Difference | None:
    """Compares a computation with the fault to one without it."""
    return compare(one.checks(batch, fault), one.checks(batch), one.names, one.copies)


@pytest.mark.parametrize(
    "how", [{}, {"shard": "none"}, {"shard": "optimizer", "accumulate": 2}], ids=str
)
def test_a_flipped_bit_is_attributed_to_its_device(how: Any) -> None:
    one = replayed(**how)
    batch = batch_of(one)
    assert one.counts[0] > 4
    assert compare(one.checks(batch), one.checks(batch), one.names, one.copies) is None
    rng = np.random.default_rng(0)
    for kind, count in enumerate(one.counts):
        for number in {0, count // 2, count - 1}:
            device, element = int(rng.integers(8)), int(rng.integers(1 << 20))
            difference = found(one, batch, (kind, number, device, element, 20))
            assert difference is not None, (KINDS[kind], number)
            assert difference.devices == (device,), (KINDS[kind], number, difference)


def test_a_wrong_copy_of_an_array_is_attributed() -> None:
    """A bit that flipped in memory between two replays: both computations start from it."""
    one = replayed("none")
    batch = batch_of(one)
    name = "blocks.0.down.bias"
    array = one.stepper.state.params[name]
    parts = [shard.data for shard in array.addressable_shards]
    bits = np.asarray(parts[5]).view(np.uint32).copy()
    bits[3] ^= 1 << 22
    parts[5] = jax.device_put(bits.view(np.float32), parts[5].device)
    wrong = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    params = one.stepper.state.params | {name: wrong}
    state = dataclasses.replace(one.stepper.state, params=params)
    checks = np.asarray(one(state, batch, (-1, 0, 0, 0, 0))[2])
    assert compare(checks, checks, one.names, one.copies) == Difference(
        f"copies of the new params.{name}", (5,)
    )


def test_the_step_computes_the_same_with_checksums() -> None:
    one = replayed()
    batch = batch_of(one)
    mesh = one.stepper.rule.mesh
    plain = jit_train_step(one.stepper.step, one.stepper.target, mesh, donate=False)
    expected, _ = plain(one.stepper.state, batch)
    following = one(one.stepper.state, batch, (-1, 0, 0, 0, 0))[0]
    for name, array in expected.params.items():
        np.testing.assert_allclose(
            np.asarray(following.params[name]), np.asarray(array), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_any_flipped_bit_changes_the_checksum_of_its_device(dtype: str) -> None:
    mesh, rng = toy.mesh_of(2, 2), np.random.default_rng(0)
    split = PartitionSpec(AXES)

    compiled = jax.jit(lambda array: replay.checksums(array, mesh, split))

    def of(bits: np.ndarray) -> np.ndarray:
        array = jax.device_put(bits.view(jnp.dtype(dtype)), jax.NamedSharding(mesh, split))
        return np.asarray(compiled(array))

    size = jnp.dtype(dtype).itemsize
    values = rng.integers(2 if dtype == "bool" else 1 << 8 * size, size=(8, 3))
    bits = values.astype(f"uint{8 * size}")
    for bit in range(1 if dtype == "bool" else 8 * size):
        wrong, row = bits.copy(), int(rng.integers(8))
        wrong[row, 1] ^= wrong.dtype.type(1 << bit)
        assert np.flatnonzero(of(wrong) != of(bits)).tolist() == [row // 2], bit


@jax.custom_jvp
def with_own_derivative(x: jax.Array) -> jax.Array:
    return x + 1


with_own_derivative.defjvps(lambda change, result, x: change)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("dot_general", lambda x: x @ x.T),
        ("conv_general_dilated", lambda x: jax.lax.conv(x[:, None], x[:2, None, :2], (1,), "SAME")),
        ("scan", lambda x: jax.lax.scan(lambda y, _: (y * y, None), x, None, 2)[0]),
        ("while", lambda x: jax.lax.while_loop(lambda y: y[0, 0] > 2, lambda y: y * 0.5, x)),
        ("cond", lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)),
        ("jit", jax.jit(lambda x: x + 1)),
        ("remat|checkpoint", jax.checkpoint(lambda x: x + 1)),
        ("custom_jvp_call", with_own_derivative),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_results_of_these_operations_are_checksummed(kind: str, function: Any) -> None:
    probe = Probe(toy.mesh_of(1, 8))
    x = jnp.ones((8, 4))
    jax.jit(lambda x: probe.function(function, x, 8)).trace(x)
    assert re.search(kind, " ".join(probe.names)), probe.names
    jax.jit(lambda x: probe.function(function, x, 7)).trace(x)
    assert probe.names == []  # not split by example


def test_constants_are_not_checksummed() -> None:
    """XLA would compute their checksums when it compiles, for minutes in larger models."""
    probe = Probe(toy.mesh_of(1, 8))
    inner = jax.jit(lambda x, fill: (x + fill, jnp.full(x.shape, fill), jnp.zeros((8, 4)), x))
    x = jnp.ones((8, 4))
    jax.jit(lambda x: probe.function(lambda x: inner(x, 2.0), x, 8)).trace(x)
    assert len(probe.names) == 2
    jax.jit(lambda x: probe.function(lambda x: inner(x, x[0, 0]), x, 8)).trace(x)
    assert len(probe.names) == 3


def test_without_a_majority_all_devices_with_copies_are_named() -> None:
    checks = np.asarray([[1, 2, 7, 7], [1, 1, 7, 6]], np.uint32)
    names = ["first", "second"]
    assert compare(checks, checks, names, {0: [[0, 1], [2, 3]]}) == Difference(
        "copies of first", (0, 1)
    )
    assert compare(checks, checks, names, {1: [[0, 1], [2, 3]]}) == Difference(
        "copies of second", (2, 3)
    )


class Stepping:
    """Returns prepared checksums, as a step does."""

    def __init__(self, *checks: list[int]) -> None:
        self.checks = [np.asarray([row], np.uint32) for row in checks]

    def __call__(self, state: Any, batch: Any) -> Any:
        return "state", "metrics", self.checks.pop(0)


def replays(directory: Path, step: Any, done: int = 0, mirror: Any = None) -> Replay:
    names = ["device 0 on host a", "device 1 on host b"]
    how = (directory, done, lambda: None, lambda text: None, mirror)
    return Replay(step, ["gradients"], {}, names, *how)


def test_a_difference_moves_uncertified_checkpoints_aside(tmp_path: Path) -> None:
    for folder in ("checkpoints/2", "checkpoints/4", "checkpoints/6", "best/6", "best/3"):
        (tmp_path / folder).mkdir(parents=True)
    certifies = replays(tmp_path, Stepping([1, 2], [1, 2]), done=0)
    assert certifies(3, None, None) == ("state", "metrics")
    # A later start remembers it.
    again = replays(tmp_path, Stepping([1, 2], [1, 3]), done=6)
    message = (
        r"step 8 .* gradients on device 1 on host b; the state is discarded, checkpoints after "
        r"step 4 are in uncertified/: resume with --resume latest, which uses the newest "
        r"checkpoint up to step 4, the last certified one; if this device is named again, .*"
    )
    saving = tmp_path / "checkpoints/7"  # by a save in the background, for which it waits
    again._settle = saving.mkdir
    with pytest.raises(RunAgain, match=message):
        again(7, None, None)
    assert (tmp_path / "uncertified/checkpoints/7/reason.txt").exists()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/[0-9]*"))
    assert left == ["best/3", "checkpoints/2", "checkpoints/4"]
    reason = (tmp_path / "uncertified/checkpoints/6/reason.txt").read_text()
    assert "step 8 was computed twice with different results" in reason
    assert (tmp_path / "uncertified/best/6/reason.txt").exists()


def test_no_launcher_resumes_from_a_checkpoint_that_cannot_be_moved(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/2").mkdir(parents=True)
    (tmp_path / "uncertified").write_text("in the way")
    one = replays(tmp_path, Stepping([1, 2], [1, 3]))
    with pytest.raises(InputError, match=r"checkpoints/2 cannot be moved .* after step 0, which"):
        one(3, None, None)


def test_after_a_rollback_later_steps_are_no_longer_certified(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/3").mkdir(parents=True)
    one = replays(tmp_path, Stepping([1, 2], [1, 2], [1, 2], [5, 6]))
    one(3, None, None)
    one.rewound(Position(done=2))
    # A start after that does not certify them either.
    assert layout.certified_step(tmp_path) == 2
    with pytest.raises(RunAgain) as caught:
        one(5, None, None)
    assert str(caught.value).endswith(
        "gradients on all devices alike, so the device is unknown; the state is discarded, "
        "checkpoints after step 2 are in uncertified/: there is none up to step 2, the last "
        "certified one, so start again with another --output-dir"
    )
    assert not (tmp_path / "checkpoints/3").exists()
    # And that start is never from scratch.
    with pytest.raises(InputError, match=r"intact \(all are in uncertified; .*more than 2 steps"):
        resume.choose("latest", tmp_path, tmp_path, max_lost_steps=2)


def test_a_rollback_of_the_loop_reaches_the_replay() -> None:
    setup, position = unittest.mock.MagicMock(), Position(done=2)
    setup.rollback.return_value = ("restored", position)
    assert loop._roll_back(setup, "state") == "restored"  # type: ignore[arg-type]
    setup.replay.rewound.assert_called_once_with(position)


def test_the_state_at_the_first_start_with_checks_counts_as_right(tmp_path: Path) -> None:
    """Also if the run had been checked before, with a start without checks in between."""
    replays(tmp_path, Stepping([1, 2], [1, 2]))(3, None, None)
    replay.forget(tmp_path)
    replays(tmp_path, Stepping(), done=9)
    assert layout.certified_step(tmp_path) == 9
    replays(tmp_path, Stepping(), done=12)  # ended before its first check
    assert layout.certified_step(tmp_path) == 9


def test_a_run_without_checks_forgets_those_of_an_earlier_start(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(tmp_path)
    assert corpus.exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/certified.txt").write_text("3\n")
    data = ("--data.path", "corpus", "--loop.steps", 1)
    train(tmp_path, *TINY_MLM, *data, "--output-dir", "run")
    assert layout.certified_step(tmp_path / "run") is None


def test_a_certified_step_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replays(tmp_path, Stepping([1, 2], [1, 2]))

    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(replay, "write_whole", full)
    assert one(3, None, None) == ("state", "metrics")  # the older step stays certified
    assert layout.certified_step(tmp_path) == 0
    with pytest.raises(RunAgain, match=r"certified.txt cannot be written \(No space left"):
        one.rewound(Position(done=2))


def test_gpus_need_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load("demo_mlm", ["--loop.replay_every", "4"])
    assert list(preflight._replay(run)) == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    (problem,) = preflight._replay(run)
    assert "add --deterministic True" in problem
    assert list(preflight._replay(dataclasses.replace(run, deterministic=True))) == []
    with pytest.raises(InputError, match="add --deterministic True"):
        preflight.check(run, resumes=False)


class Copy:
    """Stands for the copy of a run in a bucket."""

    url, own_disk = "s3://bucket/run", True

    def __init__(self, problem: str = "") -> None:
        self.problem, self.moved = problem, list[int]()

    def set_aside_after(self, step: int) -> str:
        self.moved.append(step)
        return self.problem


def test_a_difference_moves_uncertified_checkpoints_in_the_bucket(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    (tmp_path / "checkpoints/6").mkdir()
    copy: Any = Copy()
    one = replays(tmp_path, Stepping([1, 2], [1, 3]), done=4, mirror=copy)
    with pytest.raises(RunAgain, match=r"checkpoints after step 4 are in uncertified/: resume"):
        one(7, None, None)
    assert copy.moved == [4]
    copy = Copy("no route to host")
    one = replays(tmp_path, Stepping([1, 2], [1, 3]), done=4, mirror=copy)
    message = r"a checkpoint in s3://bucket/run \(no route to host\) cannot be moved to uncert"
    with pytest.raises(InputError, match=message):
        one(7, None, None)


def test_each_disk_keeps_what_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 of a run in a bucket, which saves its shards on a disk of its own."""
    (tmp_path / "checkpoints/6").mkdir(parents=True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    copy: Any = Copy()
    steps = Stepping([1, 2], [1, 2], [1, 2], [1, 3])
    one = replays(tmp_path, steps, done=2, mirror=copy)
    assert layout.certified_step(tmp_path) == 2
    one(3, None, None)
    assert layout.certified_step(tmp_path) == 4
    one.rewound(Position(done=3))
    assert layout.certified_step(tmp_path) == 3
    decided: list[str] = []
    monkeypatch.setattr(
        replay.process_group, "process_zero_decides", lambda one: decided.append("") or ""
    )
    with pytest.raises(RunAgain):
        one(5, None, None)
    assert decided == [""]
    assert (tmp_path / "uncertified/checkpoints/6").exists()


LENGTH = ("--data.path", "corpus", "--loop.steps", 6, "--checkpoint.every", 1)
CHECKED = (*TINY_MLM, *LENGTH, "--checkpoint.keep", 1, "--loop.replay_every", 2)


@pytest.mark.long
def test_a_run_returns_to_the_certified_checkpoint(tmp_path: Path) -> None:
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
    kept = sorted(path.name for path in (tmp_path / "faulty/checkpoints").iterdir())
    assert kept == ["2"]
    assert (tmp_path / "faulty/uncertified/checkpoints/3/reason.txt").exists()
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
    kept = [path.name for path in (tmp_path / "faulty/checkpoints").iterdir()]
    moved = [path.name for path in (tmp_path / "faulty/uncertified/checkpoints").iterdir()]
    assert (kept, moved) == (["2"], ["3"])
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
        one = replayed(
            *[("params", 2, 4, 1), ("none", 1, 8, 1), ("optimizer", 2, 4, 2)][number % 3]
        )
        batch = batch_of(one)
        kind = number // 3 % 3
        device, element = int(rng.integers(8)), int(rng.integers(1 << 30))
        value, bit = int(rng.integers(one.counts[kind])), int(rng.integers(32))
        difference = found(one, batch, (kind, value, device, element, bit))
        table[KINDS[kind], "planted"] += 1
        table[KINDS[kind], "found"] += difference is not None
        table[KINDS[kind], "attributed"] += difference is not None and difference.devices == (
            device,
        )
    with capsys.disabled():
        for kind in KINDS:
            print(kind, [table[kind, what] for what in ("planted", "found", "attributed")])
    for kind in KINDS:
        assert table[kind, "found"] == table[kind, "planted"] == table[kind, "attributed"]


@pytest.mark.long
def test_no_false_alarm_in_twenty_thousand_steps() -> None:
    """Each is computed twice, from the state after the one before, on new examples."""
    one = replayed("optimizer", 1, 2, 2)
    state, none = one.stepper.state, (-1, 0, 0, 0, 0)
    batches = [
        jax.device_put(
            toy.random_batch(one.stepper.spec, seed), batch_sharding(one.stepper.rule.mesh)
        )
        for seed in range(20)
    ]
    for number in range(20_000):
        batch = batches[number % 20]
        first = np.asarray(one(state, batch, none)[2])
        state, _, second = one(state, batch, none)
        assert compare(first, np.asarray(second), one.names, one.copies) is None, number
    assert int(state.step) == 20_000
