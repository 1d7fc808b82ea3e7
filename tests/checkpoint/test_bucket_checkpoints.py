"""Tests checkpoints in a bucket: complete or not there, and every byte verified."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore
from small_state import make_state, mesh_of, save, target_of

from jaxtrain.checkpoint import bucket_checkpoints, manifest
from jaxtrain.checkpoint.bucket_checkpoints import BucketCheckpoints, Incomplete, Layout
from jaxtrain.checkpoint.restore import named, restore
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import bucket as storage_bucket
from jaxtrain.storage import disks
from jaxtrain.storage.bucket import Bucket, Unavailable

FOLDER = "checkpoints"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 2, 4 and 6, for tests that only read it."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory / FOLDER, 3)
    save(checkpoints, 2, 4, 6)
    checkpoints.close()
    return directory


@pytest.fixture
def store() -> BucketCheckpoints:
    return BucketCheckpoints(Bucket("s3://bucket/run", MemoryStore()), print)


@pytest.fixture
def upload(saved: Path, store: BucketCheckpoints) -> Callable[..., str]:
    def action(step: int, *, commit: bool = True) -> str:
        path = saved / FOLDER / str(step)
        part = bucket_checkpoints.part_of(path)
        data = bucket_checkpoints.data_of(step, part)
        store.upload(path, data, 0, lambda count: None)
        if commit:
            store.commit(FOLDER, step, data, part.layout)
        return data

    return action


def get(store: BucketCheckpoints, step: int, run: Path) -> Path:
    target = run / FOLDER / str(step)
    store.fetch(store.read(FOLDER, step), [0], run, target)
    return target


def test_a_fetched_checkpoint_is_the_uploaded_one(
    saved: Path, store: BucketCheckpoints, upload: Callable[..., str], tmp_path: Path
) -> None:
    upload(4)
    target = get(store, 4, tmp_path)
    assert manifest.verify(target) == ""
    for path in (saved / FOLDER / "4").rglob("*"):
        if path.is_file():
            assert (target / path.relative_to(saved / FOLDER / "4")).read_bytes() == (
                path.read_bytes()
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER]
    state = restore(target, target_of(make_state(4), mesh_of(4)))
    for name, array in named(make_state(4)).items():
        np.testing.assert_array_equal(np.asarray(named(state)[name]), np.asarray(array))


def test_without_its_manifest_a_checkpoint_is_not_there(
    store: BucketCheckpoints, upload: Callable[..., str]
) -> None:
    data = upload(4, commit=False)
    assert store.steps() == []
    assert store.missing(data, Layout()) == ([], sum(store.bucket.sizes(data).values()))
    store.collect(keep=[data])
    assert len(store.bucket.sizes(data)) > 3
    store.collect()  # what an interrupted upload left
    assert store.bucket.sizes() == {}


@pytest.mark.parametrize("lost", ["manifest.json", "state/manifest.ocdbt"])
def test_an_incomplete_upload_is_not_committed(
    store: BucketCheckpoints, upload: Callable[..., str], lost: str
) -> None:
    data = upload(4, commit=False)
    store.bucket.delete([f"{data}/0/{lost}"])
    if lost == "manifest.json":
        assert store.missing(data, Layout())[0] == [0]
    with pytest.raises(Incomplete, match=f"{lost} is missing"):
        store.commit(FOLDER, 4, data, Layout())
    assert store.steps() == []
    upload(4)  # uploads only what is missing
    assert store.steps() == [4]


def test_an_upload_continues_where_it_was_interrupted(
    store: BucketCheckpoints, upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = upload(4)
    store.bucket.delete([f"{data}/0/meta/metadata"])
    put: list[str] = []
    monkeypatch.setattr(store.bucket, "put", lambda name, *_: put.append(name))
    upload(4, commit=False)
    assert put == [f"{data}/0/meta/metadata", f"{data}/0/manifest.json"]


@pytest.mark.parametrize("how", ["changed", "shorter", "missing"])
def test_a_damaged_file_is_found_before_it_is_used(
    store: BucketCheckpoints, upload: Callable[..., str], tmp_path: Path, how: str
) -> None:
    data = upload(4)
    name = max(store.bucket.sizes(f"{data}/0/state"), key=lambda one: store.bucket.sizes()[one])
    found = store.bucket.get(name)
    assert found is not None
    content = bytearray(found.data)
    content[len(content) // 2] ^= 1
    if how == "missing":
        store.bucket.delete([name])
    else:
        store.bucket.put(name, bytes(content if how == "changed" else content[:-1]))
    with pytest.raises(Incomplete, match=name):
        get(store, 4, tmp_path)
    assert not (tmp_path / FOLDER / "4").exists()
    store.set_aside(FOLDER, 4, "damaged")
    assert store.steps() == []
    assert store.steps(f"damaged/{FOLDER}") == [4]
    store.collect()
    assert store.bucket.sizes(data)  # kept as evidence


def test_an_interrupted_download_continues(
    store: BucketCheckpoints,
    upload: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = upload(4)
    get(store, 4, tmp_path)
    target = tmp_path / FOLDER / "4"
    (target / "meta" / "metadata").write_text("{}")
    fetched: list[str] = []
    download = store.bucket.download

    def counted(name: str, *more: Any, **flags: Any) -> list[str] | None:
        fetched.append(name)
        return download(name, *more, **flags)

    monkeypatch.setattr(store.bucket, "download", counted)
    get(store, 4, tmp_path)
    assert fetched == [f"{data}/0/meta/metadata"]
    assert manifest.verify(target) == ""


def test_the_newest_and_those_at_the_cadence_are_kept(
    store: BucketCheckpoints, upload: Callable[..., str]
) -> None:
    folders = [upload(step) for step in (2, 4, 6)]
    store.delete_oldest(FOLDER, 1, every=4)
    store.collect()
    assert store.steps() == [4, 6]
    assert [bool(store.bucket.sizes(folder)) for folder in folders] == [False, True, True]


def test_only_files_of_checkpoints_are_deleted(
    store: BucketCheckpoints, upload: Callable[..., str]
) -> None:
    kept = ("data/videos/a.mp4", "data/4.mp4", "data/4-0123456789abc/a.mp4", "data/4-0123456789ab")
    for name in kept:
        store.bucket.put(name, b"1")
    upload(4, commit=False)
    store.collect()
    assert sorted(store.bucket.sizes()) == sorted(kept)


def test_later_checkpoints_are_superseded(
    store: BucketCheckpoints, upload: Callable[..., str]
) -> None:
    for step in (2, 4, 6):
        upload(step)
    store.supersede(2)
    assert store.steps() == [2]
    assert store.steps(f"superseded/{FOLDER}") == [4, 6]
    store.collect()
    assert all(store.bucket.sizes(store.read(f"superseded/{FOLDER}", 4).data))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"step": 5},
        {"data": "data/4-../../x"},
        {"data": "data/5-0123456789ab"},
        {"files": {"../x": {"bytes": 0, "sha256": []}}},
        {"files": {"0/x": {"bytes": 1, "sha256": []}}},
        {"files": 3},
        {"layout": {"shards": 1, "of_part": [[1]]}},
        {"layout": {"shards": 2**40, "of_part": [[1]]}},
        {"layout": None},
    ],
)
def test_a_forged_manifest_is_refused(
    store: BucketCheckpoints, upload: Callable[..., str], change: dict[str, object]
) -> None:
    upload(4)
    found = store.bucket.get(f"{FOLDER}/4.json")
    assert found is not None
    content = json.loads(found.data)
    store.bucket.put(f"{FOLDER}/4.json", json.dumps(content | change).encode())
    with pytest.raises(Incomplete, match="does not match its own checksum"):
        store.read(FOLDER, 4)
    content = {**content, **change}
    content.pop("sha256")
    content["sha256"] = manifest.checksum(content)
    store.bucket.put(f"{FOLDER}/4.json", json.dumps(content).encode())
    with pytest.raises(Incomplete, match=r"checkpoints/4.json is damaged"):
        store.read(FOLDER, 4)


def test_a_part_is_not_taken_for_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / FOLDER / "4", tmp_path / "4")
    for shards, complete in (((0, 1), True), ((1,), False)):
        part = bucket_checkpoints.Part("0" * 12, Layout(2, ((0,), (1,))), None, shards)
        (tmp_path / "4" / bucket_checkpoints.PART).write_bytes(part.to_json())
        manifest.write(tmp_path / "4", 4)
        target = target_of(make_state(4), mesh_of(1))
        if complete:
            restore(tmp_path / "4", target)
        else:
            with pytest.raises(InputError, match="has only the shards of one process"):
                restore(tmp_path / "4", target)


def test_few_parts_are_chosen() -> None:
    sharded = Layout(4, ((0, 1), (2, 3)))
    assert sharded.complete() == [0, 1]
    assert sharded.parts_with([2, 3], first=1) == [1]
    assert sharded.parts_with([1, 2], first=1) == [0, 1]
    replicas = Layout(2, ((0, 1), (0, 1), (0,), (1,)))
    assert replicas.complete() == [0]
    assert replicas.parts_with([1], first=3) == [3]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_parts_that_cannot_be_put_together_are_damaged(
    saved: Path, store: BucketCheckpoints, tmp_path: Path, how: str
) -> None:
    layout = Layout(2, ((0,), (1,)))
    for number in range(2):
        path = tmp_path / str(number) / "4"
        shutil.copytree(saved / FOLDER / "4", path)
        (path / bucket_checkpoints.PART).write_bytes(
            bucket_checkpoints.Part("0" * 12, layout, number, (number,)).to_json()
        )
        if how == "missing":
            (path / "state" / "manifest.ocdbt").unlink()
        else:
            for index in path.glob("state/ocdbt.process_*/manifest.ocdbt"):
                index.write_bytes(os.urandom(200))
        manifest.write(path, 4)
        store.upload(path, "data/4-000000000000", number, lambda count: None)
    store.commit(FOLDER, 4, "data/4-000000000000", layout)
    found = store.read(FOLDER, 4)
    with pytest.raises(Incomplete, match="its parts cannot be put together") as caught:
        store.fetch(found, [0, 1], tmp_path / "run", tmp_path / "run" / FOLDER / "4")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / FOLDER).exists()


def test_a_checkpoint_was_saved_by_the_clock_of_its_first_part(
    saved: Path, store: BucketCheckpoints, tmp_path: Path
) -> None:
    """A resume compares it with what process 0 has on its disk."""
    for number, year in enumerate((2026, 2027)):
        path = tmp_path / str(number) / "4"
        shutil.copytree(saved / FOLDER / "4", path)
        content = json.loads((path / manifest.NAME).read_text())
        content = {**content, "saved": f"{year}-01-31T09:00:00Z"}
        del content["sha256"]
        whole = content | {"sha256": manifest.checksum(content)}
        (path / manifest.NAME).write_text(json.dumps(whole))
        store.upload(path, "data/4-000000000000", number, lambda count: None)
    store.commit(FOLDER, 4, "data/4-000000000000", Layout(2, ((0,), (1,))))
    assert store.read(FOLDER, 4).saved == "2026-01-31T09:00:00Z"


@pytest.mark.parametrize("damage", [False, True])
def test_a_fetch_continues_in_the_middle_of_a_file(
    store: BucketCheckpoints,
    upload: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: bool,
) -> None:
    name = f"{upload(4)}/0/meta/metadata"
    real, starts, broken = obstore.get, list[int](), [64]

    def breaks(bucket: Any, path: str, *, options: Any = None) -> Any:
        if path == name:
            starts.append(options["range"][0])
            if starts[-1] in broken:
                raise obstore.exceptions.GenericError("HTTP error: 503 Slow Down")
        return real(bucket, path, options=options)

    monkeypatch.setattr(obstore, "get", breaks)
    monkeypatch.setattr(storage_bucket, "_PART_BYTES", 32)
    store.bucket = store.bucket.impatient()
    with pytest.raises(Unavailable):
        get(store, 4, tmp_path)
    (partial,) = tmp_path.rglob("metadata.partial")
    assert partial.stat().st_size == 64
    if damage:
        partial.write_bytes(bytes(64))
    starts.clear()
    broken.clear()
    assert manifest.verify(get(store, 4, tmp_path)) == ""
    assert min(starts) == (0 if damage else 64)


@pytest.fixture
def stored(
    store: BucketCheckpoints, upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> BucketCheckpoints:
    """Checkpoints 2 (the best), 4 and 6, as commands find them at s3://bucket/run."""
    for step in (2, 4, 6):
        data = upload(step)
        if step == 2:
            store.commit("best", step, data, Layout())
    monkeypatch.setattr(bucket_checkpoints, "Bucket", lambda url: store.bucket)
    return store


