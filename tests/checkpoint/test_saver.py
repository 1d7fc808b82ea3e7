"""Tests saving, retaining, finding and restoring, with one process and eight virtual devices."""

import dataclasses
import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint import small_checkpoint
from checkpoint.small_state import make_state, mesh_of, meta_of, save, sharding, target_of
from obstore.store import MemoryStore
from program import arrays_of

from jaxtrain.checkpoint import candidates, pointer
from jaxtrain.checkpoint.pointer import FILES
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.restore import named, restore
from jaxtrain.checkpoint.saver import CheckpointSaver, Save, SaveFailed
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.distributed import key_value
from jaxtrain.errors import InputError, RunAgain, Stopped
from jaxtrain.storage import run_marker
from jaxtrain.storage.bucket import Bucket


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
def saver(run: Path) -> Iterator[CheckpointSaver]:
    checkpoints = CheckpointSaver(run, 2)
    yield checkpoints
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a run with checkpoints 4 and 9 and best 4, for tests that only read or copy it."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = CheckpointSaver(directory, 2)
    save(checkpoints, 4, 9)
    checkpoints.save(make_state(4), meta_of(4), ("best",))
    checkpoints.close()
    return directory


@pytest.mark.parametrize("devices", [8, 1])
def test_restores_bit_for_bit_on_another_mesh(saved: Path, devices: int) -> None:
    state, mesh = make_state(9), mesh_of(devices)
    restored = restore(saved / "checkpoints/9.json", target_of(state, mesh))
    same(restored, state)
    for name, leaf in named(restored).items():
        assert leaf.sharding == sharding(leaf, mesh), name
    kernel = restored.params["encoder.0.kernel"]
    assert kernel.addressable_shards[0].data.shape == (16 // devices, 8)
    assert restored.extras == {}
    assert pointer.read_meta(saved / "checkpoints/9.json") == meta_of(9)


def test_the_next_step_does_not_change_a_save_in_progress(
    saver: CheckpointSaver, run: Path
) -> None:
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
    same(restore(run / "checkpoints/1.json", target_of(before, mesh_of(8))), before)


def test_restores_a_subset(saved: Path) -> None:
    state = make_state(9)
    only_params = {"params": target_of(state, mesh_of(4)).params}
    restored = restore(saved / "checkpoints/9.json", only_params, subset=True)
    same(restored, {"params": state.params})
    with pytest.raises(InputError, match="only in the checkpoint"):
        restore(saved / "checkpoints/9.json", only_params)


def test_a_different_shape_is_reported_before_anything_is_read(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run/checkpoints/9.json"
    for data in (pointer.folder_of(path) / "state" / "d").iterdir():
        data.write_bytes(bytes(data.stat().st_size))  # reading an array would fail now
    with pytest.raises(InputError) as caught:
        restore(path, target_of(make_state(9, width=4), mesh_of(8)), verified=True)
    message = str(caught.value)
    assert (
        "params.encoder.0.kernel is float32 [16, 8] in the checkpoint and float32 [16, 4] in this "
        "run" in message
    )
    assert "; and 2 more: use" in message
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
        restore(saved / "checkpoints/9.json", target)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_newest_and_one_best_and_their_files(run: Path) -> None:
    checkpoints = CheckpointSaver(run, 1)
    for step in (2, 4, 6):
        checkpoints.save(
            make_state(step),
            meta_of(step),
            ("checkpoints", "best") if step < 6 else ("checkpoints",),
        )
    checkpoints.close()
    assert names(run / "checkpoints") == ["6.json", "files"]
    assert names(run / "best") == ["4.json"]
    assert [name.partition("-")[0] for name in names(run / FILES)] == ["4", "6"]
    assert pointer.verify(run / "best/4.json") == ""


def test_the_same_state_is_written_once(saver: CheckpointSaver, run: Path) -> None:
    """Also if it turns out later that it is the best one, even after a resume.

    A stop may have interrupted the validation.
    """
    save(saver, 5)
    before = names(run / FILES), (run / "checkpoints/5.json").read_bytes()
    save(saver, 5)
    saver.save(make_state(5), meta_of(5), ("best",))
    saver.wait()
    assert (names(run / FILES), (run / "checkpoints/5.json").read_bytes()) == before
    assert (run / "best/5.json").read_bytes() == before[1]
    saver.close()
    (run / "best/5.json").unlink()
    again = CheckpointSaver(run, 2, resumed=run / "checkpoints/5.json")
    again.save(make_state(5), meta_of(5), ("best",))
    again.close()
    assert (names(run / FILES), (run / "best/5.json").read_bytes()) == before


def test_after_a_rollback_the_same_step_is_another_state(saver: CheckpointSaver, run: Path) -> None:
    save(saver, 4)
    before = (run / "checkpoints/4.json").read_bytes()
    saver.save(make_state(4), meta_of(4) | {"examples_seen": 99})
    saver.wait()
    assert (run / "checkpoints/4.json").read_bytes() != before
    assert pointer.read_meta(run / "checkpoints/4.json")["examples_seen"] == 99
    assert pointer.verify(run / "checkpoints/4.json") == ""
    assert len(names(run / FILES)) == 1


def test_a_kill_before_the_first_save_does_not_undo_a_resume_from_an_earlier_step(
    run: Path, tmp_path: Path
) -> None:
    """Launchers restart with --resume latest."""
    first = CheckpointSaver(run, 3)
    first.save(make_state(4), meta_of(4), ("checkpoints", "best"))
    save(first, 8)
    first.save(make_state(9), meta_of(9), ("best",))
    first.close()
    CheckpointSaver(run, 3, lambda line: None, resumed=run / "checkpoints/8.json").close()
    assert pointer.steps(run / "best") == [9]  # between two regular ones: recomputed
    CheckpointSaver(run, 3, lambda line: None, resumed=run / "checkpoints/4.json").close()
    assert small_checkpoint.choose("latest", run, lambda line: None) == run / "checkpoints/4.json"
    assert small_checkpoint.aside(run) == {8: "superseded", 9: "superseded"}
    (again, best) = sorted((run / "aside").glob("*.json"), key=lambda path: path.name[:2])
    assert pointer.verify(again) == pointer.verify(best) == ""
    CheckpointSaver(run, 3, lambda line: None, resumed=again).close()
    assert small_checkpoint.aside(run) == {9: "superseded"}
    assert small_checkpoint.choose("latest", run, lambda line: None) == run / "checkpoints/8.json"


def test_files_of_the_data_are_saved_and_verified(run: Path) -> None:
    checkpoints = CheckpointSaver(run, 1, lambda line: None, files={"tokenizer.json": b"{}"})
    checkpoints.save(make_state(2), meta_of(2), ("checkpoints", "best"))
    checkpoints.close()
    for path in (run / "checkpoints/2.json", run / "best/2.json"):
        assert (pointer.folder_of(path) / "tokenizer.json").read_bytes() == b"{}"
        assert pointer.verify(path) == ""
    (pointer.folder_of(path) / "tokenizer.json").unlink()
    assert pointer.verify(path) == "tokenizer.json is missing"


def test_the_old_checkpoint_counts_until_the_new_one_of_its_step_is_complete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("checkpoints", "best")
    first = CheckpointSaver(run, 2)
    first.save(make_state(4), meta_of(4), both)
    first.close()
    paths = [run / kind / "4.json" for kind in both]
    before = [path.read_bytes() for path in paths]

    def reachable() -> bool:
        """Whether a process started after a kill at this moment finds a checkpoint."""
        other = run.with_name("killed")
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(run, other)
        found = small_checkpoint.choose("latest", other, lambda line: None)
        return found == other / "checkpoints/4.json" and not pointer.verify(other / "best/4.json")

    written, looked = threading.Event(), threading.Event()

    def full(folder: Path, *more: object) -> None:
        assert (folder / "state" / "_METADATA").exists()
        written.set()
        assert looked.wait(60)
        raise OSError(28, "No space left on device")

    again = CheckpointSaver(run, 2, lambda line: None)
    with monkeypatch.context() as patched:
        patched.setattr(pointer.Pointer, "of_folder", full)
        again.save(make_state(4), meta_of(4), both)
        assert written.wait(60)
        assert reachable()
        looked.set()
        with pytest.raises(SaveFailed, match=r"\(No space left on device\): the newest .* is 4;"):
            again.wait()
    assert [path.read_bytes() for path in paths] == before
    assert len(names(run / FILES)) == 1
    again.save(make_state(4), meta_of(4), both)
    again.close()
    assert [pointer.verify(path) for path in paths] == ["", ""]
    assert paths[0].read_bytes() == paths[1].read_bytes() != before[0]
    assert len(names(run / FILES)) == 1


@pytest.mark.parametrize("which", ["best", "checkpoints"])
def test_a_pointer_that_cannot_be_written_is_a_failed_save(
    saver: CheckpointSaver, run: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """And the other one does not stay without its files."""
    both = ("checkpoints", "best")
    saver.save(make_state(2), meta_of(2), both)
    saver.wait()
    put = saver._store.place.put

    def refuse(name: str, content: bytes) -> None:
        if name.startswith(f"{which}/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(name, content)

    with monkeypatch.context() as patched:
        patched.setattr(saver._store.place, "put", refuse)
        saver.save(make_state(4), meta_of(4), both)
        with pytest.raises(SaveFailed, match="No space left"):
            saver.wait()
    assert [pointer.steps(run / kind) for kind in both] == [[2], [2]]
    assert len(names(run / FILES)) == 1
    saver.save(make_state(4), meta_of(4), both)
    saver.wait()
    assert [pointer.steps(run / kind) for kind in both] == [[2, 4], [4]]


@pytest.mark.parametrize("raises", [False, True])
def test_a_complete_checkpoint_outlives_a_process_that_then_ends(
    saver: CheckpointSaver, run: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """Process 0 has written its pointer. The last vote has no result, or cannot be taken."""
    save(saver, 2)

    def gone(part: str, failure: str) -> str:
        if part == "end" and raises:
            raise RuntimeError("UNAVAILABLE: the coordination service is gone")
        return "process 1 did not answer within 1200 s" if part == "end" else failure

    with monkeypatch.context() as patched:
        patched.setattr(saver._votes, "agree", gone)
        saver.save(make_state(4), meta_of(4))
        why = r"\(RuntimeError: UNAVAI" if raises else "process 1 did not answer"
        with pytest.raises(SaveFailed, match=rf"checkpoint 4 .*{why}"):
            saver.wait()
    assert pointer.verify(run / "checkpoints/4.json") == ""


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on that disk (lower --checkpoint.keep)"),
        (errno.EIO, "bring the disk back"),
        (errno.EACCES, "check that disk, or choose another --output-dir"),
    ],
)
def test_a_failed_save_reports_the_fix_for_its_cause(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(SaveFailed) as caught:
        saver.save(make_state(2), meta_of(2))
    assert str(caught.value).endswith(f"({os.strerror(number)}): none is complete; {cure}")


def test_a_process_that_does_not_answer_is_not_blamed_on_the_disk(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = f"process 3 {key_value.NO_VOTE} 1200 s"
    with monkeypatch.context() as patched:
        patched.setattr(saver._votes, "agree", lambda part, failure: silent)
        with pytest.raises(SaveFailed) as caught:
            saver.save(make_state(2), meta_of(2))
    assert str(caught.value).endswith(f"({silent}): none is complete; see the log of that process")


def test_a_missing_disk_or_a_stop_during_a_restore_is_not_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax reads in its own event loop and wraps exceptions that interrupt it."""
    target = target_of(make_state(9), mesh_of(8))

    def away(*arguments: object, **more: object) -> None:
        raise ValueError("NOT_FOUND: Error reading: Input/output error [os_error_code='5']")

    def stopped(*arguments: object, **more: object) -> None:
        try:
            raise Stopped("SIGTERM")
        except Stopped as stop:
            raise ValueError("cannot restore") from stop

    monkeypatch.setattr(ocp.Checkpointer, "restore", away)
    with pytest.raises(RunAgain, match=r"\(Input/output error\): bring the disk back"):
        restore(saved / "checkpoints/9.json", target, verified=True)
    monkeypatch.setattr(ocp.Checkpointer, "restore", stopped)
    with pytest.raises(Stopped):
        restore(saved / "checkpoints/9.json", target, verified=True)


def test_nothing_is_written_below_the_mount_point_of_a_lost_disk(
    saver: CheckpointSaver, run: Path
) -> None:
    """The mount point is a folder of the parent disk."""
    away = run.with_name("away")
    save(saver, 2)
    run.rename(away)
    (run / FILES).mkdir(parents=True)
    with pytest.raises(SaveFailed, match=r"files is not the same folder as before\)"):
        saver.save(make_state(4), meta_of(4))
    assert list((run / FILES).iterdir()) == []
    shutil.rmtree(run)
    away.rename(run)
    save(saver, 4)
    assert pointer.steps(run / "checkpoints") == [2, 4]


FAILS = """
import resource, sys
from pathlib import Path
import jax
from checkpoint import small_state
from jaxtrain.checkpoint.saver import CheckpointSaver, SaveFailed

jax.config.update("jax_num_cpu_devices", 8)

def save(step):
    checkpoints.save(small_state.make_state(step, big=1 << 20), small_state.meta_of(step))

def names():
    data = [path.name.partition("-")[0] for path in (folder / "checkpoints/files").iterdir()]
    print([path.name for path in (folder / "checkpoints").glob("*.json")], data)

folder = Path(sys.argv[1], "full")
checkpoints = CheckpointSaver(folder, 1, lambda line: print("said:", line))
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

folder = Path(sys.argv[1], "gone")
checkpoints = CheckpointSaver(folder, 1, print)
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


def test_a_full_disk_and_a_lost_folder_are_reported_and_older_checkpoints_stay(
    tmp_path: Path, checkout: Path
) -> None:
    """A folder that cannot be created blocks nothing.

    Neither the save nor the exit, although Orbax's threads would wait 300 s for the folder.
    """
    ended = subprocess.run(  # separate, as leftovers of Orbax after a failure disturb other tests
        [sys.executable, "-c", FAILS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said, error, after_failure, after_next, gone, last = ended.stdout.splitlines()
    assert said == f"said: warning: {error}"
    assert f"checkpoint 4 could not be written to {tmp_path / 'full'} (" in error
    assert "File too large" in error
    assert "the newest complete one is 2" in error
    assert after_failure == "['2.json'] ['2']"  # and no partial one
    assert after_next == "['4.json'] ['4']"  # the next save works, including the failed step
    assert gone.startswith(f"warning: checkpoint 4 could not be written to {tmp_path / 'gone'} (")
    assert "the newest complete one is 2" in gone
    assert last == "failed"
    assert pointer.verify(tmp_path / "away/checkpoints/2.json") == ""
    assert "ERROR:absl" not in ended.stderr
    assert issubclass(SaveFailed, RunAgain)


OWN_DISKS = """
import asyncio, sys
from pathlib import Path
import jax

address, process, folder = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, int(process))

from checkpoint import small_state
from jaxtrain.checkpoint import orbax_compat
from jaxtrain.checkpoint.saver import CheckpointSaver

base = orbax_compat.TemporaryPath.__mro__[1]
create = base.create

async def create_late(self):
    if process == "1" and "files/4-" in str(self.get_final()):
        await asyncio.sleep(1)
    return await create(self)

base.create = create_late
class NoUploads:
    busy = lambda self: ""
    offer = lambda self, save, problem: Path(folder, "own.json").write_bytes(save.content)
    in_use = lambda self: set()

checkpoints = CheckpointSaver(Path(folder), 2, uploads=NoUploads())
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
    for name in ("0", "1"):
        small_checkpoint.mark(tmp_path / name)
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
    # Each has its shards, and both together have all: none is in both.
    (one,), (other,) = ((tmp_path / name / FILES).glob("4-*") for name in ("0", "1"))
    assert one.name == other.name
    files = [
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    ]
    arrays = [{name.split("/")[1] for name in names if "/ocdbt" in name} for names in files]
    assert arrays == [{"ocdbt.process_0"}, {"ocdbt.process_1"}]
    # In a bucket, they are a checkpoint, which any number of devices restores.
    bucket = Bucket("s3://bucket/run", MemoryStore())
    bucket.put(run_marker.NAME, small_checkpoint.marker())
    uploads = [Uploader(bucket, tmp_path / name, say=print) for name in ("0", "1")]
    uploads[0].claim()
    uploads[1]._process, uploads[1]._first = 1, False
    for one in reversed(uploads):
        one._count = 2
        content = (one.directory / "own.json").read_bytes()
        one._upload(Save(4, ("checkpoints",), pointer.data_of(content), content))
    uploads[0].close()
    reader = tmp_path / "reader"
    for _ in range(2):  # a fetch may be interrupted
        assert RemoteRun(bucket, print).fetch("checkpoints/4.json", reader) == ""
    state = make_state(4)
    same(restore(reader / "checkpoints/4.json", target_of(state, mesh_of(4))), state)


def test_a_bad_step_stays_and_does_not_count(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, 1)
    meta = meta_of(5) | {"bad_step": "step 6 is bad"}
    saver.save(make_state(5), meta, (pointer.BAD_STEP,), {"ids": jnp.arange(4)})
    saver.wait()
    checkpoints = candidates.CheckpointCandidates(tmp_path)
    assert candidates.newest_intact(checkpoints) == (None, {})
    assert not checkpoints.unusable()  # a resume may start from scratch
    for step in (3, 4):  # what the run saves after that deletes nothing of it
        saver.save(make_state(step), meta_of(step))
        saver.wait()
    saver.close()
    (path,) = (tmp_path / pointer.ASIDE).glob("*.json")
    assert path.with_suffix(".txt").read_text() == "bad step: step 6 is bad\n"
    assert pointer.verify(path) == ""
    np.testing.assert_array_equal(arrays_of(path)["ids"], np.arange(4))
    start, _ = candidates.newest_intact(checkpoints)
    assert start is not None
    assert start.stem == "4"
