"""Checkpoints and files of a run in a bucket are fetched complete, and every byte is verified."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore

from jaxtrain.checkpoint import pointer, remote, resume
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import disks
from jaxtrain.storage.bucket import Bucket, Unavailable

URL = "s3://bucket/run"
FILES = {"state/_METADATA": b"arrays", "state/d/0": bytes(range(200)), "tokenizer.json": b"{}"}


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> RemoteRun:
    """A run in a bucket with checkpoints 2, 4, and 6, and the best one, 2."""
    bucket = Bucket(URL, MemoryStore())
    run = RemoteRun(bucket, messages.append)
    for step in (2, 4, 6):
        files = FILES | {"state/d/0": FILES["state/d/0"] + bytes([step])}
        kinds = ("checkpoints", "best") if step == 2 else ("checkpoints",)
        path = small_checkpoint.write(tmp_path / "source", step, kinds, files=files)
        small_checkpoint.copy(path, run.store, kinds)
    monkeypatch.setattr(remote, "Bucket", lambda url: bucket)
    return run


def test_a_fetched_checkpoint_is_the_stored_one(stored: RemoteRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert stored.fetch("checkpoints/4.json", run) == ""
    path = run / "checkpoints/4.json"
    assert pointer.verify(path) == ""
    source = tmp_path / "source/checkpoints/4.json"
    assert path.read_bytes() == source.read_bytes()
    for file in small_checkpoint.data_of(source).rglob("*"):
        if file.is_file():
            assert (run / file.relative_to(tmp_path / "source")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("how", ["changed", "shorter", "longer", "missing", "pointer"])
def test_damage_is_found_before_it_is_used(stored: RemoteRun, tmp_path: Path, how: str) -> None:
    name = f"{stored.store.data_folder('checkpoints', 4)}/state/d/0"
    content = FILES["state/d/0"] + b"\4"
    if how == "pointer":
        stored.bucket.put("checkpoints/4.json", b"{")
    elif how == "missing":
        stored.bucket.delete([name])
    else:
        changed = {"changed": b"x" + content[1:], "shorter": content[:-1], "longer": content * 9}
        stored.bucket.put(name, changed[how])
    damage = stored.fetch("checkpoints/4.json", tmp_path / "run")
    assert "pointer is damaged" in damage if how == "pointer" else "state/d/0" in damage
    assert not (tmp_path / "run/checkpoints/4.json").exists()


def test_only_what_is_missing_or_damaged_is_fetched(
    stored: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, got = tmp_path / "run", list[str]()
    download = stored.bucket.download

    def count(name: str, *more: Any, **options: Any) -> Any:
        got.append(Path(name).name)
        return download(name, *more, **options)

    monkeypatch.setattr(stored.bucket, "download", count)
    stored.fetch("checkpoints/4.json", run)
    assert sorted(got) == ["0", "_METADATA", "tokenizer.json"]
    got.clear()
    assert stored.fetch("checkpoints/4.json", run) == ""
    assert got == []
    folder = small_checkpoint.data_of(run / "checkpoints/4.json")
    (folder / "state/d/0").write_bytes(bytes(201))
    (folder / "tokenizer.json").unlink()
    assert stored.fetch("checkpoints/4.json", run) == ""
    assert sorted(got) == ["0", "tokenizer.json"]
    assert pointer.verify(run / "checkpoints/4.json") == ""


def test_an_outage_is_not_damage(
    stored: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise Unavailable("s3://bucket/run: cannot be reached")

    monkeypatch.setattr(stored.bucket, "download", away)
    with pytest.raises(Unavailable):
        stored.fetch("checkpoints/4.json", tmp_path / "run")
    assert not (tmp_path / "run/checkpoints/4.json").exists()


def test_a_full_disk_is_noticed_before_the_fetch(
    stored: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "free_bytes", lambda folder: 100)
    with pytest.raises(RunAgain, match=r"needs 209 bytes, but only 100 are free"):
        stored.fetch("checkpoints/4.json", tmp_path / "run")


def test_a_checkpoint_at_a_url_is_as_one_in_a_folder(
    stored: RemoteRun, tmp_path: Path, messages: list[str]
) -> None:
    def resumed(url: str) -> str:
        path, shown = resume.checkpoint_at_url(url, "--resume", tmp_path, messages.append)
        assert pointer.verify(path) == ""
        assert shown == f"{URL}/{path.parent.name}/{path.stem}"
        return f"{path.parent.name}/{path.stem}"

    assert resumed(URL) == "checkpoints/6"
    assert resumed(f"{URL}/checkpoints/4") == "checkpoints/4"
    assert resumed(f"{URL}/best/2.json") == "best/2"
    with pytest.raises(InputError, match=r"no complete checkpoint 3 .*checkpoints/ has: 2, 4, 6; "):
        resumed(f"{URL}/checkpoints/3")
    stored.bucket.put("checkpoints/6.json", b"{}")
    with pytest.raises(InputError, match=r"no complete checkpoint 6 \(its pointer is damaged"):
        resumed(f"{URL}/checkpoints/6")
    messages.clear()
    assert resumed(URL) == "checkpoints/4"
    assert messages[0].startswith(
        f"warning: checkpoint {URL}/checkpoints/6 is damaged (its pointer"
    )
    assert messages[-1] == f"warning: using {URL}/checkpoints/4, the newest intact one"
    for step in (2, 4):
        stored.bucket.put(f"checkpoints/{step}.json", b"{}")
    assert resumed(URL) == "best/2"
    stored.bucket.put("best/2.json", b"{}")
    with pytest.raises(InputError, match=r"no checkpoint of .*/run is intact \(checkpoints/6: "):
        resumed(URL)
    assert stored.store.steps() == [2, 4, 6]  # nothing is moved: it is another run's


def test_what_the_bucket_has_no_longer_leaves_the_cache(stored: RemoteRun, tmp_path: Path) -> None:
    """The defect: only its pointer did."""
    for step in (2, 4):
        resume.checkpoint_at_url(
            f"{URL}/checkpoints/{step}", "--resume", tmp_path / "cache", lambda line: None
        )
        stored.store.delete("checkpoints", step)
        stored.store.delete("best", step)
    path, _ = resume.checkpoint_at_url(URL, "--resume", tmp_path / "cache", lambda line: None)
    left = (path.parent / "files").iterdir()
    assert [folder.name.partition("-")[0] for folder in left] == ["6"]


def test_commands_prefer_the_best_checkpoint(stored: RemoteRun, tmp_path: Path) -> None:
    prefer = ("best", "checkpoints")
    path, _ = resume.checkpoint_at_url(URL, "SOURCE", tmp_path, print, prefer)
    assert path.parts[-2:] == ("best", "2.json")
    with pytest.raises(InputError, match=r"^SOURCE s3://bucket is not a folder"):
        resume.checkpoint_at_url("s3://bucket", "SOURCE", tmp_path, print, prefer)


def test_a_command_that_reads_a_run_gets_its_damaged_checkpoints(
    stored: RemoteRun, tmp_path: Path, messages: list[str]
) -> None:
    stored.store.set_aside("checkpoints", 6, "damaged", "it is wrong")
    stored.bucket.put("checkpoints/4.json", b"{}")
    stored.bucket.put("log.txt", b"1")
    found: dict[str, str] = {}
    run = remote.run_to_read(URL, tmp_path, messages.append, found)
    assert (run / "log.txt").read_bytes() == b"1"
    assert small_checkpoint.aside(run) == {6: "damaged: it is wrong"}
    assert list(found) == ["checkpoints/4"]
    assert pointer.steps(run / "checkpoints") == [2, 4]
    stored.bucket.delete(list(stored.bucket.sizes()))
    with pytest.raises(InputError, match="has no files: check the URL"):
        remote.run_to_read(URL, tmp_path, messages.append)


def test_it_notices_that_objects_have_changed(stored: RemoteRun, tmp_path: Path) -> None:
    def damaged() -> dict[str, str]:
        found: dict[str, str] = {}
        remote.run_to_read(URL, tmp_path, print, found)
        return found

    assert damaged() == {}
    name = f"{stored.store.data_folder('checkpoints', 6)}/state/d/0"
    right = stored.bucket.get(name)
    assert right is not None
    stored.bucket.put(name, right.data[::-1])
    assert "0 was changed after it was saved" in damaged()["checkpoints/6"]
    stored.bucket.put(name, right.data)
    assert damaged() == {}
    stored.bucket.delete([name])
    assert damaged()["checkpoints/6"] == "state/d/0 is missing"


def test_a_stage_has_the_name_of_the_run(tmp_path: Path) -> None:
    one = remote.stage("s3://bucket/a b/run:1", tmp_path)
    assert one.parent.parent == tmp_path / "buckets"
    assert one.parent.name.startswith("run1-")
    assert remote.stage("s3://bucket/a b/run:1", tmp_path, 3).name == "run-3"
    assert remote.stage("s3://other/run:1", tmp_path) != one
