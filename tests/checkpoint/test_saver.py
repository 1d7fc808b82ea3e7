"""Tests saving, retaining, finding and restoring, with one process and eight virtual devices."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_state import make_state, mesh_of, meta_of, save, sharding, target_of

from jaxtrain.checkpoint import layout, manifest
from jaxtrain.checkpoint.restore import named, restore
from jaxtrain.checkpoint.saver import Checkpoints, SaveFailed
from jaxtrain.errors import InputError, RunAgain


def same(left: Any, right: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (left, right)]
    assert structures[0] == structures[1]
    for name, one in named(left).items():
        other = named(right)[name]
        assert one.dtype == other.dtype, name
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def saver(run: Path) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(run / "checkpoints", 2)
    yield checkpoints
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a run with checkpoints 4 and 9 and best 4, for tests that only read or copy it."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory / "checkpoints", 2)
    save(checkpoints, 4, 9)
    checkpoints.save_best(make_state(4), meta_of(4))
    checkpoints.close()
    return directory


@pytest.mark.parametrize("devices", [8, 4, 1])
def test_restores_bit_for_bit_on_another_mesh(saved: Path, devices: int) -> None:
    state, mesh = make_state(9), mesh_of(devices)
    restored = restore(saved / "checkpoints" / "9", target_of(state, mesh))
    same(restored, state)
    for name, leaf in named(restored).items():
        assert leaf.sharding == sharding(leaf, mesh), name
    kernel = restored.params["encoder.0.kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // devices, 8)
    assert restored.extras == {}
    assert layout.read_meta(saved / "checkpoints" / "9") == meta_of(9)


def test_special_bits_survive(saver: Checkpoints) -> None:
    odd = np.array([np.nan, -0.0, np.inf, 1e-45, 0, 1, 2, 3], np.float32)
    odd.view(np.uint32)[0] |= 0x1234  # a NaN with a payload
    state = make_state(1)
    params = {
        "odd": jnp.asarray(odd),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "none": jnp.zeros(8, jnp.int32),
    }
    state = dataclasses.replace(
        state, params=jax.device_put(params, sharding(params["odd"], mesh_of(8)))
    )
    saver.save(state, meta_of(1))
    saver.wait()
    latest = saver.latest()
    assert latest is not None
    same(restore(latest, target_of(state, mesh_of(4))), state)


def test_the_next_step_does_not_change_a_save_in_progress(saver: Checkpoints) -> None:
    state = make_state(1, big=1 << 20)
    before = jax.tree.map(np.array, state)
    overwrite = jax.jit(
        lambda s: dataclasses.replace(s, params=jax.tree.map(lambda x: x * 0 - 7.0, s.params)),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    compiled = overwrite.lower(state).compile()
    saver.save(state, meta_of(1))
    # On the CPU the saver's host copy is the buffer itself, and the runtime then copies instead of
    # donating; on a GPU the buffer is overwritten. Either way the saved bits are the old ones.
    jax.block_until_ready(compiled(state))
    saver.wait()
    latest = saver.latest()
    assert latest is not None
    same(restore(latest, target_of(before, mesh_of(8))), before)


def test_restores_a_subset(saved: Path) -> None:
    state = make_state(9)
    only_params = {"params": target_of(state, mesh_of(4)).params}
    restored = restore(saved / "checkpoints" / "9", only_params, subset=True)
    same(restored, {"params": state.params})
    with pytest.raises(InputError, match="only in the checkpoint"):
        restore(saved / "checkpoints" / "9", only_params)


def test_a_different_shape_is_reported_before_anything_is_read(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "9"
    shutil.copytree(saved / "checkpoints" / "9", path)
    for data in (path / "state" / "d").iterdir():
        data.write_bytes(bytes(data.stat().st_size))  # reading an array would fail now
    with pytest.raises(InputError) as caught:
        restore(path, target_of(make_state(9, width=4), mesh_of(8)), verified=True)
    message = str(caught.value)
    assert (
        "params.encoder.0.kernel is float32 [16, 8] in the checkpoint and float32 [16, 4] in this "
        "run" in message
    )
    assert "more" in message
    assert "\n" not in message
    one = {"step": target_of(make_state(9), mesh_of(1)).step}
    with pytest.raises(InputError, match=r"cannot be read .*resume from another checkpoint"):
        restore(path, one, subset=True, verified=True)
    with pytest.raises(
        InputError, match=r"is damaged .*checksum is wrong\): resume from another checkpoint"
    ):
        restore(path, one, subset=True)


def test_a_different_dtype_is_not_cast(saved: Path) -> None:
    target = target_of(make_state(9), mesh_of(1))
    bias = target.params["encoder.0.bias"]
    target.params["encoder.0.bias"] = jax.ShapeDtypeStruct(
        bias.shape, jnp.bfloat16, sharding=bias.sharding
    )
    with pytest.raises(InputError, match=r"encoder\.0\.bias is float32 \[8\].*bfloat16 \[8\]"):
        restore(saved / "checkpoints" / "9", target)


def test_keeps_the_newest_and_one_best(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 2)
    for step in (2, 4, 6):
        checkpoints.save(make_state(step), meta_of(step))
        if step < 6:  # the best are 2, then 4; 6 is worse
            checkpoints.save_best(make_state(step), meta_of(step))
    checkpoints.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]
    assert [path.name for path in (run / "best").iterdir()] == ["4"]
    assert layout.latest_in(run / "checkpoints") == run / "checkpoints" / "6"


def test_the_best_checkpoint_is_written_once(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 1)
    for step in (2, 4, 6):
        checkpoints.save(make_state(step), meta_of(step), best=step < 6)
        if step == 4:
            checkpoints.wait()
            names = [(run / folder / "4" / "state/_METADATA") for folder in ("checkpoints", "best")]
            assert names[0].samefile(names[1])
    checkpoints.close()
    assert layout.steps(run / "checkpoints") == [6]
    assert layout.steps(run / "best") == [4]  # it survives the deletion of its other link
    state = make_state(4)
    restored = restore(run / "best" / "4", target_of(state, mesh_of(1)))
    np.testing.assert_array_equal(
        restored.params["encoder.0.kernel"], state.params["encoder.0.kernel"]
    )


def test_a_later_best_is_superseded_too(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints", 2)
    checkpoints.save(make_state(8), meta_of(8), best=True)
    checkpoints.close()
    resumed = Checkpoints(run / "checkpoints", 2, lambda line: None)
    resumed.save(make_state(6), meta_of(6), best=True)
    resumed.close()
    assert layout.steps(run / "best") == [6]
    assert layout.is_complete(run / "superseded" / "best" / "8")


def test_the_same_step_twice_is_one_save(saver: Checkpoints, run: Path) -> None:
    save(saver, 5)
    before = (run / "checkpoints" / "5" / "_CHECKPOINT_METADATA").read_text()
    save(saver, 5)
    assert (run / "checkpoints" / "5" / "_CHECKPOINT_METADATA").read_text() == before


def test_a_resume_from_an_earlier_step_supersedes_the_later_ones(
    saver: Checkpoints, run: Path
) -> None:
    save(saver, 4, 8)
    said: list[str] = []
    resumed = Checkpoints(run / "checkpoints", 2, said.append)
    assert layout.steps(run / "checkpoints") == [4, 8]  # nothing moves before the next save
    resumed.save(make_state(6), meta_of(6))
    resumed.close()
    assert layout.steps(run / "checkpoints") == [4, 6]
    assert resumed.latest() == run / "checkpoints" / "6"
    assert layout.is_complete(run / "superseded" / "checkpoints" / "8")
    assert len(said) == 1
    assert "superseded" in said[0]


def test_step_and_meta_must_agree(saver: Checkpoints) -> None:
    with pytest.raises(ValueError, match="meta says step 4, the state says 5"):
        saver.save(make_state(5), meta_of(4))


def test_nothing_is_written_below_the_mount_point_of_a_lost_disk(
    saver: Checkpoints, run: Path
) -> None:
    """The mount point is a folder of the parent disk."""
    folder, away = run / "checkpoints", run / "away"
    save(saver, 2)
    folder.rename(away)
    folder.mkdir()
    with pytest.raises(SaveFailed, match=r"checkpoints is not the same folder as before\)"):
        saver.save(make_state(4), meta_of(4))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    away.rename(folder)
    save(saver, 4)
    assert layout.steps(folder) == [2, 4]


FULL_DISK = """
import dataclasses, functools, resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxtrain.checkpoint.saver import Checkpoints, SaveFailed

