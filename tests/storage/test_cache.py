import errno
import hashlib
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from obstore.store import MemoryStore

from jaxtrain.data.text import documents
from jaxtrain.data.video import files
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import bucket_folders, cache, disks, record
from jaxtrain.storage.bucket import Bucket, Unavailable
from jaxtrain.storage.record import NAME as MANIFEST


def silent(text: str) -> None:
    pass


def builder(built: list[int], content: str = "abc") -> Callable[[Path], dict]:
    def build(work: Path) -> dict:
        built.append(1)
        (work / "file").write_text(content)
        return {"number": 7}

    return build


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    built: list[int] = []
    folder = tmp_path / "deep" / "key"
    for _ in range(2):
        manifest = cache.make_folder(folder, builder(built), silent)
        assert manifest == {"number": 7, "files": {"file": [3, hashlib.sha256(b"abc").hexdigest()]}}
    assert len(built) == 1
    assert sorted(p.name for p in folder.iterdir()) == ["file", "manifest.json"]


def test_leftovers_of_a_killed_process_are_removed_and_not_read(tmp_path: Path) -> None:
    left = tmp_path / "key.tmp-0123456789ab"
    left.mkdir()
    (left / "file").write_text("half")
    mine = tmp_path / "key.tmp-notes"
    mine.mkdir()
    built: list[int] = []
    cache.make_folder(tmp_path / "key", builder(built), silent)
    assert len(built) == 1
    assert not left.exists()
    assert mine.exists()
    assert (tmp_path / "key" / "file").read_text() == "abc"


@pytest.mark.parametrize("damage", ["cut", "changed", "lost", "manifest", "no manifest"])
def test_a_damaged_folder_is_rebuilt(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "key"
    built: list[int] = []
    cache.make_folder(folder, builder(built), silent)
    if damage == "cut":
        os.truncate(folder / "file", 2)
    elif damage == "changed":  # as a disk does, whose blocks are zeros after a crash
        (folder / "file").write_bytes(bytes(3))
    elif damage == "lost":
        (folder / "file").unlink()
    elif damage == "manifest":
        size = (folder / "manifest.json").stat().st_size
        (folder / "manifest.json").write_bytes(bytes(size))
    else:
        (folder / "manifest.json").unlink()
    assert record.read(folder, verify=True) is None
    assert (record.read(folder) is None) == (damage != "changed")
    said: list[str] = []
    cache.make_folder(folder, builder(built), said.append)
    assert len(built) == 2
    assert any("damaged" in text for text in said)
    assert (folder / "file").read_text() == "abc"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "key.lock"]


def test_the_slower_of_two_builders_uses_the_finished_folder(tmp_path: Path) -> None:
    """As without locks: the folder appears while another process is building it."""
    folder = tmp_path / "key"

    def slow(work: Path) -> dict:
        folder.mkdir()
        (folder / "file").write_text("first")
        record.write(folder, {"number": 1})
        (work / "file").write_text("second!")
        return {"number": 2}

    assert cache.make_folder(folder, slow, silent)["number"] == 1
    assert (folder / "file").read_text() == "first"


def test_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "env"))
    assert cache.root(None) == tmp_path / "env"
    assert cache.root(str(tmp_path / "own")) == tmp_path / "own"
    monkeypatch.setenv("JAXTRAIN_CACHE", "s3://bucket/cache")
    with pytest.raises(
        InputError, match="JAXTRAIN_CACHE s3://bucket/cache is not a folder of this"
    ):
        cache.root(None)
    monkeypatch.delenv("JAXTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root(None) == tmp_path / ".cache" / "jaxtrain"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--data.cache_dir"):
        cache.root(str(tmp_path / "file"))
    monkeypatch.delenv("HOME")  # of a user without a name, as in a container
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(InputError, match=r"needs a home folder, and none was found: set HOME or"):
        cache.root(None)


