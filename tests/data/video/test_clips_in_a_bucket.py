"""Clips of videos in a bucket in memory; real_buckets_prepare.py uses a real API and kills."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_threads
import file_server
import pytest
import sample_videos as sample
from obstore.store import MemoryStore

from jaxtrain.data import engine
from jaxtrain.data.video import pieces, prepare_clips
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import bucket_output, lease
from jaxtrain.storage.bucket import Bucket, Busy, Unavailable
from jaxtrain.storage.bucket_output import BucketOutput
from jaxtrain.storage.lease import Lease

URL = "s3://bucket/clips"
SMALL = Settings(height=32, width=48, frames=16, min_frames=8, min_side=16, split_at_cuts=False)
RECORD = ".prepare/records/"


class Killed(BaseException):
    """Ends a run as a kill does: nothing handles it."""


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, and workers that are threads."""
    made = Bucket(URL, MemoryStore())
    monkeypatch.setattr(bucket_output, "opened", lambda url: made)
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three videos, of which one is broken."""
    folder = tmp_path / "source"
    sample.write(folder / "a.mp4", 34)
    sample.write(folder / "sub/b.mp4", 20)
    (folder / "broken.mp4").write_bytes((folder / "a.mp4").read_bytes()[:500])
    return folder


def _run(
    source: Path | str, out: Path | str = URL, settings: Settings = SMALL, share: str | None = None
) -> tuple[Any, list[str]]:
    said: list[str] = []
    report = prepare_clips.run(
        str(source), out, settings, engine=engine.Local(1), say=said.append, share=share
    )
    return report, said


def _objects(bucket: Bucket) -> dict[str, bytes]:
    found = {name: bucket.get(name) for name in bucket.sizes()}
    return {name: one.data for name, one in found.items() if one is not None}


def _files(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in (".lock", "claims", "token")
    }


def lose_lease(url: str) -> None:
    """Makes a command of this process lose its lease."""
    held = bucket_output._leases[url][1]
    assert held is not None
    held._lost = "another command has taken over"


def _scratch(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache/scratch").rglob("*") if path.is_file()]


def test_the_objects_are_the_files_of_a_local_folder(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    local, _ = _run(source, tmp_path / "out")
    report, said = _run(source)
    assert report == local
    assert (report["cut"], len(report["dropped"])) == (2, 1)
    assert f"skipped: {source}/broken.mp4" in "".join(said)
    assert _objects(bucket) == _files(tmp_path / "out")
    assert not _scratch(tmp_path)
    again, said = _run(source, f"{URL}/")
    assert again == local
    assert said == ["3 of 3 videos are already done"]


def test_a_node_that_is_lost_late_does_not_delete_the_record_of_another(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray moves its video to another node, which finishes it before the first one is dead."""
    found = {one.name: one for one in prepare_clips._find(str(source), print)}
    job = prepare_clips._Job(found["a.mp4"], Path(URL))
    real = prepare_clips._cut

    def cut(here: Any, settings: Settings) -> Any:
        record = real(here, settings)
        monkeypatch.setattr(prepare_clips, "_cut", real)
        prepare_clips._cut_to_bucket(job, settings, BucketOutput(URL), False)
        _failing(monkeypatch, lambda name: name.endswith(".mp4"), Killed())
        return record

    monkeypatch.setattr(prepare_clips, "_cut", cut)
    with pytest.raises(Killed):
        prepare_clips._cut_to_bucket(job, SMALL, BucketOutput(URL), False)
    assert job.record_name in bucket.sizes()


def test_few_records_are_in_memory_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(source)
    read: list[str] = []
    real = prepare_clips._record_in

    def record(output: BucketOutput, name: str) -> Any:
        read.append(name)
        return real(output, name)

    monkeypatch.setattr(prepare_clips, "_record_in", record)
    monkeypatch.setattr(prepare_clips, "_READ_AHEAD", 2)
    jobs = [prepare_clips._Job(one, Path(URL)) for one in prepare_clips._find(str(source), print)]
    records = prepare_clips._BucketDestination(BucketOutput(URL)).done(jobs)
    assert next(records) is not None
    assert len(read) <= 2  # the second thread may not have begun
    assert len(list(records)) == 2
    assert len(read) == 3


