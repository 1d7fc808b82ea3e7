"""Files of a run in a bucket: one that grows is sent in parts, and is whole when it is fetched."""

import hashlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from jaxtrain.errors import RunAgain
from jaxtrain.storage import file_copies
from jaxtrain.storage.bucket import Bucket, Unavailable
from jaxtrain.storage.file_copies import FileCopies


@pytest.fixture
def bucket() -> Bucket:
    return Bucket("s3://bucket/run", MemoryStore())


class Sent:
    """Counts what the bucket has taken."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, count: int) -> None:
        self.bytes += count


def fetched(bucket: Bucket, folder: Path) -> dict[str, bytes]:
    """Returns what a new machine gets."""
    FileCopies(bucket, folder).fetch(lambda name: True)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_folder_has_what_the_bucket_has(bucket: Bucket, tmp_path: Path) -> None:
    run, reader = tmp_path / "run", tmp_path / "reader"
    run.mkdir()
    for name in ("log.txt", "progress.json"):
        (run / name).write_text("1\n")
        FileCopies(bucket, run).upload(name)
    wanted = {"log.txt", "progress.json", "metrics.jsonl", "config.json"}
    reader.mkdir()
    for name in (*wanted, "notes.json"):
        (reader / name).write_text("1\n2\n")
    FileCopies(bucket, reader).fetch(wanted.__contains__, ahead=True)
    there = {path.name: path.read_text() for path in reader.iterdir()}
    longer = dict.fromkeys(("log.txt", "metrics.jsonl", "notes.json"), "1\n2\n")
    assert there == {"progress.json": "1\n"} | longer
    FileCopies(bucket, reader).fetch(wanted.__contains__)
    there = {path.name: path.read_text() for path in reader.iterdir()}
    assert there == {"progress.json": "1\n", "log.txt": "1\n", "notes.json": "1\n2\n"}


def test_a_file_with_the_same_checksum_is_not_fetched(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's ETag of an object that was not uploaded in parts is its MD5."""
    bucket.put("progress.json", b"new")
    digest = hashlib.md5(b"new", usedforsecurity=False).hexdigest()
    monkeypatch.setattr(bucket, "versions", lambda: {"progress.json": (3, f'"{digest}"')})
    path = tmp_path / "progress.json"
    path.write_text("old")
    download, names = bucket.download, list[str]()

    def count(name: str, to: Path) -> bool:
        names.append(name)
        return download(name, to)

    monkeypatch.setattr(bucket, "download", count)
    for _ in range(2):
        FileCopies(bucket, tmp_path).fetch(lambda name: True)
        assert path.read_text() == "new"
    assert names == ["progress.json"]


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "log.txt", "log.1.txt", "tensorboard/events.out.tfevents.1.host.2"],
)
def test_a_file_that_grows_is_sent_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    copies, put, sent = FileCopies(bucket, run), bucket.put, list[int]()

    def count(part: str, data: bytes) -> None:
        sent.append(len(data))
        put(part, data)

    monkeypatch.setattr(bucket, "put", count)
    for number in range(50):
        with (run / name).open("a") as file:
            file.write(f"line {number}\n")
        copies.upload(name)
        copies.upload(name)
    assert sum(sent) == (run / name).stat().st_size
    assert fetched(bucket, tmp_path / "other") == {name: (run / name).read_bytes()}


def test_other_files_are_sent_whole(bucket: Bucket, tmp_path: Path) -> None:
    run, sent = tmp_path / "run", Sent()
    run.mkdir()
    copies = FileCopies(bucket, run, sent)
    for content in ("{}", '{"a": 1}'):
        (run / "progress.json").write_text(content)
        copies.upload("progress.json")
    assert list(bucket.sizes()) == ["progress.json"]
    assert fetched(bucket, tmp_path / "other") == {"progress.json": b'{"a": 1}'}
    assert sent.bytes == 10