@functools.partial(jax.tree_util.register_dataclass, data_fields=("step", "big"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    big: jax.Array

def save(step):
    big = jax.random.normal(jax.random.key(0), (1 << 18,))
    checkpoints.save(State(jnp.uint32(step), big), {"step": step})

folder = Path(sys.argv[1])
names = lambda: print(sorted(path.name for path in folder.iterdir()))
checkpoints = Checkpoints(folder, 1, lambda line: print("said:", line))
save(2)
checkpoints.wait()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # a write beyond 64 KiB fails
save(4)
try:
    checkpoints.wait()
except SaveFailed as error:
    print(error)
names()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
checkpoints.wait()  # reported once
save(4)
checkpoints.close()
names()
"""


GONE = """
import sys
from pathlib import Path
import jax, small_state
from jaxtrain.checkpoint.saver import Checkpoints, SaveFailed

jax.config.update("jax_num_cpu_devices", 8)
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, 1, print)
small_state.save(checkpoints, 2)
begin = checkpoints._checkpointer.save

def begin_without(*args, **more):
    folder.rename(folder.with_name("away"))
    folder.write_text("nothing can be made below a file")
    begin(*args, **more)

checkpoints._checkpointer.save = begin_without
try:
    small_state.save(checkpoints, 4)
except SaveFailed:
    print("failed")
folder.unlink()
"""


def test_a_folder_that_cannot_be_created_blocks_nothing(run: Path, checkout: Path) -> None:
    """Neither the save nor the exit, although Orbax's threads would wait 300 s for the folder."""
    folder = run / "checkpoints"
    ended = subprocess.run(
        [sys.executable, "-c", GONE, str(folder)],
        env=os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said, last = ended.stdout.splitlines()
    assert said.startswith(f"warning: checkpoint {folder / '4'} could not be written (")
    assert f"the newest complete one is {folder / '2'}" in said
    assert last == "failed"
    assert manifest.verify(run / "away" / "2") == ""


OWN_DISKS = """
import asyncio, sys
from pathlib import Path
import jax

address, process, folder = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, int(process))

import small_state
from jaxtrain.checkpoint import manifest, orbax_compat
from jaxtrain.checkpoint.saver import Checkpoints

base = orbax_compat.TemporaryPath.__mro__[1]
create = base.create

async def create_late(self):
    if process == "1" and self.get_final().name == "4":
        await asyncio.sleep(1)
    return await create(self)

base.create = create_late
checkpoints = Checkpoints(Path(folder), 2, own_disk=True)
state = small_state.make_state(4, mesh=small_state.mesh_of(2))
checkpoints.save(state, small_state.meta_of(4))
checkpoints.wait()
checkpoints.close()
"""


def test_a_slow_disk_of_one_process_does_not_disturb_its_save(
    tmp_path: Path, checkout: Path
) -> None:
    """It must not write before its own folder exists, although another process has created its."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OWN_DISKS, address, str(process), str(tmp_path / str(process))],
            env=kept | {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert [manifest.verify(tmp_path / name / "4") for name in ("0", "1")] == ["", ""]


def test_a_full_disk_is_reported_and_keeps_the_older_checkpoint(run: Path) -> None:
    folder = run / "checkpoints"
    ended = subprocess.run(  # separate, as leftovers of Orbax after a failure disturb other tests
        [sys.executable, "-c", FULL_DISK, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said, error, after_failure, after_next = ended.stdout.splitlines()  # the error is one line
    assert said == f"said: warning: {error}"
    assert f"checkpoint {folder / '4'} could not be written (" in error
    assert "File too large" in error
    assert f"the newest complete one is {folder / '2'}" in error
    assert after_failure == "['2']"  # and no partial one
    assert after_next == "['4']"  # the next save works, including the failed step
    assert "ERROR:absl" not in ended.stderr
    assert issubclass(SaveFailed, RunAgain)


def test_a_checkpoint_that_was_not_committed_is_incomplete(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoints" / "9", tmp_path / "9")
    marker = tmp_path / "9" / "_CHECKPOINT_METADATA"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"commit_timestamp_nsecs": None}))
    assert not layout.is_complete(tmp_path / "9")


def test_leftovers_are_removed(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for name in ("12.orbax-checkpoint-tmp", "3.deleted", "mine"):
        (run / "checkpoints" / name / "state").mkdir(parents=True)
    Checkpoints(run / "checkpoints", 1).close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "9", "mine"]
