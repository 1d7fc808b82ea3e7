"""Tests a run in a bucket, against a store in memory; real_buckets.py has real runs."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import small_checkpoint
from checkpoint.small_state import make_state, meta_of, save
from obstore.store import MemoryStore
from program import arrays_of, wait_for

from jaxtrain.checkpoint import pointer, remote, uploader
from jaxtrain.checkpoint.pointer import FILES
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.checkpoint.store import mark_copy
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import lease, run_marker
from jaxtrain.storage.bucket import Bucket, Unavailable

BOTH = ("checkpoints", "best")


class Run:
    """A run without training: it saves checkpoints in a bucket."""

    def __init__(self, store: MemoryStore, directory: Path, resumed: str | None = "latest") -> None:
        self.said: list[str] = []
        self.bucket = Bucket("s3://bucket/run", store)
        self.uploader = Uploader(self.bucket, directory, say=self.said.append, expires_s=0.4)
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.uploader.claim()
        self.checkpoints: CheckpointSaver | None = None
        try:
            self.start_from = small_checkpoint.choose(
                resumed,
                directory,
                self.said.append,
                place=self.uploader.place,
                checkpoints=self.uploader.candidates(),
            )
            self.uploader.fetch(self.start_from)
            self.uploader.fetch_files()
        except BaseException:
            self.close()
            raise

    def begin(self, keep: int = 2) -> "Run":
        self.checkpoints = CheckpointSaver(
            self.directory, keep, self.said.append, uploads=self.uploader, resumed=self.start_from
        )
        self.uploader.start(keep, 1, self.start_from)
        return self

    def save(self, *steps: int, kinds: tuple[str, ...] = ("checkpoints",)) -> None:
        assert self.checkpoints is not None
        for step in steps:
            self.checkpoints.save(make_state(step), meta_of(step), kinds)
        self.checkpoints.wait()

    def finish(self) -> None:
        self.uploader.finish(lambda: None)

    def upload(self, *steps: int, kinds: tuple[str, ...] = ("checkpoints",)) -> "Run":
        """Saves a checkpoint at each step, and waits until it is in the bucket."""
        for step in steps:
            self.save(step, kinds=kinds)
            self.finish()
        return self

    def refuse(self, when: Callable[[str], object], error: Exception) -> None:
        """Lets the upload of each object with such a name fail."""
        put = self.bucket.put

        def fail(name: str, data: Any, *more: Any) -> None:
            if when(name):
                raise error
            put(name, data, *more)

        self.bucket.put = fail  # type: ignore[method-assign]

    def close(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.uploader.close()

    def stored_in(self, folder: str) -> list[int]:
        names = map(pointer.step_of, self.bucket.names(folder))
        return sorted(step for step in names if step is not None)

    @property
    def stored(self) -> list[int]:
        return self.stored_in("checkpoints")

    @property
    def on_disk(self) -> list[int]:
        return pointer.steps(self.directory / "checkpoints")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs in the same bucket, each on the disk with the given name."""
    store = MemoryStore()
    made: list[Run] = []

    def start(disk: str, resumed: str | None = "latest") -> Run:
        made.append(Run(store, tmp_path / disk, resumed))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_another_machine_resumes_with_checkpoint_best_and_files(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    assert first.uploader.url == "s3://bucket/run"
    (first.directory / "metrics.jsonl").write_text('{"step": 4}\n')
    (first.directory / "progress.json").write_text("{}")
    (first.directory / "samples").mkdir()
    (first.directory / "samples" / "clip_4.png").write_bytes(b"png")
    (first.directory / "notes.txt").write_text("not of the run")
    first.upload(2)
    first.upload(4, kinds=BOTH)
    first.upload(6)
    first.close()
    assert first.stored == [4, 6]
    names = first.bucket.sizes()
    assert first.stored_in("best") == [4]
    assert "notes.txt" not in names
    assert not any(name.startswith(".") for name in names)  # neither locks nor leases
    assert {
        name.split("/")[2].partition("-")[0] for name in first.bucket.sizes("checkpoints/files")
    } == {
        "4",
        "6",
    }

    second = runs("two")
    assert second.on_disk == [6]
    assert pointer.verify(second.directory / "checkpoints/6.json") == ""
    assert second.uploader.has_best(4)
    assert not second.uploader.has_best(6)
    assert (second.directory / "metrics.jsonl").read_text() == '{"step": 4}\n'
    assert (second.directory / "progress.json").read_text() == "{}"
    assert (second.directory / "samples" / "clip_4.png").read_bytes() == b"png"
    assert any("fetching checkpoints/6 from s3://bucket/run" in line for line in second.said)


def test_a_bad_step_is_uploaded_and_no_resume_uses_it(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    first = runs("first").begin().upload(2)
    assert first.checkpoints is not None
    for step in (2, 3):  # also one whose state was just saved
        meta = meta_of(step) | {"bad_step": f"step {step + 1} is bad"}
        batch = {"batch": {"x": jnp.arange(8.0)}}
        first.checkpoints.save(make_state(step), meta, (pointer.BAD_STEP,), batch)
        first.checkpoints.wait()
        first.finish()
    first.close()
    assert (first.stored, first.on_disk) == ([2], [2])
    stored = remote.RemoteRun(first.bucket, first.said.append)
    names = stored.store.asides()
    reasons = ["bad step: step 3 is bad", "bad step: step 4 is bad"]
    assert [stored.store.why_aside(name) for name in names] == reasons
    for name in names:
        assert not stored.fetch(f"{pointer.ASIDE}/{name}.json", tmp_path / "other")
        arrays = arrays_of(tmp_path / "other" / pointer.ASIDE / f"{name}.json")
        np.testing.assert_array_equal(arrays["batch.x"], np.arange(8.0))
    second = runs("second").begin()
    assert second.start_from is not None
    assert second.start_from.stem == "2"


def test_files_are_fetched_even_if_the_first_try_fails_after_the_checkpoint(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    (first.directory / "metrics.jsonl").write_text("1\n")
    first.upload(2)
    first.close()

    def away(*_: object, **__: object) -> None:
        raise Unavailable("the bucket is away")

    with monkeypatch.context() as patched:
        patched.setattr(uploader.FileCopies, "fetch", away)
        with pytest.raises(Unavailable):
            runs("two")
    second = runs("two")
    assert second.on_disk == [2]
    assert (second.directory / "metrics.jsonl").read_text() == "1\n"


def test_files_of_the_bucket_replace_those_of_an_abandoned_branch(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None).begin()
    for name in ("log.txt", "metrics.jsonl"):
        (first.directory / name).write_text("1\n")
    (first.directory / "progress.json").write_text("old")
    first.upload(2)
    first.close()
    (first.directory / "metrics.jsonl").write_text("1\n2\n")
    (first.directory / "hang-0.txt").write_text("stacks\n")
    again = runs("one")  # killed before it uploaded these
    assert (again.directory / "metrics.jsonl").read_text() == "1\n2\n"
    assert (again.directory / "hang-0.txt").read_text() == "stacks\n"
    again.close()
    second = runs("two").begin()
    (second.directory / "metrics.jsonl").write_text("1\n2\n")
    (second.directory / "progress.json").write_text("new")
    second.upload(4)
    second.close()
    (first.directory / "metrics.jsonl").write_text("1\nof an abandoned branch\n")
    (first.directory / "config.json").write_text("of an abandoned branch")
    (first.directory / "notes.json").write_text("of a user")
    again = runs("one")
    assert again.start_from == first.directory / "checkpoints/4.json"
    assert (again.directory / "metrics.jsonl").read_text() == "1\n2\n"
    assert (again.directory / "progress.json").read_text() == "new"
    assert not (again.directory / "config.json").exists()
    assert (again.directory / "notes.json").read_text() == "of a user"


def test_the_bucket_has_the_log_of_a_start_that_ended_before_training(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None)
    (first.directory / "log.txt").write_text("the data are missing\n")
    first.close()
    again = runs("one")
    (again.directory / "log.txt").write_text("the data are missing\nagain\n")
    again.close()
    assert (runs("two").directory / "log.txt").read_text() == "the data are missing\nagain\n"


def test_a_start_that_is_refused_uploads_nothing(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    (first.directory / "log.txt").write_text("1\n")
    first.upload(2)
    first.close()
    (first.directory / "log.txt").write_text("2\n")
    with pytest.raises(InputError, match="already contains checkpoints"):
        runs("one", None)
    assert (runs("two").directory / "log.txt").read_text() == "1\n"


def test_nothing_of_an_earlier_run_is_in_that_of_an_empty_bucket(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    (first.directory / "log.txt").write_text("1\n")
    first.upload(2)
    first.close()
    first.bucket.delete(list(first.bucket.sizes()))
    again = runs("one", None).begin()
    assert again.start_from is None
    assert not (again.directory / "log.txt").exists()
    assert again.on_disk == []
    assert not list((again.directory / FILES).iterdir())


def test_samples_of_abandoned_steps_are_deleted_in_the_bucket(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    (first.directory / "samples").mkdir()
    for step in (2, 4):
        (first.directory / f"samples/clip_{step}.png").write_bytes(b"png")
    first.bucket.put("samples/frame_9.txt.old", b"of a user")
    first.upload(2)
    (first.directory / "samples/clip_4.png").unlink()  # by a rollback
    first.upload(3)
    names = {name for name in first.bucket.sizes() if name.startswith("samples/")}
    assert names == {"samples/clip_2.png", "samples/frame_9.txt.old"}
    first.close()
    second = runs("two").begin()
    (second.directory / "samples/clip_2.png").unlink()
    second.upload(4)
    assert "samples/clip_2.png" not in second.bucket.sizes()


def test_a_used_folder_continues_its_own_checkpoints(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    first = runs("one", None).begin().upload(2)
    first.close()
    with pytest.raises(InputError, match=r"run already contains checkpoints \(newest: 2\): resume"):
        runs("two", None)
    other = CheckpointSaver(tmp_path / "other", 2)
    save(other, 4)
    other.close()
    second = runs("two", str(tmp_path / "other"))
    assert second.start_from == second.directory / "checkpoints/2.json"
    assert any("s3://bucket/run continues with its own checkpoints" in line for line in second.said)
    assert first.stored == [2]


def test_an_upload_that_falls_behind_says_so_and_the_last_is_uploaded(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin(keep=1)
    released = slow_upload(run, monkeypatch)
    run.save(2, 3)
    assert run.on_disk == run.stored == []  # only the bucket completes a checkpoint
    (behind,) = [line for line in run.said if "is not uploaded" in line]
    assert "checkpoint 2 is not uploaded to s3://bucket/run (an upload is still runn" in behind
    released.set()
    run.finish()
    assert run.stored == run.on_disk == [3]
    assert not any("not uploaded yet" in line for line in run.said)
    run.upload(4)
    assert {path.name[:2] for path in (run.directory / FILES).iterdir()} == {"3-", "4-"}


def test_no_checkpoint_is_complete_before_its_metrics(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    put, failures, names = run.bucket.put, iter([True, True]), list[str]()

    def fail(name: str, data: Any, *more: Any) -> None:
        if name.startswith("metrics.jsonl/") and next(failures, False):
            raise Unavailable("s3://bucket/run: cannot write (503 Slow Down)")
        put(name, data, *more)
        names.append(name.partition("/0")[0])

    monkeypatch.setattr(run.bucket, "put", fail)
    (run.directory / "metrics.jsonl").write_text('{"step": 2}\n')
    run.upload(2)
    assert names.index("metrics.jsonl") < names.index("checkpoints/2.json")
    assert "warning: checkpoint 2 is not uploaded yet: s3://bucket/run: cannot" in str(run.said)


def test_hosts_without_a_shared_disk_complete_a_checkpoint_together(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """Each uploads its files; process 0 waits for all of them, and for their records."""
    run = runs("one", None).begin().upload(2)
    content = (run.directory / "checkpoints/2.json").read_bytes()
    found = pointer.Pointer.parse(content, 2)
    run.bucket.delete([name for name in run.bucket.sizes() if name != run_marker.NAME])
    other = Uploader(run.bucket, tmp_path / "two", say=run.said.append)
    shutil.copytree(run.directory, other.directory)
    shard = f"{found.data}/state/params.w/0.1"
    (other.directory / shard).parent.mkdir(parents=True)
    (other.directory / shard).write_bytes(b"a shard of the second process")
    (other.directory / "examples.1.jsonl").write_text('{"step": 2}\n')
    saves = []
    for process, one in enumerate((run.uploader, other)):
        one._count, one._process, one._first = 2, process, process == 0
        own = pointer.Pointer.of_folder(one.directory / found.data, found.meta, found.arrays)
        saves.append(uploader.Save(2, ("checkpoints",), found.data, own.to_json()))
    first = threading.Thread(target=run.uploader._upload, args=(saves[0],))
    first.start()
    first.join(1.5)  # more than the second between two looks
    assert first.is_alive()
    assert run.stored == []
    other._upload(saves[1])
    first.join(20)
    assert any(name.startswith("examples.1.jsonl/") for name in run.bucket.sizes())
    assert run.stored == [2]
    third = runs("three")
    assert pointer.verify(third.directory / "checkpoints/2.json") == ""
    assert (third.directory / shard).read_bytes() == b"a shard of the second process"
    assert set(pointer.read(third.directory / "checkpoints/2.json").files) == {
        *found.files,
        "state/params.w/0.1",
    }


def test_a_bucket_that_takes_nothing_ends_the_wait(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "_GIVE_UP_S", 0.5)
    run = runs("one", None).begin()

    def fail(name: str, data: Any, sent: Callable[[int], object] = lambda count: None) -> None:
        sent(10)  # no attempt comes further than the first
        raise Unavailable("no")

    monkeypatch.setattr(run.bucket, "put", fail)
    run.save(2)
    beats: list[None] = []
    with pytest.raises(
        RunAgain, match="checkpoint 2 is not in s3://bucket/run, which took nothing new"
    ):
        run.uploader.finish(lambda: beats.append(None))
    assert beats


def test_an_unexpected_error_in_an_upload_ends_the_run(runs: Callable[..., Run]) -> None:
    run = runs("one", None).begin()
    run.refuse(lambda name: True, MemoryError("not enough"))
    run.save(2)
    with pytest.raises(MemoryError, match="not enough"):
        run.finish()
    with pytest.raises(MemoryError, match="not enough"):
        run.uploader.check()


def test_a_log_that_grows_does_not_count_as_progress(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "_GIVE_UP_S", 3.0)
    run = runs("one", None).begin()
    put, logs = run.bucket.put, list[int]()

    def fail(name: str, data: Any, *sent: Callable[[int], object]) -> None:
        if name.startswith("samples/"):
            raise Unavailable("no")
        put(name, data, *sent)
        if name.startswith("log.txt/"):
            logs.append(len(data))
            with (run.directory / "log.txt").open("ab") as file:
                file.write(b"1" * 1000)

    monkeypatch.setattr(run.bucket, "put", fail)
    (run.directory / "samples").mkdir()
    for name in ("log.txt", "samples/clip_1.png"):
        (run.directory / name).write_bytes(b"1")
    run.save(2)
    with pytest.raises(RunAgain, match="checkpoint 2 is not in s3"):
        run.finish()
    assert len(logs) > 1


def test_an_attempt_may_take_as_long_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(uploader, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sent = uploader._Sent()
    sent.begin(again=False)
    sent(1)
    now[0] = 1000.0
    sent(9)
    sent.begin(again=True)  # it has failed
    now[0] = 2599.0
    sent(10)
    assert not sent.is_stuck()
    now[0] = 2601.0
    assert sent.is_stuck()


def test_a_run_whose_lease_was_taken_ends(runs: Callable[..., Run]) -> None:
    run = runs("one", None).begin()
    run.bucket.put(lease.NAME, json.dumps({"run": "other", "pid": 1, "host": "b"}).encode())
    with run.uploader._lease._lock:
        run.uploader._lease._renew_once()
    with pytest.raises(lease.Lost, match="another run has taken over"):
        run.uploader.check()
    run.save(2)
    with run.uploader._changed:  # until the thread has dropped the upload
        assert run.uploader._changed.wait_for(lambda: not run.uploader._work, 60)
    assert run.stored == []
    with pytest.raises(RunAgain, match="another run has taken over"):
        run.finish()


def test_a_run_that_was_paused_does_not_overwrite_the_files_of_another(
    runs: Callable[..., Run],
) -> None:
    run = runs("one", None)
    run.bucket.put(lease.NAME, json.dumps({"run": "other", "pid": 1, "host": "b"}).encode())
    run.bucket.put("metrics.jsonl", b"of the other\n")
    (run.directory / "metrics.jsonl").write_text("1\n")
    with run.uploader._lease._lock:
        run.uploader._lease._renewed_at -= 100
    run.uploader._sync_files()
    found = run.bucket.get("metrics.jsonl")
    assert found is not None
    assert found.data == b"of the other\n"


def slow_upload(run: Run, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves step 1, and returns once its upload waits for the returned event."""
    slow, released = threading.Event(), threading.Event()
    put = run.bucket.put

    def wait(name: str, data: Any, *more: Any) -> None:
        if name.startswith("checkpoints/files/1-"):
            slow.set()
            released.wait(20)
        put(name, data, *more)

    monkeypatch.setattr(run.bucket, "put", wait)
    run.save(1)
    assert slow.wait(20)
    return released


def test_an_upload_that_outlives_its_run_is_abandoned(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_S", 0.1)
    released = slow_upload(run, monkeypatch)
    run.close()
    released.set()
    assert run.uploader._thread is not None
    run.uploader._thread.join(20)
    assert not run.uploader._thread.is_alive()
    assert run.stored == []
    assert not any("not uploaded yet" in line for line in run.said)


def test_a_kill_before_the_first_save_does_not_undo_a_resume_from_an_earlier_step(
    runs: Callable[..., Run],
) -> None:
    """Launchers restart with --resume latest, perhaps on another machine."""
    first = runs("one", None).begin().upload(2, 4)
    first.close()
    runs("two", "2").begin().close()
    third = runs("three").begin()
    assert third.start_from == third.directory / "checkpoints/2.json"
    assert third.stored == [2]


def test_hosts_without_a_shared_disk_delete_what_earlier_starts_have_fetched(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    first = runs("one", None).begin(keep=1)
    directory = tmp_path / "second process"
    for step in (2, 4):
        first.upload(step)
        other = Uploader(first.bucket, directory, say=first.said.append)
        other._first = False
        mark_copy(directory, small_checkpoint.marker_of(first.bucket))
        path = directory / f"checkpoints/{step}.json"
        other.fetch(path)
        other.start(1, 1, path)
        other.close()
    assert [path.name[:2] for path in (directory / FILES).iterdir()] == ["4-"]


def test_damage_that_only_another_host_sees_does_not_end_every_start(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """The host of process 0 has the file on its disk."""
    first = runs("one", None).begin().upload(2, 4)
    data = pointer.read(first.directory / "checkpoints/4.json").data
    first.bucket.put(f"{data}/state/_METADATA", b"damaged")
    directory = tmp_path / "second process"
    other = Uploader(first.bucket, directory, say=first.said.append)
    other._first = False
    with pytest.raises(RunAgain, match=r"checkpoints/4 is damaged \(_METADATA has|_METADATA"):
        other.fetch(directory / "checkpoints/4.json")
    assert first.stored == [2]
    assert list(small_checkpoint.aside(first.uploader._remote.store.place)) == [4]


def test_a_newer_checkpoint_is_uploaded_before_a_best_one_that_fails(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one is uploaded as soon as it can be."""
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_S", 0.0)
    run = runs("one", None).begin()
    away = threading.Event()
    run.refuse(
        lambda name: name.startswith("checkpoints/files/4-") and not away.is_set(),
        Unavailable("no"),
    )
    run.save(4, kinds=BOTH)
    with run.uploader._changed:
        assert run.uploader._changed.wait_for(lambda: run.uploader._failures >= 3, 60)
    run.save(6)
    wait_for(lambda: 6 in run.stored, seconds=60)
    away.set()
    run.finish()
    assert run.stored[-1] == 6
    assert run.stored_in("best") == [4]


def test_a_kill_before_the_last_upload_resumes_from_what_the_bucket_has(
    runs: Callable[..., Run],
) -> None:
    """Here as on another machine; what was not uploaded is deleted in the cache."""
    first = runs("one", None).begin().upload(2)
    first.refuse(lambda name: name.startswith("checkpoints/files/4-"), Unavailable("no"))
    first.save(4)
    first.close()
    assert {path.name[:2] for path in (first.directory / FILES).iterdir()} == {"2-", "4-"}
    again = runs("one").begin()
    assert again.start_from == first.directory / "checkpoints/2.json"
    assert {path.name[:2] for path in (first.directory / FILES).iterdir()} == {"2-"}


def test_checkpoints_that_may_be_wrong_are_moved_in_the_bucket(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin(keep=3)
    assert first.checkpoints is not None
    first.checkpoints.last_equal = 2
    first.upload(2, 4, 6, kinds=BOTH)
    first.checkpoints.suspect_after(2, "step 7 was wrong")
    assert first.uploader.suspect_after(2, "step 7 was wrong") == ""
    assert first.stored == [2]
    assert first.on_disk == []
    reasons = small_checkpoint.aside(first.uploader._remote.store.place)
    assert reasons == {4: "suspect: step 7 was wrong", 6: "suspect: step 7 was wrong"}
    first.save(8)  # nothing is completed after that
    first.close()
    assert first.stored == [2]
    assert runs("two").start_from == first.directory.with_name("two") / "checkpoints/2.json"


def test_files_outside_the_run_directory_are_not_fetched(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin().upload(2)
    first.close()
    users = ("secret.sh", "notes.json", "samples/a.txt", ".lock")
    for name in ("checkpoints/files/9-0/state/x", "samples/text_2.txt", *users):
        first.bucket.put(name, b"1")
    second = runs("two")
    there = {path.name for path in second.directory.iterdir()}
    assert there == {"checkpoints", "jaxtrain-run.json", "samples"}
    assert [path.name for path in (second.directory / "samples").iterdir()] == ["text_2.txt"]
    assert second.on_disk == [2]


def test_fetched_files_are_not_sent_back(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    for name in ("config.json", "samples/clip_4.png", "metrics.jsonl"):
        (first.directory / name).parent.mkdir(exist_ok=True)
        (first.directory / name).write_text("old\n")
    first.upload(2)
    first.close()
    second = runs("two")
    sent: list[str] = []
    put = second.bucket.put

    def noted(name: str, *more: Any) -> None:
        sent.append(name)
        put(name, *more)

    monkeypatch.setattr(second.bucket, "put", noted)
    (second.directory / "metrics.jsonl").write_text("old\nnew\n")
    second.uploader._upload_files()
    assert [name.partition("-")[0] for name in sent if "metrics" in name] == [
        "metrics.jsonl/000000000000004"
    ]
    assert not any("clip_4.png" in name for name in sent)


def test_a_rollback_moves_later_checkpoints_aside_in_the_bucket(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin().upload(2, 3, kinds=BOTH)
    first.uploader.candidates().set_aside_after(2)
    assert first.stored == [2]
    assert list(small_checkpoint.aside(first.uploader._remote.store.place)) == [3]
    assert first.stored_in("best") == [3]  # its validation still counts
    first.upload(5)
    assert first.stored == [2, 5]
