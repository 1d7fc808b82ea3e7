"""Tests the copy of a run in a bucket, against a store in memory; real_buckets.py has real runs."""

import datetime
import errno
import json
import os
import shutil
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from fake_key_value import FakeClient
from obstore.store import MemoryStore
from small_state import make_state, meta_of, save
from toy import mesh_of

from jaxtrain import config
from jaxtrain.checkpoint import bucket_checkpoints, layout, manifest
from jaxtrain.checkpoint.resume import best_so_far, set_aside
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.distributed import key_value
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import lease
from jaxtrain.storage.bucket import Bucket, Unavailable
from jaxtrain.training import mirror
from jaxtrain.training.mirror import Mirror

FOLDER = "checkpoints"


class Run:
    """A run without training: it saves, and is copied to a bucket."""

    def __init__(self, store: MemoryStore, directory: Path, resume: str | None = "latest") -> None:
        self.said: list[str] = []
        self.bucket = Bucket("s3://bucket/run", store)
        self.mirror = Mirror(
            self.bucket, directory, staged=True, say=self.said.append, expires_s=0.4
        )
        self.directory = directory
        self.mirror.claim()
        self.checkpoints: Checkpoints | None = None
        try:
            self.mirror.fetch(resume, mesh_of(1, 1), "none")
        except BaseException:
            self.close()
            raise

    def begin(self, keep: int = 2) -> "Run":
        self.checkpoints = Checkpoints(
            self.directory / FOLDER, keep, self.said.append, mirror=self.mirror
        )
        self.mirror.start(keep, 1)
        return self

    def save(self, *steps: int) -> None:
        assert self.checkpoints is not None
        save(self.checkpoints, *steps)

    def finish(self) -> None:
        self.mirror.finish(lambda: None)

    def close(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.mirror.close()

    @property
    def stored(self) -> list[int]:
        names = self.bucket.sizes(FOLDER)
        return sorted(int(Path(name).stem) for name in names)

    @property
    def on_disk(self) -> list[int]:
        return layout.steps(self.directory / FOLDER)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs in the same bucket, each on the disk with the given name."""
    store = MemoryStore()
    made: list[Run] = []

    def start(disk: str, resume: str | None = "latest") -> Run:
        made.append(Run(store, tmp_path / disk, resume))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_another_machine_resumes_with_checkpoint_best_and_files(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    assert first.mirror.both == f"s3://bucket/run, local copies in {first.directory}"
    (first.directory / "metrics.jsonl").write_text('{"step": 4}\n')
    (first.directory / "samples").mkdir()
    (first.directory / "samples" / "4.png").write_bytes(b"png")
    (first.directory / "notes.txt").write_text("not of the run")
    first.save(2)
    first.finish()
    assert first.checkpoints is not None
    first.checkpoints.save(make_state(4), meta_of(4), best=True)
    first.checkpoints.wait()
    first.finish()
    first.close()
    assert first.stored == [2, 4]
    names = first.bucket.sizes()
    assert "best/4.json" in names
    assert "notes.txt" not in names
    assert not any(name.startswith(".") for name in names)  # neither locks nor leases

    second = runs("two")
    assert second.on_disk == [4]
    assert manifest.verify(second.directory / FOLDER / "4") == ""
    assert (second.directory / "metrics.jsonl").read_text() == '{"step": 4}\n'
    assert (second.directory / "samples" / "4.png").read_bytes() == b"png"
    assert any("fetching checkpoint 4 from s3://bucket/run" in line for line in second.said)


def with_best(step: int, best: int) -> dict[str, Any]:
    """Returns the metadata of a step whose best validation so far was at another one."""
    judged = {"step": best, "metric": "loss", "mode": "min", "value": 1.0, "validations_since": 1}
    return meta_of(step) | {"best": judged}


@pytest.mark.parametrize("damage", [False, True])
def test_another_machine_fetches_the_best_checkpoint(
    runs: Callable[..., Run], damage: bool
) -> None:
    first = runs("one", None).begin()
    assert first.checkpoints is not None
    first.checkpoints.save(make_state(2), with_best(2, 2), best=True)
    first.checkpoints.wait()
    first.finish()
    first.checkpoints.save(make_state(4), with_best(4, 2))
    first.checkpoints.wait()
    first.finish()
    first.close()
    if damage:
        first.bucket.delete([name for name in first.bucket.sizes("data/") if "data/2-" in name])
    second = runs("two")
    assert second.on_disk == [4]
    assert layout.steps(second.directory / "best") == ([] if damage else [2])
    assert ("damaged/best/2.json" in second.bucket.sizes()) == damage
    start, saved = second.directory / FOLDER / "4", with_best(4, 2)
    criterion = {**saved["best"], "validation": saved.get("validation")}
    best = best_so_far(saved, criterion, start, second.directory, print)
    assert (best is None) == damage  # otherwise the next validation would replace it


def test_files_are_fetched_even_if_the_first_try_fails_after_the_checkpoint(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    for name in ("log.txt", "metrics.jsonl"):
        (first.directory / name).write_text("old\n")
    first.save(2)
    first.finish()
    first.close()
    download = Bucket.download

    def fail(self: Bucket, name: str, *more: Any, **flags: Any) -> Any:
        if name == "metrics.jsonl":
            raise Unavailable("no")
        return download(self, name, *more, **flags)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "download", fail)
        with pytest.raises(Unavailable):
            runs("two")
    again = runs("two")
    assert (again.directory / "metrics.jsonl").read_text() == "old\n"
    assert again.on_disk == [2]
    assert not (again.directory / mirror._FILES_DUE).exists()


def test_the_files_of_a_newer_disk_are_not_overwritten(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    (first.directory / "log.txt").write_text("started\n")
    (first.directory / "metrics.jsonl").write_text("old\n")
    first.save(2)
    first.finish()
    first.close()
    (first.directory / "metrics.jsonl").write_text("old\nnew\n")
    checkpoints = Checkpoints(first.directory / FOLDER, 2)  # saved, but not uploaded
    save(checkpoints, 4)
    checkpoints.close()

    again = runs("one").begin()
    again.finish()
    assert again.stored == [2, 4]
    assert (again.directory / "metrics.jsonl").read_text() == "old\nnew\n"
    again.close()
    found = again.bucket.get("metrics.jsonl")
    assert found is not None
    assert found.data == b"old\nnew\n"


@pytest.mark.parametrize(("resume", "expected"), [("latest", [4]), ("2", [2])])
def test_a_resume_uses_the_newest_of_disk_and_bucket(
    runs: Callable[..., Run], tmp_path: Path, resume: str, expected: list[int]
) -> None:
    first = runs("one", None).begin()
    for step in (2, 4):
        first.save(step)
        first.finish()
    first.close()
    other = Checkpoints(tmp_path / "two" / FOLDER, 2)
    save(other, 1)
    other.close()
    assert runs("two", resume).on_disk == [1, *expected]


def test_a_damaged_checkpoint_is_not_used(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    for step in (2, 4):
        first.save(step)
        first.finish()
    first.close()
    data = next(name for name in first.bucket.sizes("data") if name.startswith("data/4-"))
    first.bucket.delete([data])

    second = runs("two").begin()
    assert second.on_disk == [2]
    assert any("checkpoint s3://bucket/run/checkpoints/4 is damaged" in one for one in second.said)
    second.save(4)
    second.finish()
    assert second.stored == [2, 4]
    assert runs_again(runs, second) == [4]


def test_a_fresh_start_that_would_lose_many_steps_is_refused(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    first.save(1)
    first.finish()
    first.save(4)
    first.finish()
    first.close()
    for name in first.bucket.sizes("data"):
        if "/meta/" in name:
            first.bucket.put(name, b"damaged")
    there = r"checkpoints/ has: 1; best/ has: none; pass one"
    with pytest.raises(InputError, match=rf"no complete checkpoint 4 \(checkpoints/4: .*{there}"):
        runs("two", "4")
    refused = r"no checkpoint in s3://bucket/run can be used \(checkpoints/4: .*than 1 steps"
    for _ in range(2):
        with pytest.raises(InputError, match=refused):
            runs("two")
        assert first.stored == [1, 4]  # nothing has moved
    first.bucket.delete(["checkpoints/4.json"])
    third = runs("three")
    assert third.on_disk == []
    assert third.stored == []
    assert set(third.bucket.sizes("damaged")) == {"damaged/checkpoints/1.json"}


def runs_again(runs: Callable[..., Run], before: Run) -> list[int]:
    before.close()
    return runs("three").on_disk


@pytest.mark.parametrize("resume", ["latest", "2"])
def test_damaged_files_that_are_also_of_the_best_checkpoint_are_fetched_once(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    first = runs("one", None).begin()
    assert first.checkpoints is not None
    first.checkpoints.save(make_state(2), with_best(2, 2), best=True)
    first.checkpoints.wait()
    first.finish()
    first.close()
    fetches: list[str] = []
    get = Mirror._get

    def noted(self: Mirror, *more: Any) -> None:
        fetches.append("one")
        get(self, *more)

    monkeypatch.setattr(Mirror, "_get", noted)
    first.bucket.delete([name for name in first.bucket.sizes() if name.endswith("metadata")])
    with pytest.raises(InputError, match=r"\(checkpoints/2: data/2-\w+/0/meta/metadata is missing"):
        runs("two", resume)
    assert len(fetches) == 1


def test_a_damaged_file_on_disk_is_fetched_again(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    first.close()
    path = first.directory / FOLDER / "2" / "meta" / "metadata"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b" ")
    again = runs("one")
    assert path.read_bytes() == content
    assert again.on_disk == [2]


@pytest.mark.parametrize(
    ("number", "kind", "fix"),
    [(errno.EIO, RunAgain, "bring the disk back, or"), (errno.EACCES, InputError, "")],
)
def test_a_disk_that_cannot_be_read_is_one_line(
    runs: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    fix: str,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "/disk/4/state")

    monkeypatch.setattr(Mirror, "_on_disk", fail)
    why = rf"^/disk/4/state cannot be read or written \({os.strerror(number)}\): {fix}.*make it"
    with pytest.raises(kind, match=why):
        runs("one")


def test_without_resume_a_used_folder_is_refused(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    first.close()
    with pytest.raises(InputError, match=r"already contains checkpoints \(newest: 2\)"):
        runs("two", None)


def test_another_run_is_refused_in_a_used_folder(runs: Callable[..., Run], tmp_path: Path) -> None:
    other = Checkpoints(tmp_path / "other" / FOLDER, 2)
    save(other, 1)
    other.close()
    first = runs("one", str(tmp_path / "other")).begin()  # still empty
    first.save(2)
    first.finish()
    first.close()
    for resume in (str(tmp_path / "other"), "s3://bucket/other/checkpoints/1"):
        with pytest.raises(
            InputError,
            match=rf"s3://bucket/run already contains checkpoints \(newest: 2\), and --resume "
            f"{resume} is another run: use --resume latest, or choose another folder",
        ):
            runs("two", resume)
    for own in (first.directory, first.directory / FOLDER / "2"):
        runs("one", str(own)).close()
    assert first.stored == [2]


def test_an_upload_that_falls_behind_says_so_and_the_last_is_uploaded(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin(keep=1)
    released = slow_upload(run, monkeypatch)
    run.save(2, 3)  # which also deletes checkpoint 1 on disk
    assert run.on_disk == [3]
    assert run.stored == []
    behind = [line for line in run.said if "is not uploaded" in line]
    assert len(behind) == 1
    assert (
        "checkpoint 2 is not uploaded to s3://bucket/run (an upload is still running" in behind[0]
    )
    released.set()
    run.finish()
    assert run.stored == [3]
    assert len(list((run.directory / mirror._UPLOADING).rglob("*"))) == 1  # the empty folder


def test_an_upload_that_fails_is_tried_again(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    put, failures = run.bucket.put, iter([True, True])

    def fail(name: str, data: Any, *more: Any) -> None:
        if name.startswith("data/") and next(failures, False):
            raise Unavailable("s3://bucket/run: cannot write (503 Slow Down)")
        put(name, data, *more)

    monkeypatch.setattr(run.bucket, "put", fail)
    run.save(2)
    run.finish()
    assert run.stored == [2]
    assert "warning: checkpoint 2 is not uploaded yet: s3://bucket/run: cannot write" in str(
        run.said
    )


def test_no_checkpoint_is_complete_before_its_metrics(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    put, failures, names = run.bucket.put, iter([True, True]), list[str]()

    def fail(name: str, data: Any, *more: Any) -> None:
        if name == "metrics.jsonl" and next(failures, False):
            raise Unavailable("s3://bucket/run: cannot write (503 Slow Down)")
        put(name, data, *more)
        names.append(name)

    monkeypatch.setattr(run.bucket, "put", fail)
    (run.directory / "metrics.jsonl").write_text('{"step": 2}\n')
    run.save(2)
    run.finish()
    assert names.index("metrics.jsonl") < names.index("checkpoints/2.json")


def test_no_checkpoint_is_complete_before_the_records_of_all_processes(
    runs: Callable[..., Run],
) -> None:
    """Each process has a disk of its own, and process 0 has all shards."""
    run = runs("one", None).begin()
    run.save(2)
    run.finish()
    run.bucket.delete(["checkpoints/2.json"])
    uploader, shards = run.mirror, bucket_checkpoints.Layout(1, ((0,), (0,)))
    uploader.own_disk, uploader._count = True, 2
    (run.directory / "examples.1.jsonl").write_text('{"step": 2}\n')

    def upload(process: int) -> None:
        uploader._process, uploader._first = process, process == 0
        part = bucket_checkpoints.Part("a" * 12, shards, process, (0,))
        uploader._upload(mirror._Upload(run.directory / FOLDER / "2", (FOLDER,), 2, part))

    first = threading.Thread(target=upload, args=(0,))
    first.start()
    first.join(1.5)  # more than the second between two looks
    assert first.is_alive()
    assert run.stored == []
    upload(1)
    assert run.bucket.get("examples.1.jsonl") is not None
    first.join(20)
    assert run.stored == [2]


@pytest.mark.parametrize("how", ["a large file", "many files", "again", "nothing"])
def test_process_0_waits_as_long_as_another_makes_progress(
    runs: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = runs("one", None).begin()
    run.save(2)
    run.finish()
    run.bucket.delete(["checkpoints/2.json"])
    other = Mirror(run.bucket, tmp_path / "other", staged=True, say=run.said.append)
    shards = bucket_checkpoints.Layout(2, ((0,), (1,)))
    uploads = []
    for process, one in enumerate((run.mirror, other)):
        one.own_disk, one._count, one._process, one._first = True, 2, process, process == 0
        part = bucket_checkpoints.Part("a" * 12, shards, process, (process,))
        uploads.append(mirror._Upload(run.directory / FOLDER / "2", (FOLDER,), 2, part))
    store = FakeClient(2).stores()[1]
    monkeypatch.setattr(key_value, "of_run", lambda: store)
    now, turns = [time.monotonic()], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    other._attempt_at = now[0] - 1000

    def wait(seconds: float) -> bool:
        turns[0], now[0] = turns[0] + 1, now[0] + 500
        if turns[0] == 5:
            other._upload(uploads[1])
        elif how == "a large file" or (how == "again" and turns[0] == 1):
            if how == "a large file":
                other._attempt_at = now[0]
            other._count_sent(1)  # it fails after 1500 s, and the next attempt is as long
        elif how == "many files":
            run.bucket.put(f"data/2-{'a' * 12}/1/{turns[0]}", b"1")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(run.mirror._over, "wait", wait)
        if how == "nothing":
            with pytest.raises(bucket_checkpoints.Incomplete, match="process 1 has not uploaded"):
                run.mirror._upload(uploads[0])
            return
        run.mirror._upload(uploads[0])
    assert turns[0] == 5
    assert run.stored == [2]


def _second_checkpoint_only_on_disk(runs: Callable[..., Run]) -> Run:
    run = runs("one", None).begin()
    for step in (2, 4):
        run.save(step)
        run.finish()
    run.close()
    run.bucket.delete(["checkpoints/4.json"])
    return run


def test_a_resume_names_a_later_checkpoint_that_a_disk_lost_files_of(
    runs: Callable[..., Run],
) -> None:
    first = _second_checkpoint_only_on_disk(runs)
    (first.directory / FOLDER / "4" / "manifest.json").unlink()
    run = runs("one")
    run.said.clear()
    run.mirror.own_disk = True  # it ran alone, on a disk of its own
    run.mirror._fetch_parts(None, 1, (0,))
    assert "warning: checkpoint 4 cannot be used: process 0: " in str(run.said)
    assert run.on_disk == [2]


def test_a_resume_names_a_damaged_checkpoint_that_another_disk_lacks(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _second_checkpoint_only_on_disk(runs)
    state = (first.directory / FOLDER / "4" / "state").rglob("*")
    path = max((one for one in state if one.is_file()), key=lambda one: one.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run = runs("one")
    monkeypatch.setattr(Mirror, "_decide", lambda *_: next(decisions))
    decisions = iter(["upload checkpoints 4", "bucket checkpoints 2"])
    run.said.clear()
    run.mirror._fetch_parts(None, 1, (0,))
    assert "warning: checkpoint 4 cannot be used: " in str(run.said)
    assert run.on_disk == [2]


def test_two_saves_of_a_step_are_not_mixed(runs: Callable[..., Run]) -> None:
    """A resume that begins with a validation saves its step to best/, then to checkpoints/."""
    run = runs("one", None)
    run.mirror._part = bucket_checkpoints.Part(
        "a" * 12, bucket_checkpoints.Layout(), 0, (0,)
    )  # as with several processes
    run.begin()
    assert run.checkpoints is not None
    run.checkpoints.save_best(make_state(2), meta_of(2))
    run.checkpoints.wait()
    run.finish()
    run.save(2)
    run.finish()
    stored = bucket_checkpoints.BucketCheckpoints(run.bucket, run.said.append)
    found = stored.read(FOLDER, 2)
    assert found.data != stored.read("best", 2).data
    stored.fetch(found, [0], run.directory, run.directory / "fetched")  # verifies it


@pytest.mark.parametrize(("every", "left"), [(2, []), (1, [2])])
def test_a_first_checkpoint_that_another_disk_lacks_is_moved_aside(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, every: int, left: list[int]
) -> None:
    """If more than the first checkpoint is lost, the run refuses to start instead."""
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    first.close()
    first.bucket.delete(["checkpoints/2.json"])
    run = runs("one")
    run.mirror._every = every
    monkeypatch.setattr(Mirror, "_decide", lambda *_: "")  # as if another process had none
    run.mirror._fetch_parts(None, 1, (0,))
    assert run.on_disk == left


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


def test_a_last_checkpoint_that_cannot_be_linked_is_not_done(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(mirror.files, "link", full)
        run.save(2)
        why = rf"2 is complete in .*, but not in s3://bucket/run \(.*{os.strerror(errno.ENOSPC)}"
        with pytest.raises(RunAgain, match=why):
            run.finish()
    run.close()
    again = runs("one").begin()
    again.finish()
    assert again.stored == [2]


def test_an_unexpected_error_in_an_upload_ends_the_run(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()

    def fail(*_: Any) -> None:
        raise MemoryError("not enough")

    monkeypatch.setattr(run.bucket, "put", fail)
    run.save(2)
    with pytest.raises(MemoryError, match="not enough"):
        run.finish()
    with pytest.raises(MemoryError, match="not enough"):
        run.mirror.check()


def test_a_large_file_may_take_longer_than_a_bucket_that_takes_nothing(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    put, now = run.bucket.put, [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(name: str, data: Any, *sent: Callable[[int], object]) -> None:
        for _ in range(10 if sent and name.endswith("/meta/metadata") else 0):
            now[0] += mirror._GIVE_UP_S - 1
            sent[0](10_000)
            assert not run.mirror._is_stuck()
        put(name, data)

    monkeypatch.setattr(run.bucket, "put", slow)
    run.save(2)
    run.finish()
    assert run.stored == [2]


def test_files_of_the_run_are_progress(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    put, now = run.bucket.put, [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(name: str, data: Any, *sent: Callable[[int], object]) -> None:
        if name.startswith("samples/"):
            now[0] += mirror._GIVE_UP_S - 1
            assert not run.mirror._is_stuck()
        put(name, data, *sent)

    monkeypatch.setattr(run.bucket, "put", slow)
    (run.directory / "samples").mkdir()
    for number in range(4):
        (run.directory / "samples" / f"{number}.png").write_bytes(b"1")
    run.save(2)
    run.finish()
    assert run.stored == [2]


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
        if name == "log.txt":
            logs.append(len(data))
            (run.directory / name).write_bytes(data + b"1" * 1000)

    monkeypatch.setattr(run.bucket, "put", fail)
    (run.directory / "samples").mkdir()
    for name in ("log.txt", "samples/1.png"):
        (run.directory / name).write_bytes(b"1")
    run.save(2)
    with pytest.raises(RunAgain, match="checkpoint 2 is complete in"):
        run.finish()
    assert len(logs) > 1


def test_an_attempt_may_take_as_long_as_the_one_before(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None)
    one, now = run.mirror, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one._count_sent(1)
    now[0] = 1000.0
    one._count_sent(9)
    one._sent, one._attempt_at = 0, 1000.0  # it has failed
    now[0] = 2599.0
    one._count_sent(10)
    assert not one._is_stuck()
    now[0] = 2601.0
    assert one._is_stuck()


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
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # its files are open
    run.close()
    released.set()
    assert run.mirror._thread is not None
    run.mirror._thread.join(20)
    assert not run.mirror._thread.is_alive()
    assert run.stored == []
    assert not any("not uploaded yet" in line for line in run.said)


def test_another_process_that_ends_keeps_the_files_of_an_upload(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the run directory, of which only process 0 keeps the copy."""
    run = runs("one", None).begin()
    released = slow_upload(run, monkeypatch)
    other = Mirror(run.bucket, run.directory, staged=False, say=run.said.append)
    other._first = other._active = False
    other.start(2, 1)
    other.close()
    released.set()
    run.finish()
    assert run.stored == [1]
    assert not any("not uploaded yet" in line for line in run.said)


def test_a_step_that_is_saved_again_keeps_the_files_of_its_upload(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin()
    released = slow_upload(run, monkeypatch)
    assert run.checkpoints is not None
    run.checkpoints.forget_after(0)  # as after a rollback
    run.save(1)
    released.set()
    run.finish()
    assert run.stored == [1]
    assert not any("not uploaded yet" in line for line in run.said)


def test_a_checkpoint_that_is_deleted_meanwhile_does_not_hold_up_the_files(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None)
    (run.directory / FOLDER / "2.deleted" / "state").mkdir(parents=True)
    (run.directory / "metrics.jsonl").write_text("1\n")
    scandir = os.scandir

    def look(path: Any) -> Any:
        if "2.deleted" in str(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)
    run.mirror._upload_files()
    assert run.bucket.get("metrics.jsonl") is not None
    assert not run.said


def test_a_resume_from_an_earlier_step_supersedes_the_later_ones(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    for step in (2, 4):
        first.save(step)
        first.finish()
    first.close()
    second = runs("two", "2").begin()
    second.save(3)
    second.finish()
    assert second.stored == [2, 3]
    assert list(second.bucket.sizes("superseded")) == ["superseded/checkpoints/4.json"]


@pytest.mark.parametrize("resume", ["latest", "4"])
@pytest.mark.parametrize("steps", [(3,), (4,)])
def test_a_disk_does_not_bring_back_what_another_machine_has_abandoned(
    runs: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[int, ...],
    resume: str,
) -> None:
    first = runs("one", None).begin()
    for step in (2, 4):
        first.save(step)
        first.finish()
    first.close()
    second = runs("two", "2").begin()
    an_hour_later(monkeypatch)
    second.save(*steps)
    second.finish()
    second.close()
    if resume == "4" and steps == (3,):  # asked for
        assert runs("one", resume).on_disk == [2, 4]
        return
    again = runs("one", resume).begin()
    assert again.on_disk[-1] == steps[-1]
    used, saved = (
        (one.directory / FOLDER / str(steps[-1]) / manifest.NAME).read_text()
        for one in (again, second)
    )
    assert used == saved
    assert "warning: another machine has resumed s3://bucket/run from an earlier" in str(again.said)
    again.finish()
    assert again.stored == [2, *steps]


def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all later saves seem to be an hour later."""

    def now(zone: datetime.tzinfo) -> datetime.datetime:
        return datetime.datetime.now(zone) + datetime.timedelta(hours=1)

    clock = types.SimpleNamespace(datetime=types.SimpleNamespace(now=now), UTC=datetime.UTC)
    monkeypatch.setattr(manifest, "datetime", clock)


def certified(runs: Callable[..., Run]) -> Run:
    """Returns a run with checkpoints 2, which is certified, and 6."""
    run = runs("one", None).begin(keep=1)
    (run.directory / "log.txt").write_text("")
    (run.directory / layout.CERTIFIED).write_text("2\n")
    for step in (2, 4, 6):
        run.save(step)
        run.finish()
    assert run.stored == [2, 6]  # with keep 1, retention keeps the certified one, too
    return run


def test_another_machine_resumes_from_the_certified_checkpoint(runs: Callable[..., Run]) -> None:
    first = certified(runs)
    assert first.mirror.set_aside_after(2) == ""
    assert first.stored == [2]
    assert "uncertified/checkpoints/6.json" in first.bucket.sizes()
    first.save(8)
    first.finish()
    assert first.stored == [2]  # an upload that was under way does not complete
    first.close()
    second = runs("two").begin(keep=1)
    assert second.on_disk == [2]
    assert layout.certified_step(second.directory) == 2
    second.save(4)
    second.finish()
    assert second.stored == [2, 4]
    found = bucket_checkpoints.BucketCheckpoints(second.bucket, second.said.append)
    assert found.read("uncertified/checkpoints", 6).files  # which are kept
    assert second.bucket.get(f"{found.read('uncertified/checkpoints', 6).data}/0/manifest.json")


def test_a_run_without_a_certified_checkpoint_is_not_started_fresh(
    runs: Callable[..., Run],
) -> None:
    first = certified(runs)
    assert first.mirror.set_aside_after(0) == ""
    first.close()
    with pytest.raises(InputError, match="no checkpoint in s3://bucket/run can be used, and more"):
        runs("two")


@pytest.mark.parametrize("disk", ["one", "two"])
def test_the_next_start_moves_uncertified_checkpoints_that_the_bucket_kept(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    run = certified(runs)
    set_aside(run.directory / FOLDER / "6", "wrong", run.said.append, layout.UNCERTIFIED)
    put = Bucket.put

    def fail(self: Bucket, name: str, data: Any, *more: Any) -> Any:
        if name.startswith("uncertified"):
            raise Unavailable("no")
        return put(self, name, data, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", fail)
        patch.setattr(mirror, "_GIVE_UP_S", 0.0)
        patch.setattr(mirror, "_BETWEEN_MOVES_S", 0.0)
        assert run.mirror.set_aside_after(2) == "no"
        assert run.stored == [2, 6]
        run.close()
        for place in ("one", "two"):
            with pytest.raises(Unavailable):  # it does not resume from 6
                runs(place)
    again = runs(disk).begin(keep=1)
    assert again.on_disk == again.stored == [2]
    assert not (again.directory / mirror._UNCERTIFIED_DUE).exists()
    again.close()
    stored = [name for name in again.bucket.sizes() if name.startswith("uncertified/")]
    assert stored == ["uncertified/checkpoints/6.json"]  # no files of the folder on disk


def test_a_list_of_uncertified_checkpoints_does_not_move_later_saves(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = certified(runs)
    set_aside(run.directory / FOLDER / "6", "wrong", run.said.append, layout.UNCERTIFIED)

    def fail(*_: Any) -> None:
        raise Unavailable("no")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", fail)
        patch.setattr(mirror, "_GIVE_UP_S", 0.0)
        patch.setattr(mirror, "_BETWEEN_MOVES_S", 0.0)
        assert run.mirror.set_aside_after(2) == "no"
        run.close()
    assert mirror._UNCERTIFIED_DUE not in run.bucket.sizes()
    other = runs("two", "2").begin(keep=3)
    other.save(8)
    other.finish()
    other.close()
    again = runs("one")
    assert again.stored == [2, 8]
    assert max(again.on_disk) == 8
    assert not (again.directory / mirror._UNCERTIFIED_DUE).exists()


def test_a_fresh_start_drops_the_list_of_uncertified_checkpoints(runs: Callable[..., Run]) -> None:
    first = runs("one", None)
    first.close()
    first.bucket.put(mirror._UNCERTIFIED_DUE, b'["data/2-000000000000"]')
    (first.directory / mirror._UNCERTIFIED_DUE).write_text("[]")
    again = runs("one", None)
    assert mirror._UNCERTIFIED_DUE not in again.bucket.sizes()
    assert not (again.directory / mirror._UNCERTIFIED_DUE).exists()
    again.close()
    again.bucket.put(mirror._UNCERTIFIED_DUE, b"2")
    with pytest.raises(InputError, match=r"s3://bucket/run/.uncertified-due is damaged: .*delete"):
        runs("one")


def test_a_kill_before_the_last_uploads_loses_nothing(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    first.close()
    checkpoints = Checkpoints(first.directory / FOLDER, 2)  # neither is uploaded
    checkpoints.save(make_state(4), with_best(4, 4), best=True)
    checkpoints.wait()
    checkpoints.save(make_state(6), with_best(6, 4))
    checkpoints.close()
    again = runs("one").begin()
    again.finish()
    assert again.stored == [2, 6]
    assert "best/4.json" in again.bucket.sizes()
    assert not again.bucket.sizes("superseded")


def test_the_best_does_not_supersede_later_checkpoints(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("one", None).begin(keep=3)
    released = slow_upload(run, monkeypatch)
    assert run.checkpoints is not None
    run.checkpoints.save(make_state(2), meta_of(2), best=True)
    run.save(3)
    released.set()
    run.finish()
    assert run.stored == [1, 3]
    assert "best/2.json" in run.bucket.sizes()


def test_a_best_checkpoint_replaces_a_later_one_that_was_abandoned(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    assert first.checkpoints is not None
    first.checkpoints.save(make_state(6), with_best(6, 6), best=True)
    first.checkpoints.wait()
    first.finish()
    first.close()
    second = runs("two", "2").begin()
    assert second.checkpoints is not None
    second.checkpoints.save_best(make_state(3), with_best(3, 3))
    second.checkpoints.wait()
    second.finish()
    assert list(second.bucket.sizes("best")) == ["best/3.json"]
    assert second.stored == [2, 6]  # until a checkpoint is saved
    second.save(4)
    second.finish()
    assert list(second.bucket.sizes("best")) == ["best/3.json"]
    assert second.stored == [2, 4]


HERE, THERE = ("a" * 12, 0, True), ("a" * 12, 1, True)
LACKS = ("a" * 12, 1, False)


@pytest.mark.parametrize(
    ("everywhere", "only", "expected"),
    [
        ([{}, {}], None, "bucket 2"),
        ([{4: HERE}, {4: THERE}], None, "disk 4"),
        ([{4: HERE}, {}], None, "bucket 2"),
        ([{4: HERE}, {4: LACKS}], None, "upload 4"),  # from which the second one fetches its part
        ([{4: HERE}, {4: ("b" * 12, 1, True)}], None, "bucket 2"),  # of another start of the run
        ([{1: HERE, 2: HERE}, {1: THERE, 2: THERE}], None, "bucket 2"),
        ([{1: HERE, 4: HERE}, {1: THERE, 4: THERE}], 1, "disk 1"),
        ([{4: HERE}, {4: THERE}], 3, ""),
    ],
)
def test_hosts_agree_on_the_newest_checkpoint_that_all_can_have(
    runs: Callable[..., Run],
    everywhere: list[dict[int, Any]],
    only: int | None,
    expected: str,
) -> None:
    run = runs("one", None).begin()
    run.save(2)
    run.finish()
    part = bucket_checkpoints.Part("a" * 12, bucket_checkpoints.Layout(2, ((0,), (1,))), 0, (0,))
    folder = run.directory / FOLDER / "4"
    folder.mkdir()
    (folder / bucket_checkpoints.PART).write_bytes(part.to_json())
    assert run.mirror._decide(everywhere, only) == expected.replace(" ", " checkpoints ")


def test_hosts_resume_from_the_best_checkpoint_that_a_step_names(
    runs: Callable[..., Run],
) -> None:
    first = runs("one", None).begin(keep=1)
    assert first.checkpoints is not None
    first.checkpoints.save(make_state(2), with_best(2, 2), best=True)
    first.checkpoints.wait()
    first.finish()
    first.save(4)
    first.finish()
    first.close()
    assert first.stored == [4]
    run = runs("two", "4")
    run.mirror.own_disk = True
    assert run.mirror._fetch_parts(2, 1, (0,)) == "best/2"
    assert layout.steps(run.directory / "best") == [2]
    assert run.mirror._fetch_parts(None, 1, (0,)) == "checkpoints/4"


def test_hosts_do_not_agree_on_what_another_has_abandoned(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    first.save(2, 4)
    first.finish()
    first.close()
    second = runs("two", "2").begin()
    an_hour_later(monkeypatch)
    second.save(3)
    second.finish()
    own = bucket_checkpoints.part_of(first.directory / FOLDER / "4").save
    everywhere = [{4: (own, 0, True)}, {4: (own, 1, True)}]
    assert first.mirror._decide(everywhere, None) == "bucket checkpoints 3"
    assert first.mirror._decide(everywhere, 4) == "disk checkpoints 4"


def test_files_outside_the_run_directory_are_not_fetched(runs: Callable[..., Run]) -> None:
    first = runs("one", None).begin()
    first.save(2)
    first.finish()
    first.close()
    hidden = (".lock", ".files-due", ".fetching/x", ".uploading/x")
    for name in ("secret.sh", "checkpoints/9/state/x", "samples/a.txt", *hidden):
        first.bucket.put(name, b"1")
    second = runs("two")
    there = {path.name for path in second.directory.iterdir()}
    assert there == {FOLDER, "samples", ".lock"}
    assert second.on_disk == [2]


def test_files_are_fetched_at_the_same_time_and_not_sent_back(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs("one", None).begin()
    for name in ("log.txt", "metrics.jsonl"):
        (first.directory / name).write_text("old\n")
    first.save(2)
    first.finish()
    first.close()
    both, download = threading.Barrier(2, timeout=20), Bucket.download

    def wait(self: Bucket, name: str, *more: Any, **flags: Any) -> Any:
        if not name.startswith("data/"):
            both.wait()
        return download(self, name, *more, **flags)

    monkeypatch.setattr(Bucket, "download", wait)
    second = runs("two")
    sent: list[str] = []
    put = second.bucket.put

    def noted(name: str, *more: Any) -> None:
        sent.append(name)
        put(name, *more)

    monkeypatch.setattr(second.bucket, "put", noted)
    (second.directory / "metrics.jsonl").write_text("old\nnew\n")
    second.mirror._upload_files()
    assert sent == ["metrics.jsonl"]


def test_files_are_not_fetched_through_links(runs: Callable[..., Run], tmp_path: Path) -> None:
    first = runs("one", None).begin()
    (first.directory / "metrics.jsonl").write_text("1\n")
    (first.directory / "samples" / "more").mkdir(parents=True)
    (first.directory / "samples" / "more" / "a.txt").write_text("1\n")
    first.save(2)
    first.finish()
    first.close()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / ".metrics.jsonl.partial").symlink_to(mine / "file")
    runs("two").close()
    assert (tmp_path / "two" / "metrics.jsonl").read_text() == "1\n"
    (tmp_path / "three" / "samples").mkdir(parents=True)
    (tmp_path / "three" / "samples" / "more").symlink_to(mine)
    with pytest.raises(InputError, match="contains a symbolic link, samples/more, and a run must"):
        runs("three")
    assert [(path.name, path.read_text()) for path in mine.iterdir()] == [("file", "mine")]


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


def test_a_stage_has_the_name_of_the_run(tmp_path: Path) -> None:
    first, second = (
        bucket_checkpoints.stage(f"s3://bucket/{name}/run", tmp_path, process=1)
        for name in ("a", "b")
    )
    assert first != second
    assert first.name == "run-1"
    assert first.parent.name.startswith("run-")
    assert first.parent.parent == tmp_path / "buckets"


@pytest.mark.parametrize(
    ("data", "fsdp", "shard", "expected"),
    [(1, 8, "params", tuple(range(8))), (2, 4, "params", (0, 1, 2, 3)), (2, 4, "none", (0,))],
)
def test_one_process_has_all_shards(
    data: int, fsdp: int, shard: str, expected: tuple[int, ...]
) -> None:
    found, held = mirror._layout(mesh_of(data, fsdp), shard)
    assert found.of_part == (expected,)
    assert held == [expected]
    assert jax.process_count() == 1