def _failing(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool], error: BaseException
) -> None:
    """Makes writes of some objects fail until the fixture is undone."""
    real = Bucket.put

    def put(self: Bucket, name: str, data: bytes | Path) -> None:
        if fails(name):
            raise error
        real(self, name, data)

    monkeypatch.setattr(Bucket, "put", put)


@pytest.mark.parametrize("prefix", ["sub/b.mp4.pieces/00000", RECORD, "report"])
def test_a_killed_command_resumes(
    source: Path, tmp_path: Path, bucket: Bucket, prefix: str
) -> None:
    """It is killed before it writes an object for the last time."""
    with pytest.MonkeyPatch.context() as patched:
        left = 2 if prefix == RECORD else 1
        counted = iter(range(9))
        _failing(
            patched, lambda name: name.startswith(prefix) and next(counted) == left - 1, Killed()
        )
        with pytest.raises(Killed):
            _run(source)
    assert "report.json" not in bucket.sizes()
    _run(source, tmp_path / "out")
    _, said = _run(source)
    assert any("videos are already done" in line for line in said)
    assert _objects(bucket) == _files(tmp_path / "out")


@pytest.mark.parametrize("share", [None, "task 0"])
def test_damaged_and_missing_objects_are_made_again(
    source: Path, tmp_path: Path, bucket: Bucket, share: str | None
) -> None:
    _run(source)
    before = _objects(bucket)
    (record,) = (name for name in before if b'"sub/b.mp4"' in before[name] and RECORD in name)
    for damage in (
        functools.partial(bucket.put, "sub/b.mp4.pieces/00000.mp4", b"truncated"),
        functools.partial(bucket.delete, ["sub/b.mp4.pieces/00000.mp4"]),
        functools.partial(bucket.put, record, b"{"),
        functools.partial(
            bucket.put, record, before[record].replace(b'"bytes": [', b'"bytes": 5, "x": [')
        ),
        functools.partial(bucket.put, record, before[record].replace(b'"bytes"', b'"other"')),
        functools.partial(bucket.delete, [record]),
    ):
        damage()
        _, said = _run(source, share=share)
        assert said[0] == "2 of 3 videos are already done"
        assert _objects(bucket) == before