def test_a_resume_from_a_url_is_as_from_a_folder(stored: BucketCheckpoints, tmp_path: Path) -> None:
    said: list[str] = []

    def resumed(url: str) -> str:
        path, shown = bucket_checkpoints.checkpoint_to_resume(url, tmp_path, said.append)
        assert shown == f"s3://bucket/run/{path.parent.name}/{path.name}"
        return "/".join(path.parts[-2:])

    assert resumed("s3://bucket/run") == "checkpoints/6"
    assert resumed("s3://bucket/run/checkpoints/4") == "checkpoints/4"
    assert resumed("s3://bucket/run/best/2") == "best/2"
    with pytest.raises(
        InputError, match=r"no checkpoint 3 found there; checkpoints/ has: 2, 4, 6; best"
    ):
        resumed("s3://bucket/run/checkpoints/3")
    stored.bucket.put("checkpoints/6.json", b"{}")
    there = r"checkpoints/ has: 2, 4; best/ has: 2$"
    with pytest.raises(InputError, match=rf"--resume s3:.*/6: .*/6 is not a .*; {there}"):
        resumed("s3://bucket/run/checkpoints/6")
    said.clear()
    assert resumed("s3://bucket/run") == "checkpoints/4"
    assert said[0].startswith("warning: checkpoint s3://bucket/run/checkpoints/6 is damaged (")
    newest = "the newest intact one in checkpoints/"
    assert said[-1] == f"warning: resuming from s3://bucket/run/checkpoints/4, {newest}"
    for step in (2, 4):
        stored.bucket.put(f"checkpoints/{step}.json", b"{}")
    assert resumed("s3://bucket/run") == "best/2"
    assert said[-1].endswith("/best/2, the newest intact one in best/")
    stored.bucket.put("best/2.json", b"{}")
    with pytest.raises(InputError, match=r"no checkpoint there is intact \(checkpoints/6: "):
        resumed("s3://bucket/run")
    assert stored.steps() == [2, 4, 6]  # nothing is moved: it is another run's


