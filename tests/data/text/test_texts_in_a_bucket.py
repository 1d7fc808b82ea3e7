"""Text in a bucket in memory, one file of which is on the disk at a time."""

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_threads
import pytest
from obstore.store import MemoryStore

from jaxtrain.data import engine
from jaxtrain.data.text import config as text_config
from jaxtrain.data.text import documents
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.models import mlm
from jaxtrain.storage import bucket_output
from jaxtrain.storage.bucket import Bucket, Unavailable

URL = "s3://texts/corpus"
CACHE = "s3://bucket/cache"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Four files; one is broken, and others are hidden or of another kind."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    rng = random.Random(1)
    for name in ("1.txt", "2.jsonl", "sub/3.txt"):
        words = " ".join(rng.choices(["red", "green", "blue", "one", "two"], k=400)) + "."
        rows = "".join(f"{json.dumps({'text': words + end})}\n" for end in ("", " One."))
        (folder / name).write_text(rows if "json" in name else words)
    (folder / "broken.txt").write_bytes(b"\xff\xfe")
    (folder / "readme.rst").write_text("no text")
    (folder / ".hidden.txt").write_text("hidden")
    return folder


@pytest.fixture
def stored(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The same files in s3://texts/corpus, and an empty bucket for the cache."""
    buckets = {
        url: Bucket(url, MemoryStore()) for url in ("s3://texts", CACHE, "s3://bucket/other")
    }
    monkeypatch.setattr(bucket_output, "opened", buckets.__getitem__)
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "first"))
    for path in texts.rglob("*.*"):
        buckets["s3://texts"].put(f"corpus/{path.relative_to(texts)}", path)
    return buckets["s3://texts"]


def _prepare(path: object, cache_dir: object, **more: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    data = text_config.Masked(
        path=str(path), batch_size=2, cache_dir=str(cache_dir), max_bad_share=0.3
    )
    return data.prepare(60, "sentences", said.append, **{"uploads": True, **more}), said


def _tokens(prepared: Any) -> dict[str, bytes]:
    ((folder, _),) = prepared.caches
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in ("manifest.json", "progress.json")  # have seconds
    }