def test_a_resume_continues_and_cuts_files(bucket: Bucket, tmp_path: Path) -> None:
    """Any sequence of appending, cutting, and moving to another machine gives the same file."""
    for seed in range(30):
        rng = random.Random(seed)
        name, machine, content = "metrics.jsonl", 0, b""
        place = tmp_path / f"{seed}"
        bucket.delete(list(bucket.sizes()))

        def start(machine: int, place: Path = place) -> tuple[Path, FileCopies]:
            run = place / str(machine)
            run.mkdir(parents=True)
            copies = FileCopies(bucket, run)
            copies.fetch(lambda name: True)
            return run, copies

        run, copies = start(machine)
        for _ in range(20):
            action = rng.choice(["append", "append", "cut", "restart", "move"])
            if action == "append":
                content += rng.randbytes(rng.randrange(1, 60)).hex().encode()
            elif action == "cut":
                content = content[: rng.randrange(len(content) + 1)]
            elif action == "restart":
                copies = FileCopies(bucket, run)
            else:
                machine += 1
                run, copies = start(machine)
                assert (run / name).read_bytes() == content if content else True
            (run / name).write_bytes(content)
            copies.upload(name)
            assert fetched(bucket, place / f"copy-{rng.random()}").get(name, b"") == content, seed


def test_a_large_file_is_sent_in_parts_of_limited_size(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copies, "_SEGMENT_BYTES", 100)
    content = random.Random(0).randbytes(950)
    (tmp_path / "log.txt").write_bytes(content)
    FileCopies(bucket, tmp_path).upload("log.txt")
    assert sorted(bucket.sizes().values()) == [50, *[100] * 9]
    assert fetched(bucket, tmp_path / "other") == {"log.txt": content}


def test_an_interrupted_upload_leaves_the_file_as_it_was(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = FileCopies(bucket, tmp_path)
    (tmp_path / "log.txt").write_bytes(b"one\n")
    copies.upload("log.txt")
    (tmp_path / "log.txt").write_bytes(b"two\nthree\n")  # a resume has cut it
    put = bucket.put
    with monkeypatch.context() as patched:
        patched.setattr(bucket, "delete", lambda names: (_ for _ in ()).throw(OSError("away")))
        with pytest.raises(OSError, match="away"):
            copies.upload("log.txt")
    assert bucket.put == put
    assert fetched(bucket, tmp_path / "other")["log.txt"] == b"two\nthree\n"
    copies.upload("log.txt")
    assert fetched(bucket, tmp_path / "third")["log.txt"] == b"two\nthree\n"
    assert len(bucket.sizes()) == 1


def test_a_read_that_fails_is_tried_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("config.json", b"{}")
    download, tries = bucket.download, list[str]()

    def fail(name: str, *more: Any) -> bool:
        tries.append(name)
        if len(tries) < 3:
            raise Unavailable("s3://bucket/run: cannot read config.json")
        return download(name, *more)

    monkeypatch.setattr(bucket, "download", fail)
    assert fetched(bucket, tmp_path / "run") == {"config.json": b"{}"}


def test_a_file_that_is_cut_while_it_is_fetched_has_no_hole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the metrics of a live run that goes back, while its report is written."""
    run, copies = tmp_path, FileCopies(bucket, tmp_path)
    for number in range(5):
        with (run / "log.txt").open("a") as file:
            file.write(f"line {number}\n")
        copies.upload("log.txt")
    get, asked, lock = bucket.get, list[str](), threading.Lock()

    def cut_meanwhile(name: str) -> Any:
        with lock:  # the other threads get what is there then
            asked.append(name)
            if len(asked) == 1:
                (run / "log.txt").write_text("line 0\nline 1\nanother\n")
                copies.upload("log.txt")
        return get(name)

    with monkeypatch.context() as patched:
        patched.setattr(bucket, "get", cut_meanwhile)
        found = fetched(bucket, tmp_path / "other")
    assert found == {"log.txt": b"line 0\nline 1\nanother\n"}
    with monkeypatch.context() as patched:  # a store that lists what it does not have
        patched.setattr(bucket, "get", lambda name: None)
        with pytest.raises(RunAgain, match=r"log\.txt changed while it was fetched"):
            fetched(bucket, tmp_path / "third")
    assert not list((tmp_path / "third").iterdir())
