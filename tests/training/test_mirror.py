"""Tests the copy of a run in a bucket, against a store in memory; real_buckets.py has real runs."""

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
from checkpoint.small_state import make_state, meta_of, save
from obstore.store import MemoryStore
from program import arrays_of, wait_for

from jaxtrain import config
from jaxtrain.checkpoint import candidates, pointer, remote, resume
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import lease
from jaxtrain.storage.bucket import Bucket, Unavailable
from jaxtrain.training import mirror, run_directory
from jaxtrain.training.mirror import Mirror

BOTH = ("checkpoints", "best")


class Run:
    """A run without training: it saves, and is copied to a bucket."""

    def __init__(self, store: MemoryStore, directory: Path, resumed: str | None = "latest") -> None:
        self.said: list[str] = []
        self.bucket = Bucket("s3://bucket/run", store)
        self.mirror = Mirror(
            self.bucket, directory, staged=True, say=self.said.append, expires_s=0.4
        )
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.mirror.claim()
        self.checkpoints: CheckpointSaver | None = None
        try:
            self.start_from = resume.choose(
                resumed,
                directory,
                directory,
                self.said.append,
                candidates_of=lambda run: self.mirror.candidates_of(run, self.said.append),
            )
            self.mirror.refuse_other(resumed, self.start_from)
            self.mirror.fetch(self.start_from)
        except BaseException:
            self.close()
            raise

    def begin(self, keep: int = 2) -> "Run":
        self.checkpoints = CheckpointSaver(
            self.directory, keep, self.said.append, mirror=self.mirror, resumed=self.start_from
        )
        self.mirror.start(keep, 1, None, self._resumed)
        return self

    @property
    def _resumed(self) -> int | None:
        return None if self.start_from is None else pointer.step_of(self.start_from.name)

    def save(self, *steps: int, kinds: tuple[str, ...] = ("checkpoints",)) -> None:
        assert self.checkpoints is not None
        for step in steps:
            self.checkpoints.save(make_state(step), meta_of(step), kinds)
        self.checkpoints.wait()

    def finish(self) -> None:
        self.mirror.finish(lambda: None)

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
        self.mirror.close()

    def stored_in(self, folder: str) -> list[int]:
        names = self.bucket.sizes(folder)
        return sorted(int(Path(name).stem) for name in names if name.endswith(".json"))

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
    assert first.mirror.both == f"s3://bucket/run, local copies in {first.directory}"
    (first.directory / "metrics.jsonl").write_text('{"step": 4}\n')
    (first.directory / "progress.json").write_text("{}")
    (first.directory / "samples").mkdir()
    (first.directory / "samples" / "4.png").write_bytes(b"png")
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
    assert {name.split("/")[1].partition("-")[0] for name in first.bucket.sizes("data")} == {
        "4",
        "6",
    }

    second = runs("two")
    assert second.on_disk == [6]
    assert pointer.steps(second.directory / "best") == [4]
    for path in ("checkpoints/6.json", "best/4.json"):
        assert pointer.verify(second.directory / path) == ""
    assert (second.directory / "metrics.jsonl").read_text() == '{"step": 4}\n'
    assert (second.directory / "progress.json").read_text() == "{}"
    assert (second.directory / "samples" / "4.png").read_bytes() == b"png"
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

    def away(*_: object) -> None:
        raise Unavailable("the bucket is away")

    with monkeypatch.context() as patched:
        patched.setattr(mirror.FileCopies, "fetch", away)
        with pytest.raises(Unavailable):
            runs("two")
    second = runs("two")
    assert second.on_disk == [2]
    assert (second.directory / "metrics.jsonl").read_text() == "1\n"


def test_files_are_fetched_only_if_another_machine_has_continued_the_run(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None).begin()
    for name in ("log.txt", "metrics.jsonl"):
        (first.directory / name).write_text("1\n")
    first.upload(2)
    first.close()
    (first.directory / "metrics.jsonl").write_text("1\n2\n")
    again = runs("one")
    assert (again.directory / "metrics.jsonl").read_text() == "1\n2\n"
    again.close()
    second = runs("two").begin()
    (second.directory / "metrics.jsonl").write_text("1\n2\n")
    second.upload(4)
    second.close()
    (first.directory / "metrics.jsonl").write_text("1\nof an abandoned branch\n")
    again = runs("one")
    assert again.start_from == first.directory / "checkpoints/4.json"
    assert (again.directory / "metrics.jsonl").read_text() == "1\n2\n"