def _fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Records each download, and the other temporary files at that time."""
    real, found = Bucket.download, []

    def download(self: Bucket, name: str, path: Path, *rest: Any, **more: Any) -> Any:
        if "scratch" in path.parts:
            top = path.parents[1]
            found.append((name, [one.name for one in top.glob("*/*")]))
        return real(self, name, path, *rest, **more)

    monkeypatch.setattr(Bucket, "download", download)
    return found


def test_tokens_are_those_of_local_files(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, _ = _prepare(texts, tmp_path / "local")
    fetches = _fetches(monkeypatch)
    found, said = _prepare(URL, CACHE)
    assert _tokens(found) == _tokens(local)
    assert found.files == local.files == 4
    ((path, reason),) = ((one.path, one.reason) for one in found.bad)
    assert (path, "not UTF-8" in reason) == (f"{URL}/broken.txt", True)
    assert any("skipped 1 of 5 files, which are of other kinds: 1 .rst" in line for line in said)
    names = {"corpus/1.txt", "corpus/2.jsonl", "corpus/sub/3.txt", "corpus/broken.txt"}
    assert {name for name, _ in fetches} == names
    assert not [left for _, left in fetches if left]
    assert not [path for path in (tmp_path / "first/scratch").rglob("*") if path.is_file()]

    # Another machine needs only the results.
    fetches.clear()
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    again, said = _prepare(URL, CACHE)
    assert not fetches
    assert _tokens(again) == _tokens(local)
    assert not any("scanning" in line for line in said)

    one, _ = _prepare(f"{URL}/2.jsonl", tmp_path / "one")
    assert _tokens(one) == _tokens(_prepare(texts / "2.jsonl", tmp_path / "local_one")[0])


def test_an_engine_gives_the_same(texts: Path, stored: Bucket, tmp_path: Path) -> None:
    local, _ = _prepare(texts, tmp_path / "local")
    found, _ = _prepare(URL, tmp_path / "engine", engine=engine.Local(2))
    assert _tokens(found) == _tokens(local)


def test_a_changed_object_is_read_again(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare(URL, tmp_path / "cache")
    stored.put("corpus/1.txt", b"Other words. " * 40)
    (texts / "1.txt").write_bytes(b"Other words. " * 40)
    found, said = _prepare(URL, tmp_path / "cache")
    assert any("scanning 1 text files" in line for line in said)
    assert _tokens(found) == _tokens(_prepare(texts, tmp_path / "local")[0])
    stored.put("corpus/sub/3.txt", b"More words. " * 40)
    real = documents.scan

    def scan(*arguments: Any, **more: Any) -> Any:
        files = real(*arguments, **more)
        stored.put("corpus/sub/3.txt", b"More other words. " * 40)
        return files

    monkeypatch.setattr(documents, "scan", scan)
    with pytest.raises(InputError, match=r"corpus/sub/3.txt changed while it was being read"):
        _prepare(URL, tmp_path / "cache")


def _cached() -> Bucket:
    return bucket_output.opened(CACHE)


def test_training_fetches_and_uploads_nothing(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlm.Config.tiny()
    model = dataclasses.replace(model, vocab_size=60)
    data = text_config.Masked(path=str(texts), batch_size=2, cache_dir=CACHE, max_bad_share=0.3)
    silent = list[str]().append
    data.open(model, seed=0, say=silent)
    assert not _cached().sizes()

    def away(self: Bucket, *_: Any, **__: Any) -> None:
        raise Unavailable(f"{self.url}: cannot be reached")

    with monkeypatch.context() as patched:
        for method in ("put", "get", "download", "about", "versions", "delete"):
            patched.setattr(Bucket, method, away)
        first = data.open(model, seed=0, say=silent)
        with pytest.raises(Unavailable):
            data.open(model, seed=0, say=silent, uploads=True)
    data.open(model, seed=0, say=silent, uploads=True)
    kinds = {name.split("/")[1].partition("-")[0] for name in _cached().sizes()}
    assert kinds == {"scan", "vocabulary", "tokens", "packed"}
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    said: list[str] = []
    again = data.open(model, seed=0, say=said.append)
    assert again.train.fingerprint == first.train.fingerprint
    assert sum("fetching" in line for line in said) == 3
    assert not any("tokenizing" in line or "scanning" in line for line in said)


def test_a_failed_upload_of_the_scan_record_is_repeated(
    texts: Path, stored: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bucket.put

    def refused(self: Bucket, name: str, data: Any) -> None:
        if "scan-" in name:
            raise Unavailable(f"{self.url}: cannot write {name} (QuotaExceeded)")
        real(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", refused)
        with pytest.raises(RunAgain, match="cannot write text/scan-"):
            _prepare(texts, CACHE)
    _prepare(texts, CACHE)
    (name,) = (name for name in _cached().sizes() if "scan-" in name)
    before = _cached().get(name)
    # One of the same size.
    path = texts / "1.txt"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", refused)
        with pytest.raises(RunAgain, match="cannot write text/scan-"):
            _prepare(texts, CACHE)
    _prepare(texts, CACHE)
    after = _cached().get(name)
    assert before
    assert after
    assert len(before.data) == len(after.data)
    assert before.data != after.data


def _changed_record(change: Callable[[dict[str, Any]], object]) -> None:
    """Replaces each line of the scan record in the bucket."""
    (name,) = (name for name in _cached().sizes() if "scan-" in name)
    found = _cached().get(name)
    assert found
    lines = [json.loads(line) for line in found.data.splitlines()]
    changed = [json.dumps(change(line) or line) for line in lines]
    _cached().put(name, "".join(f"{line}\n" for line in changed).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 2**40},
        {"documents": 1.0},
        {"documents": "1"},
        {"documents": True},
        {"documents": -1, "characters": -1, "text_bytes": -1},
        {"characters": 0},
        {"text_bytes": 2**30},
        {"sha256": "../" * 20},
        {"sha256": 7},
        {"reason": 7},
        {"reason": "not text"},  # with documents
        {"documents": 0},  # without a reason
        {"unread": True},
        {"unread": 0},
        {"name": None},
        {"path": ["a"]},
        {"path": "/etc/passwd"},
        {"more": 1},
        {"big": "x" * 2**17},
    ],
)
def test_a_scan_record_from_a_bucket_is_not_trusted(
    texts: Path,
    stored: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    expected, _ = _prepare(URL, CACHE)
    _changed_record(lambda line: line.update(change if line["documents"] else {}))
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    found, said = _prepare(URL, CACHE)
    assert any("scanning 3 text files" in line for line in said)
    assert _tokens(found) == _tokens(expected)


def test_a_scan_record_leads_to_no_other_file(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lines for a file of the machine, one of which would be valid for its own folder."""
    secret = tmp_path / "secret.txt"
    secret.write_text("Secret words. " * 50)
    expected, _ = _prepare(URL, CACHE)
    (scanned,) = documents.scan(str(secret), None, tmp_path, "--data.path", print)
    added = dataclasses.asdict(scanned)
    _changed_record(
        lambda line: {**line, "path": str(secret)} if "1.txt" in line["path"] else added
    )
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    found, _ = _prepare(URL, CACHE)
    assert (found.files, _tokens(found)) == (expected.files, _tokens(expected))


def test_a_scan_record_that_is_too_large_is_not_fetched(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = _prepare(URL, CACHE)
    monkeypatch.setattr(documents, "_LARGEST_RECORD", 99)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    found, said = _prepare(URL, CACHE)
    assert any("instead of at most 99" in line and "it is ignored" in line for line in said)
    assert any("scanning 4 text files" in line for line in said)
    assert _tokens(found) == _tokens(expected)


def test_a_bucket_that_fails_ends_the_command(
    stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: Bucket, name: str, *_: Any, **__: Any) -> None:
        raise Unavailable(f"{self.url}: cannot read {name} (503 Slow Down)")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "download", busy)
        with pytest.raises(RunAgain, match=r"cannot read corpus/1.txt \(503"):
            _prepare(URL, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("text/*"))
    for url, words in (
        ("s3://texts/nothing", r"--data.path s3://texts/nothing: no such file or folder in the"),
        ("https://host/a.txt", r"--data.path https://host/a.txt: use a local folder, s3://"),
    ):
        with pytest.raises(InputError, match=words):
            _prepare(url, tmp_path / "cache")