def test_a_command_reports_damaged_checkpoints_that_it_skips(
    stored: BucketCheckpoints, tmp_path: Path
) -> None:
    said: list[str] = []
    stored.bucket.put("best/2.json", b"{}")
    found = bucket_checkpoints.model_to_read("s3://bucket/run", "SOURCE", tmp_path, said.append)
    assert (found.parent.name, found.name) == (FOLDER, "6")
    assert said[0].startswith("warning: checkpoint s3://bucket/run/best/2 is damaged (best/2.json")
    with pytest.raises(InputError, match=r"^SOURCE s3://bucket is not a folder"):
        bucket_checkpoints.model_to_read("s3://bucket", "SOURCE", tmp_path, said.append)


def test_a_command_that_reads_a_run_gets_its_damaged_checkpoints(
    stored: BucketCheckpoints, tmp_path: Path
) -> None:
    said: list[str] = []
    damaged: dict[str, str] = {}
    stored.set_aside(FOLDER, 6, "it is wrong")
    stored.bucket.put("checkpoints/4.json", b"{}")
    stored.bucket.put("is damaged/log.txt", b"1")
    place = bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, said.append, damaged)
    found = {path.name: any(path.iterdir()) for path in (place / FOLDER).glob("[0-9]*")}
    assert found == {"2": True, "4": False}
    assert damaged.pop("checkpoints/4").startswith("checkpoints/4.json is damaged")
    assert damaged == {"damaged/checkpoints/6": "a resume has found this"}
    assert not any("is damaged" in line for line in said)