@pytest.mark.parametrize(
    ("where", "number", "kind"),
    [
        ("build", errno.ENOSPC, RunAgain),
        ("sync", errno.EDQUOT, RunAgain),
        ("file", errno.EROFS, InputError),
        ("root", errno.ESTALE, RunAgain),
    ],
)
def test_a_full_or_unavailable_disk_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, where: str
) -> None:
    def fail(*arguments: object, **more: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    words = rf"{tmp_path} \({os.strerror(number)}\): .*--data.cache_dir"
    if where == "file":
        monkeypatch.setattr(cache, "write_whole", fail)
        with pytest.raises(kind, match=words):
            cache.write_file(tmp_path / "file", "one")
        return
    if where == "root":
        monkeypatch.setattr(Path, "mkdir", fail)
        with pytest.raises(kind, match=words):
            cache.root(str(tmp_path))
        return
    if where == "sync":  # a network disk may report it only then
        monkeypatch.setattr(record.atomic, "sync", fail)
    with pytest.raises(kind, match=words):
        cache.make_folder(tmp_path / "key", fail if where == "build" else builder([]), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_invalid_file_names_are_reported_as_missing(tmp_path: Path) -> None:
    long = str(tmp_path / ("a" * 5000))
    for find in (
        lambda: documents.find(long, "--data.path", Path("unused"), print),
        lambda: files.find(long, "--data.path", tmp_path, print),
    ):
        with pytest.raises(InputError, match="no such file or folder"):
            find()


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A cache in a bucket; ``$JAXTRAIN_CACHE`` names the machine."""
    made = Bucket("s3://bucket/cache", MemoryStore())
    monkeypatch.setattr(bucket_folders, "opened", lambda url: made)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "first"))
    return made


def made_in(said: list[str], built: list[int], *, uploads: bool = True) -> Path:
    root = cache.root("s3://bucket/cache/")
    folder, bucket = root / "text" / "key", cache.CacheBucket("s3://bucket/cache", root, uploads)
    manifest = cache.make_folder(folder, builder(built), said.append, bucket=bucket)
    assert manifest["number"] == 7
    return folder


def test_a_cache_in_a_bucket_is_built_once_for_all_machines(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    said: list[str] = []
    first = made_in(said, built)
    assert first.is_relative_to(tmp_path / "first")
    assert said == ["uploading 0.0 MB to s3://bucket/cache/text/key"]
    stored = {name: bucket.get(name) for name in bucket.sizes()}
    assert {name: one.data for name, one in stored.items() if one} == {
        f"text/key/{path.name}": path.read_bytes() for path in first.iterdir()
    }
    assert made_in(said, built) == first
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    second = made_in(said, built)
    assert said[1:] == ["fetching 0.0 MB from s3://bucket/cache/text/key"]
    assert len(built) == 1
    assert [path.read_bytes() for path in sorted(second.iterdir())] == [
        path.read_bytes() for path in sorted(first.iterdir())
    ]
    # Other folders of the machine stay there.
    cache.make_folder(cache.root(None) / "text" / "key", builder(built), silent)
    assert {name.partition("/")[0] for name in bucket.sizes()} == {"text"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("file", b"truncated"),
        ("manifest.json", None),
        ("manifest.json", b'{"number": 7, "files": {"missing": [3, "%064d"]}}' % 0),
        ("manifest.json", b'{"number": 7, "files": {"file": 3}}'),
    ],
)
def test_an_incomplete_folder_in_a_bucket_is_built_and_uploaded_again(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
) -> None:
    built: list[int] = []
    made_in([], built)
    before = bucket.get("text/key/manifest.json")
    if content is None:
        bucket.delete([f"text/key/{name}"])
    else:
        bucket.put(f"text/key/{name}", content)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    made_in([], built)
    assert len(built) == 2
    for one, expected in (("file", b"abc"), ("manifest.json", before and before.data)):
        found = bucket.get(f"text/key/{one}")
        assert found is not None
        assert found.data == expected


def test_a_failed_upload_is_done_by_the_next_start(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def full(self: Bucket, name: str, data: bytes | Path) -> NoReturn:
        raise Unavailable(f"{self.url}: cannot write {name} (QuotaExceeded)")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", full)
        with pytest.raises(RunAgain, match=r"cannot write text/key/file \(Quota"):
            made_in([], built)
    made_in([], built)
    assert len(built) == 1
    assert set(bucket.sizes()) == {"text/key/file", "text/key/manifest.json"}


def test_a_damaged_file_in_a_bucket_is_named_and_not_kept(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the right size, so that only its checksum shows it."""
    made_in([], [])
    bucket.put("text/key/file", bytes(3))
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    words = (
        r"s3://bucket/cache/text/key/file is damaged: .*: delete s3://bucket/cache/text/key, and"
    )
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            made_in([], [])
    bucket.put("text/key/file", b"abc")
    built: list[int] = []
    assert (made_in([], built) / "file").read_bytes() == b"abc"
    assert not built


def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Bucket, *_: Any, **__: Any) -> NoReturn:
        raise Unavailable(f"{self.url}: cannot be reached")

    for method in ("put", "put_if", "get", "download", "about", "versions", "sizes", "delete"):
        monkeypatch.setattr(Bucket, method, away)


def test_training_uploads_nothing_and_needs_no_bucket_for_a_complete_copy(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    said: list[str] = []
    made_in(said, built, uploads=False)
    assert (bucket.sizes(), said, len(built)) == ({}, [], 1)
    with monkeypatch.context() as patched:
        _offline(patched)
        made_in(said, built, uploads=False)
        with pytest.raises(Unavailable):
            made_in(said, built)
        monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
        with pytest.raises(Unavailable):  # building may take hours, so that is an error
            made_in(said, built, uploads=False)
    made_in(said, built, uploads=False)
    assert len(built) == 2
    made_in(said, built)
    assert said == ["uploading 0.0 MB to s3://bucket/cache/text/key"]
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "third"))
    made_in(said, built, uploads=False)
    assert said[1:] == ["fetching 0.0 MB from s3://bucket/cache/text/key"]
    assert len(built) == 2