@pytest.fixture
def remote(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The videos in s3://films."""
    with file_server.bucket(monkeypatch, "films") as memory:
        for path in source.rglob("*.mp4"):
            memory.put(str(path.relative_to(source)), path)
        yield memory


def test_videos_of_a_bucket_are_fetched_one_at_a_time(
    source: Path, tmp_path: Path, bucket: Bucket, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, present = pieces.cut, []

    def cut(path: str, *rest: Any) -> pieces.Cut:
        present.append([one.name for one in _scratch(tmp_path) if one.suffix == ".mp4"])
        return real(path, *rest)

    monkeypatch.setattr(pieces, "cut", cut)
    report, _ = _run("s3://films")
    assert present == [["a.mp4"], ["broken.mp4"], ["b.mp4"]]
    assert [one["source"] for one in report["dropped"]] == ["films/broken.mp4"]
    assert not _scratch(tmp_path)
    assert not (tmp_path / "cache/remote").exists()
    objects = _objects(bucket)
    _run(source, tmp_path / "of_files")
    for name, data in _files(tmp_path / "of_files").items():
        if name.endswith(".mp4"):
            assert objects[f"films/{name}"] == data
    # A folder on disk receives the same.
    _run("s3://films", tmp_path / "out")
    assert _files(tmp_path / "out") == objects
    assert not list((tmp_path / "out/.prepare").glob("half-*"))

    # One that has changed is cut again, and clips that it no longer has are deleted.
    assert "films/a.mp4.pieces/00001.mp4" in objects
    remote.put("a.mp4", source / "sub/b.mp4")
    _, said = _run("s3://films")
    assert said[0] == "2 of 3 videos are already done"
    changed = _objects(bucket)
    assert "films/a.mp4.pieces/00001.mp4" not in changed
    assert changed["films/a.mp4.pieces/00000.mp4"] == changed["films/sub/b.mp4.pieces/00000.mp4"]


def test_a_second_command_is_refused_unless_both_share(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_is_dead", lambda found: False)  # as on another machine
    monkeypatch.setattr(bucket_output, "Lease", functools.partial(Lease, expires_s=0.4))
    with bucket_output.held(bucket, print):
        for share in (None, "1"):
            with pytest.raises(RunAgain, match=rf"another command is using {URL} \(process "):
                _run(source, share=share)
    assert not bucket.sizes()

    # The second one starts while the first one cuts, and cuts nothing that the first has cut.
    first = iter([True])
    real, cut = prepare_clips._cut, []

    def count(job: Any, settings: Settings) -> Any:
        if next(first, False):
            _run(source, share="2")
        cut.append(job.found.name)
        return real(job, settings)

    monkeypatch.setattr(prepare_clips, "_cut", count)
    report, said = _run(source, share="1")
    assert (report["videos"], report["cut"]) == (3, 2)
    assert len(cut) == 4  # the one that the first had begun was cut twice
    assert len(set(cut)) == 3
    assert sum("skipped:" in line for line in said) <= 1
    _run(source, tmp_path / "out")
    assert _objects(bucket) == _files(tmp_path / "out")


def test_a_command_that_does_not_share_is_refused_while_others_share(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not once they are gone, killed or not."""
    monkeypatch.setattr(lease, "_is_dead", lambda found: False)  # as on another machine
    monkeypatch.setattr(bucket_output, "Lease", functools.partial(Lease, expires_s=0.4))
    monkeypatch.setattr(lease, "_RENEWALS", 1e-6)  # by hand: a busy machine renews too late
    with bucket_output.held(bucket, print, shared=True) as shares:
        (name,) = bucket.sizes()
        left = bucket.get(name)
        assert left is not None

        def renew(line: str) -> None:
            if "may be in use" in line:
                shares._renew_once()

        with pytest.raises(RunAgain, match=rf"commands that share {URL} are using it \(process "):
            prepare_clips.run(str(source), URL, SMALL, engine=engine.Local(1), say=renew)
        assert list(bucket.sizes()) == [name]
        assert _run(source, share="1")[0]["cut"] == 2
    assert not [name for name in bucket.sizes() if name.startswith(".shares")]
    bucket.put(name, left.data)  # of a command that was killed
    _, said = _run(source)
    assert f"{URL} may be in use by commands that share it, such as process" in said[0]
    assert name not in bucket.sizes()


@pytest.mark.parametrize("share", [None, "1"])
def test_a_command_that_has_lost_its_lease_writes_nothing_more(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, share: str | None
) -> None:
    real = prepare_clips._cut

    def lose(job: Any, settings: Settings) -> Any:
        record = real(job, settings)
        lose_lease(URL)
        return record

    monkeypatch.setattr(prepare_clips, "_cut", lose)
    with pytest.raises(lease.Lost, match="another command has taken over"):
        _run(source, share=share)
    assert not [name for name in bucket.sizes() if name.endswith(".mp4") or RECORD in name]
    assert "report.json" not in bucket.sizes()
    assert bucket_output._leases[URL] == (0, None)


def test_a_busy_store_does_not_end_a_command_that_may_still_have_its_lease(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_waits_s", (0.0, 0.0))
    failures = [Busy("503"), Busy("503")]

    def check(self: Lease) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(Lease, "check", check)
    with bucket_output.admitted(URL, print):
        bucket_output.BucketOutput(URL).put("a", b"1")
    assert not failures


def test_a_lease_that_a_killed_command_left_elsewhere_does_not_stop_others(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_output, "Lease", functools.partial(Lease, expires_s=0.2))
    bucket.put(lease.NAME, json.dumps({"host": "elsewhere", "machine": "another"}).encode())
    report, said = _run(source, share="1")
    assert report["cut"] == 2
    assert "waiting up to 0.2 s to see whether it is alive" in said[0]


def test_a_failed_upload_names_the_object(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        busy = Unavailable(f"{URL}: cannot write a.mp4.pieces/00001.mp4 (503): check the network")
        _failing(patched, lambda name: "a.mp4.pieces/00001" in name, busy)
        with pytest.raises(RunAgain, match=r"cannot write a\.mp4\.pieces/00001\.mp4"):
            _run(source)
        assert not _scratch(tmp_path)
    _run(source)
    _run(source, tmp_path / "out")
    assert _objects(bucket) == _files(tmp_path / "out")


def test_an_upload_of_another_size_is_not_recorded(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bucket.sizes
    monkeypatch.setattr(
        Bucket, "sizes", lambda self, folder="": dict.fromkeys(real(self, folder), 3)
    )
    with pytest.raises(RunAgain, match=r"00000.mp4 has 3 bytes in the bucket after an upload of"):
        _run(source)
    assert not [name for name in bucket.sizes() if RECORD in name]


def test_a_full_disk_is_a_temporary_failure(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> pieces.Cut:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pieces, "cut", full)
    with pytest.raises(RunAgain, match=r"temporary folder .*cache/scratch \(No space.*JAXTRAIN"):
        _run(source)
    assert not [name for name in bucket.sizes() if RECORD in name]


def test_temporary_folders_of_a_killed_command_are_removed(source: Path, tmp_path: Path) -> None:
    """And those of live processes are kept, whatever their age."""
    with subprocess.Popen(
        [sys.executable, "-c", USER, tmp_path / "cache"],
        env=os.environ | {"PYTHONPATH": str(Path(bucket_output.__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        used = Path(other.stdout.readline().strip())
        (used / "film.mp4").write_bytes(b"1")
        for path in (used, used.with_suffix(".lock")):
            os.utime(path, (1, 1))
        _run(source)
        assert (used / "film.mp4").exists()
        other.kill()
        other.wait()
        _run(source)
        assert not list((tmp_path / "cache/scratch").iterdir())


USER = """
import sys
from pathlib import Path
from jaxtrain.storage import temporary_folders
with temporary_folders.temporary_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_wrong_use_is_an_error(source: Path, bucket: Bucket, remote: Any, tmp_path: Path) -> None:
    _run(source)
    with pytest.raises(InputError, match=f"OUT {URL} contains clips with other settings"):
        _run(source, settings=dataclasses.replace(SMALL, quantizer=9))
    with pytest.raises(InputError, match=r"OUT s3://films/a is inside SOURCE s3://films"):
        _run("s3://films", "s3://films/a")
    with pytest.raises(InputError, match=r"OUT gs://films/a is inside SOURCE gs://films/"):
        _run("gcs://films/", "gs:/films/a")
    with pytest.raises(InputError, match=r"OUT https://host/a: use a local folder, s3://"):
        _run(source, "https://host/a")
    with pytest.raises(InputError, match=rf"OUT {source}/out is inside SOURCE {source},"):
        _run(source, source / "out")
    bucket.put(".prepare/settings.json", b"[")
    with pytest.raises(InputError, match=r"settings.json is damaged \(it is not JSON\)"):
        _run(source)
    for name in ("a\n.mp4", "a\udcff.mp4"):
        shutil.copy(source / "a.mp4", tmp_path / name)
        with pytest.raises(InputError, match=r"'a\\.*mp4' contains a control character, or"):
            _run(tmp_path / name)


def test_records_of_other_videos_are_listed(source: Path, bucket: Bucket) -> None:
    _run(source)
    shutil.rmtree(source / "sub")
    report, said = _run(source)
    (gone,) = report["not_in_source"]
    assert gone["folder"] == "sub/b.mp4.pieces"
    assert f"{URL} also contains clips of 1 video not in SOURCE (sub/b.mp4)" in said[-1]
    kept = bucket.get("report.json")
    assert kept is not None
    assert json.loads(kept.data) == report