def test_a_command_notices_that_objects_have_changed(
    stored: BucketCheckpoints, tmp_path: Path
) -> None:
    said: list[str] = []

    def damaged() -> dict[str, str]:
        said.clear()
        found: dict[str, str] = {}
        bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, said.append, found)
        return found

    assert damaged() == {}
    assert len(said) == 4
    assert damaged() == {}
    assert said == []
    name = f"{stored.read(FOLDER, 6).data}/0/meta/metadata"
    right = stored.bucket.get(name)
    assert right is not None
    stored.bucket.put(name, right.data[::-1])
    assert "metadata was changed after it was saved" in damaged()["checkpoints/6"]
    assert "metadata was changed after it was saved" in damaged()["checkpoints/6"]
    stored.bucket.put(name, right.data)
    assert damaged() == {}
    assert said == [line for line in said if "checkpoints/6" in line] != []
    stored.bucket.delete([name])
    assert damaged()["checkpoints/6"].endswith("metadata is missing")


def test_files_that_do_not_fit_on_the_disk_are_not_fetched(
    stored: BucketCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.bucket.put("log.txt", b"1" * 100)
    free = [99]
    monkeypatch.setattr(disks, "free_bytes", lambda folder: free[0])
    with pytest.raises(RunAgain, match="needs 100 bytes, but only 99 are free"):
        bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, print)
    free[0] = 100
    place = bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, print)
    free[0] = 0  # the next command replaces the file
    bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, print)
    assert (place / "log.txt").read_bytes() == b"1" * 100