def _break_at(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> list[str]:
    """Makes the download of one file fail; returns the list of all downloads to come."""
    real, asked = Bucket.download, list[str]()

    def download(self: Bucket, one: str, path: Path, *rest: Any, **more: Any) -> Any:
        asked.append(one)
        if one.endswith(name):
            raise error
        return real(self, one, path, *rest, **more)

    monkeypatch.setattr(Bucket, "download", download)
    return asked


def test_a_fetch_that_failed_continues(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    made_in([], built)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    with monkeypatch.context() as patched:
        _break_at(patched, MANIFEST, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            made_in([], built)
    (left,) = (tmp_path / "second").rglob("key.fetching")
    (left / ".manifest.json.abcd1234.json").touch()  # of a fetch that was killed
    before = (left / "file").stat().st_ino
    said: list[str] = []
    folder = made_in(said, built)
    size = (folder / MANIFEST).stat().st_size
    assert said == [f"fetching {size / 1e6:,.1f} MB from s3://bucket/cache/text/key"]
    assert (folder / "file").stat().st_ino == before
    assert {path.name for path in folder.parent.iterdir()} == {"key", "key.lock"}
    assert {path.name for path in folder.iterdir()} == {"file", MANIFEST}
    assert len(built) == 1


def test_a_fetch_that_does_not_fit_is_not_begun(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made_in([], [])
    need = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    with monkeypatch.context() as patched:
        patched.setattr(disks, "free_bytes", lambda folder: 1)
        asked = _break_at(patched, "file", AssertionError())
        with pytest.raises(
            RunAgain,
            match=rf"s3://bucket/cache/text/key needs {need} bytes, but only 1 are free in "
            rf"{tmp_path}/second/.*: free space there, or set \$JAXTRAIN_CACHE",
        ):
            made_in([], [])
    assert not asked


def test_the_cache_cannot_be_at_other_urls() -> None:
    with pytest.raises(InputError, match=r"--data.cache_dir https://host/a: use a local folder"):
        cache.root("https://host/a")
