"""Text in a bucket, and a cache of tokens in another."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.text.small_text import Model, silent
from obstore.store import LocalStore

from jaxtrain.data.text import Masked, documents, rows, shards
from jaxtrain.data.text.sources import Prepared
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs import engines
from jaxtrain.storage import bucket_folders
from jaxtrain.storage.bucket import Bucket, Unavailable

URL = "s3://texts/corpus"
CACHE = "s3://bucket/cache"
HERE = engines.Threads(1)
ROWS = rows.Rows("text")


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

    @functools.cache
    def opened(url: str) -> Bucket:
        folder = tmp_path / "buckets" / url.partition("://")[2]
        return Bucket(url, LocalStore(folder, mkdir=True), waits_s=())

    monkeypatch.setattr(bucket_folders, "opened", opened)
    monkeypatch.setattr(shards, "Processes", lambda workers, say: engines.Threads(workers))
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "first"))
    for path in texts.rglob("*.*"):
        opened("s3://texts").put(f"corpus/{path.relative_to(texts)}", path)
    return opened("s3://texts")


def _prepared(path: object, cache_dir: object, said: list[str] | None = None) -> Prepared:
    lines = [] if said is None else said
    data = Masked(path=str(path), batch_size=2, cache_dir=str(cache_dir), max_bad_share=0.3)
    prepared = data.prepare(Model(vocab_size=60), lines.append, engine=HERE)
    assert prepared is not None
    return prepared


def _tokens(prepared: Prepared) -> list[tuple[bytes, ...]]:
    ((made, _),) = prepared.corpora[0].shards
    return [(made.folder / name).read_bytes() for name in ("tokens", "documents.npy")]


def test_tokens_are_those_of_local_files(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_OBJECT_BYTES", 64)
    local = _prepared(texts, tmp_path / "local")
    said: list[str] = []
    remote = _prepared(URL, tmp_path / "remote", said)
    assert _tokens(remote) == _tokens(local)
    assert remote.files == local.files == 4
    ((path, reason),) = ((bad.path, bad.reason) for bad in remote.bad)
    assert (path, "not UTF-8" in reason) == (f"{URL}/broken.txt", True)
    assert any("skipped 1 of 5 files, which are of other kinds: 1 .rst" in line for line in said)
    (file,) = documents.find(f"{URL}/2.jsonl", "--data.path", tmp_path, silent)
    section = documents.FileRange(file, 0, file.size, ROWS)
    (here,) = documents.find(str(texts / "2.jsonl"), "--data.path", tmp_path, silent)
    same = documents.FileRange(here, 0, here.size, ROWS)
    assert list(section.read(rows.Skipped())) == list(same.read(rows.Skipped()))


def test_a_parquet_file_in_a_bucket_is_read_in_parts(
    stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"row {number} " * 50 for number in range(300)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    stored.put("corpus/a.parquet", tmp_path / "a.parquet")
    monkeypatch.setattr(documents, "_OBJECT_BYTES", 256)
    (file,) = documents.find(f"{URL}/a.parquet", "--data.path", tmp_path, silent)
    size, half = file.size, file.size // 2
    parts = [documents.FileRange(file, 0, half, ROWS), documents.FileRange(file, half, size, ROWS)]
    read = [list(part.read(rows.Skipped())) for part in parts]
    assert all(read)
    assert [row for part in read for row in part] == texts


def test_a_changed_object_is_read_again(texts: Path, stored: Bucket, tmp_path: Path) -> None:
    _prepared(URL, tmp_path / "cache")
    stored.put("corpus/1.txt", b"Other words. " * 40)
    (texts / "1.txt").write_bytes(b"Other words. " * 40)
    again = _prepared(URL, tmp_path / "cache")
    assert _tokens(again) == _tokens(_prepared(texts, tmp_path / "local"))
    files = documents.find(URL, "--data.path", tmp_path, silent)
    stored.put("corpus/1.txt", b"More words. " * 40)
    with pytest.raises(Unavailable, match=r"corpus/1.txt changed while it was read: start again"):
        list(documents.FileRange(files[0], 0, files[0].size, ROWS).read(rows.Skipped()))


def test_another_machine_fetches_what_the_bucket_has(
    texts: Path, stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that makes what is missing, too; a complete copy needs no bucket."""
    data = Masked(path=str(texts), batch_size=2, cache_dir=CACHE, max_bad_share=0.3)
    model = Model(vocab_size=60)
    first = data.open(model, seed=0, say=silent)
    made = {path: path.stat().st_ino for path in (tmp_path / "buckets/bucket").rglob("*.npy")}
    assert len(made) == 1
    prepared = data.prepare(model, silent, uploads=True)
    assert prepared is not None
    data.examples(prepared, model, silent)
    assert {path: path.stat().st_ino for path in made} == made
    names = [path.name for path in (tmp_path / "buckets/bucket/cache/text").iterdir()]
    assert {name.partition("-")[0] for name in names} == {"vocabulary", "shard", "layout"}

    def away(self: Bucket, *_: Any, **__: Any) -> None:
        raise Unavailable(f"{self.url}: cannot be reached")

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    monkeypatch.setattr(shards, "_make", None)  # makes nothing again
    said: list[str] = []
    again = data.open(model, seed=0, say=said.append)
    assert again.train.fingerprint == first.train.fingerprint
    assert sum("fetching" in line for line in said) == 3
    examples = [of.train.example(0, np.random.default_rng(0))["tokens"] for of in (first, again)]
    assert (examples[0] == examples[1]).all()
    for method in ("put", "get", "download", "about", "versions", "delete", "read"):
        monkeypatch.setattr(Bucket, method, away)
    assert data.open(model, seed=0, say=silent).train.fingerprint == first.train.fingerprint


def test_a_bucket_that_fails_ends_the_command(
    stored: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: Bucket, name: str, *_: Any, **__: Any) -> None:
        raise Unavailable(f"{self.url}: cannot read {name} (503 Slow Down)")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", busy)
        with pytest.raises(RunAgain, match=r"cannot read corpus/\S+ \(503"):
            _prepared(URL, tmp_path / "cache")
    for url, words in (
        ("s3://texts/nothing", r"--data.path s3://texts/nothing: no such file or folder in the"),
        ("https://host/a.txt", r"--data.path https://host/a.txt: use a local folder, s3://"),
    ):
        with pytest.raises(InputError, match=words):
            _prepared(url, tmp_path / "cache")