def test_another_run_is_refused_in_a_used_folder(runs: Callable[..., Run], tmp_path: Path) -> None:
    first = runs("one", None).begin().upload(2)
    first.close()
    with pytest.raises(InputError, match=r"run already contains checkpoints \(newest: 2\): resume"):
        runs("two", None)
    other = CheckpointSaver(tmp_path / "other", 2)
    save(other, 4)
    other.close()
    with pytest.raises(InputError, match=r"and --resume .*/other is another run: use --resume"):
        runs("two", str(tmp_path / "other"))
    assert first.stored == [2]


def test_an_upload_that_falls_behind_says_so_and_the_last_is_uploaded(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin(keep=1)
    released = slow_upload(run, monkeypatch)
    run.save(2, 3)  # which also deletes checkpoint 1 on disk, but not its files
    assert run.on_disk == [3]
    assert run.stored == []
    (behind,) = [line for line in run.said if "is not uploaded" in line]
    assert "checkpoint 2 is not uploaded to s3://bucket/run (an upload is still runn" in behind
    released.set()
    run.finish()
    assert run.stored == [3]
    assert not any("not uploaded yet" in line for line in run.said)
    run.upload(4)
    assert [path.name[:2] for path in (run.directory / "data").iterdir()] == ["4-"]


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
    run.bucket.delete(list(run.bucket.sizes()))
    other = Mirror(run.bucket, tmp_path / "two", staged=True, say=run.said.append)
    shutil.copytree(run.directory, other.directory)
    shard = f"{found.data}/state/params.w/0.1"
    (other.directory / shard).parent.mkdir(parents=True)
    (other.directory / shard).write_bytes(b"a shard of the second process")
    (other.directory / "examples.1.jsonl").write_text('{"step": 2}\n')
    saves = []
    for process, one in enumerate((run.mirror, other)):
        one.own_disk, one._count, one._process, one._first = True, 2, process, process == 0
        own = pointer.Pointer.of_folder(one.directory / found.data, found.meta, found.arrays)
        saves.append(mirror.Save(2, ("checkpoints",), found.data, own.to_json()))
    first = threading.Thread(target=run.mirror._upload, args=(saves[0],))
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
    monkeypatch.setattr(mirror, "_GIVE_UP_S", 0.5)
    run = runs("one", None).begin()

    def fail(name: str, data: Any, sent: Callable[[int], object] = lambda count: None) -> None:
        sent(10)  # no attempt comes further than the first
        raise Unavailable("no")

    monkeypatch.setattr(run.bucket, "put", fail)
    run.save(2)
    beats: list[None] = []
    with pytest.raises(RunAgain, match=f"checkpoint 2 is complete in {run.directory}, but not in"):
        run.mirror.finish(lambda: beats.append(None))
    assert beats


def test_an_unexpected_error_in_an_upload_ends_the_run(runs: Callable[..., Run]) -> None:
    run = runs("one", None).begin()
    run.refuse(lambda name: True, MemoryError("not enough"))
    run.save(2)
    with pytest.raises(MemoryError, match="not enough"):
        run.finish()
    with pytest.raises(MemoryError, match="not enough"):
        run.mirror.check()


def test_a_log_that_grows_does_not_count_as_progress(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_GIVE_UP_S", 3.0)
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
    for name in ("log.txt", "samples/1.png"):
        (run.directory / name).write_bytes(b"1")
    run.save(2)
    with pytest.raises(RunAgain, match="checkpoint 2 is complete in"):
        run.finish()
    assert len(logs) > 1


def test_an_attempt_may_take_as_long_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sent = mirror._Sent()
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
    with run.mirror._lease._lock:
        run.mirror._lease._renew_once()
    with pytest.raises(lease.Lost, match="another run has taken over"):
        run.mirror.check()
    run.save(2)
    with run.mirror._changed:  # until the thread has dropped the upload
        assert run.mirror._changed.wait_for(lambda: not run.mirror._work, 60)
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
    with run.mirror._lease._lock:
        run.mirror._lease._renewed_at -= 100
    run.mirror._sync_files()
    found = run.bucket.get("metrics.jsonl")
    assert found is not None
    assert found.data == b"of the other\n"


def slow_upload(run: Run, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves step 1, and returns once its upload waits for the returned event."""
    slow, released = threading.Event(), threading.Event()
    put = run.bucket.put

    def wait(name: str, data: Any, *more: Any) -> None:
        if name.startswith("data/1-"):
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
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE_S", 0.1)
    released = slow_upload(run, monkeypatch)
    run.close()
    released.set()
    assert run.mirror._thread is not None
    run.mirror._thread.join(20)
    assert not run.mirror._thread.is_alive()
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


def test_a_start_that_is_interrupted_still_prefers_the_run_of_another_machine(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had fetched the checkpoint, and not yet moved its own aside."""
    first = runs("one", None).begin().upload(2)
    first.close()
    checkpoints = CheckpointSaver(first.directory, 2)  # not uploaded
    save(checkpoints, 8)
    checkpoints.close()
    second = runs("two").begin().upload(4)
    second.close()

    def killed(self: candidates.CheckpointCandidates) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(candidates.CheckpointCandidates, "adopt_disk", killed)
        with pytest.raises(KeyboardInterrupt):
            runs("one")
    again = runs("one")
    assert again.start_from == again.directory / "checkpoints/4.json"
    assert pointer.steps(again.directory / "superseded/checkpoints") == [8]


def test_the_bucket_of_another_run_is_refused(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Its files would replace those of the run on the disk."""
    first = runs("one", None).begin().upload(2)
    first.close()
    directory = tmp_path / "output"
    checkpoints = CheckpointSaver(directory, 2)
    save(checkpoints, 4)
    checkpoints.close()
    remote.note(directory, "s3://bucket/its-own", ["data/4-0123456789ab"])
    other = Mirror(first.bucket, directory, staged=False, say=first.said.append)
    with pytest.raises(
        InputError, match=r"checkpoint\.mirror=s3://bucket/run has checkpoints, and"
    ):
        other.candidates_of(directory)
    assert pointer.steps(directory / "checkpoints") == [4]


def test_hosts_without_a_shared_disk_delete_what_earlier_starts_have_fetched(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    first = runs("one", None).begin(keep=1)
    directory = tmp_path / "second process"
    for step in (2, 4):
        first.upload(step)
        other = Mirror(first.bucket, directory, staged=True, say=first.said.append)
        other.own_disk, other._first = True, False
        other.fetch(directory / f"checkpoints/{step}.json")
        other.start(1, 1, None, step)
        other.close()
    assert [path.name[:2] for path in (directory / "data").iterdir()] == ["4-"]


def test_damage_that_only_another_host_sees_does_not_end_every_start(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """The host of process 0 has the file on its disk."""
    first = runs("one", None).begin().upload(2, 4)
    data = pointer.read(first.directory / "checkpoints/4.json").data
    first.bucket.put(f"{data}/state/_METADATA", b"damaged")
    directory = tmp_path / "second process"
    other = Mirror(first.bucket, directory, staged=True, say=first.said.append)
    other.own_disk, other._first = True, False
    with pytest.raises(RunAgain, match=r"checkpoints/4 is damaged \(_METADATA has|_METADATA"):
        other.fetch(directory / "checkpoints/4.json")
    assert first.stored == [2]
    assert first.stored_in("damaged/checkpoints") == [4]


def test_a_newer_checkpoint_is_uploaded_before_a_best_one_that_fails(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one is uploaded as soon as it can be."""
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE_S", 0.0)
    run = runs("one", None).begin()
    away = threading.Event()
    run.refuse(lambda name: name.startswith("data/4-") and not away.is_set(), Unavailable("no"))
    run.save(4, kinds=BOTH)
    with run.mirror._changed:
        assert run.mirror._changed.wait_for(lambda: run.mirror._failures >= 3, 60)
    run.save(6)
    wait_for(lambda: 6 in run.stored, seconds=60)
    away.set()
    run.finish()
    assert run.stored[-1] == 6
    assert run.stored_in("best") == [4]


def test_a_kill_before_the_last_uploads_loses_nothing(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin().upload(2)
    first.close()
    checkpoints = CheckpointSaver(first.directory, 2)  # neither is uploaded
    checkpoints.save(make_state(4), meta_of(4), BOTH)
    checkpoints.save(make_state(6), meta_of(6))
    checkpoints.close()
    again = runs("one").begin()
    assert again.start_from == first.directory / "checkpoints/6.json"
    again.finish()
    assert again.stored == [2, 6]
    assert again.stored_in("best") == [4]
    assert not again.bucket.sizes("superseded")


def test_checkpoints_that_may_be_wrong_are_moved_in_the_bucket(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin(keep=3)
    assert first.checkpoints is not None
    first.checkpoints.last_equal = 2
    first.upload(2, 4, 6, kinds=BOTH)
    first.checkpoints.suspect_after(2, "step 7 was wrong")
    assert first.mirror.suspect_after(2, "step 7 was wrong") == ""
    assert first.stored == first.on_disk == [2]
    assert first.stored_in("suspect/checkpoints") == [4, 6]
    assert first.bucket.get("suspect/checkpoints/6.txt") is not None
    first.save(8)  # nothing is completed after that
    first.close()
    assert first.stored == [2]
    assert runs("two").start_from == first.directory.with_name("two") / "checkpoints/2.json"


def test_files_outside_the_run_directory_are_not_fetched(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin().upload(2)
    first.close()
    hidden = (".lock", ".files-due", ".in-bucket")
    for name in ("secret.sh", "data/9-0/state/x", "samples/a.txt", *hidden):
        first.bucket.put(name, b"1")
    second = runs("two")
    there = {path.name for path in second.directory.iterdir()}
    assert there == {"checkpoints", "data", "samples", ".in-bucket"}
    assert second.on_disk == [2]


def test_fetched_files_are_not_sent_back(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    for name in ("config.json", "samples/4.png", "metrics.jsonl"):
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
    second.mirror._upload_files()
    assert [name.partition("-")[0] for name in sent if "metrics" in name] == [
        "metrics.jsonl/000000000000004"
    ]
    assert not any("4.png" in name for name in sent)


def test_the_bucket_is_set_in_one_place() -> None:
    run = config.load("demo_mlm")
    both = run.override({"checkpoint.mirror": "s3://bucket/run"})
    assert mirror.url_of(run, None) is None
    assert mirror.url_of(run, "output/run") is None
    assert mirror.url_of(run, "gs://bucket/run/") == "gs://bucket/run"
    assert mirror.url_of(both, "output/run") == "s3://bucket/run"
    with pytest.raises(InputError, match="set only one of them to a bucket"):
        mirror.url_of(both, "s3://bucket/other")
    with pytest.raises(InputError, match="requires --output-dir"):
        mirror.url_of(both, None)


def test_a_fresh_machine_knows_from_which_checkpoint_a_run_was_started(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None)
    line = '{"event": "start", "from": "/data/old/checkpoints/8"}\n'
    (first.directory / "history.jsonl").write_text(line)
    first.begin().close()  # before the first save
    second = runs("two")
    of_second = (str(second.directory), second.mirror.shown, second.mirror.fetch_file)
    assert run_directory.origin(*of_second) == "/data/old/checkpoints/8"
    own = '{"event": "start", "from": "s3://bucket/run/checkpoints/8"}\n'
    (second.directory / "history.jsonl").write_text(line + own)
    assert run_directory.origin(*of_second) == ""
    (second.directory / "history.jsonl").write_text(line + '{"no": "event"}\n')
    assert run_directory.origin(*of_second) == "/data/old/checkpoints/8"