def test_files_of_a_run_are_fetched_at_the_same_time(
    stored: BucketCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("log.txt", "samples/1.png"):
        stored.bucket.put(name, b"1")
    both, download = threading.Barrier(2, timeout=20), stored.bucket.download

    def wait(name: str, path: Path) -> Any:
        both.wait()
        return download(name, path)

    monkeypatch.setattr(stored.bucket, "download", wait)
    place = bucket_checkpoints.run_to_read("s3://bucket/run", tmp_path, print)
    assert (place / "samples" / "1.png").read_bytes() == b"1"


def used(folder: Path) -> int:
    """Returns the bytes of the files in a folder, each counted once."""
    found = {path.stat().st_ino: path.stat() for path in folder.rglob("*") if path.is_file()}
    return sum(about.st_size for about in found.values())


@pytest.mark.parametrize("damage", [False, True])
def test_a_fetch_continues_on_a_disk_that_just_fits(
    store: BucketCheckpoints,
    upload: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: bool,
) -> None:
    name = f"{upload(4)}/0/meta/metadata"
    size = sum(count for count, _ in store.read(FOLDER, 4).files.values())
    capacity, real = [int(1.2 * size)], obstore.get

    def free(folder: Path) -> int:
        return capacity[0] - used(tmp_path)

    def breaks(bucket: Any, path: str, *, options: Any = None) -> Any:
        if path == name and options["range"][0] == 64:
            raise obstore.exceptions.GenericError("HTTP error: 503 Slow Down")
        return real(bucket, path, options=options)

    monkeypatch.setattr(disks, "free_bytes", free)
    monkeypatch.setattr(storage_bucket, "_PART_BYTES", 32)
    store.bucket = store.bucket.impatient()
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get", breaks)
        with pytest.raises(Unavailable):
            get(store, 4, tmp_path)
    assert used(tmp_path) > 0.5 * size
    capacity[0] = size
    path = get(store, 4, tmp_path)
    assert manifest.verify(path) == ""
    if damage:  # the rest of the checkpoint is used again, which needs no space
        (path / "meta" / "metadata").write_bytes(b"")
        capacity[0] = size - 1
        with pytest.raises(RunAgain, match=r"fetching checkpoint 4 of s3:.* needs"):
            get(store, 4, tmp_path)
        capacity[0] = size
        assert manifest.verify(get(store, 4, tmp_path)) == ""


def test_an_interrupted_fetch_of_another_checkpoint_takes_no_space(
    store: BucketCheckpoints,
    upload: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload(4)
    size = sum(count for count, _ in store.read(FOLDER, 4).files.values())
    left = tmp_path / bucket_checkpoints.FETCHING / "data-2-000000000000" / "0"
    left.mkdir(parents=True)
    (left / "x.partial").write_bytes(bytes(1000))
    monkeypatch.setattr(disks, "free_bytes", lambda folder: size + 999 - used(tmp_path))
    assert manifest.verify(get(store, 4, tmp_path)) == ""


def test_a_file_larger_than_its_manifest_says_is_not_downloaded(
    store: BucketCheckpoints, upload: Callable[..., str], tmp_path: Path
) -> None:
    data = upload(4)
    store.bucket.put(f"{data}/0/meta/metadata", b"1" * 100_000)
    with pytest.raises(Incomplete, match="meta/metadata has 100,000 bytes instead of at most"):
        get(store, 4, tmp_path)
    assert not any(path.stat().st_size == 100_000 for path in tmp_path.rglob("*"))


def test_a_damaged_part_file_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / FOLDER / "4", tmp_path / "4")
    whole = bucket_checkpoints.part_of(tmp_path / "4")
    assert whole.has(8, range(8))
    part = bucket_checkpoints.Part("0" * 12, Layout(4, ((0, 1), (2, 3))), 1, (2, 3))
    (tmp_path / "4" / bucket_checkpoints.PART).write_bytes(part.to_json())
    assert bucket_checkpoints.part_of(tmp_path / "4") == part
    assert part.has(4, [3])
    assert not part.has(4, [0])
    assert not part.has(2, [0])
    for text in ("{}", "[", '{"save": "../x", "layout": {}, "number": 0, "shards": []}'):
        (tmp_path / "4" / bucket_checkpoints.PART).write_text(text)
        with pytest.raises(Incomplete, match="is damaged"):
            bucket_checkpoints.part_of(tmp_path / "4")
