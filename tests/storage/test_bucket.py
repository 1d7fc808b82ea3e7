"""Tests the client for buckets against a store in memory; real_buckets.py uses a real API."""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import obstore
import pytest
from obstore.store import MemoryStore
from storage.bucket_server import Sink

from jaxtrain.errors import InputError
from jaxtrain.storage import bucket as buckets
from jaxtrain.storage.bucket import Bucket, Busy, TooLarge, Unavailable

URL = "s3://bucket/run"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(URL, MemoryStore())


def test_an_object_is_written_read_listed_and_deleted(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.get("a/b") is None
    bucket.put("a/b", b"one")
    (tmp_path / "file").write_bytes(b"three")
    bucket.put("a/c", tmp_path / "file")
    bucket.put("ab", b"")
    found = bucket.get("a/b")
    assert found is not None
    assert found.data == b"one"
    assert bucket.sizes() == {"a/b": 3, "a/c": 5, "ab": 0}
    assert bucket.sizes("a") == {"a/b": 3, "a/c": 5}
    assert bucket.about("a") is None
    assert bucket.about("a/b") == bucket.versions("a")["a/b"]
    assert bucket.about("a/b") != bucket.about("ab")
    bucket.delete(["a/b", "ab"])
    bucket.delete([])
    assert bucket.sizes() == {"a/c": 5}


def test_of_two_writers_of_the_same_version_one_is_refused(bucket: Bucket) -> None:
    first = bucket.put_if("lease", b"1", None)
    assert first is not None
    assert bucket.put_if("lease", b"2", None) is None
    second = bucket.put_if("lease", b"3", first)
    assert second is not None
    assert bucket.put_if("lease", b"4", first) is None
    found = bucket.get("lease")
    assert found is not None
    assert (found.data, found.version) == (b"3", second)


def test_objects_are_deleted_although_one_is_missing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = obstore.delete

    def as_google(store: Any, names: list[str]) -> None:
        for name in names:
            obstore.head(store, name)
            delete(store, name)

    monkeypatch.setattr(obstore, "delete", as_google)
    for name in ("a", "b", "c"):
        bucket.put(name, b"1")
    bucket.delete(["a", "missing", "b"])
    bucket.delete(["missing"])
    assert bucket.sizes() == {"c": 1}


_KEY = '{"client_email": "a", "private_key_id": "1", "private_key": "the secret"}'


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "missing.json",
            "(no such file): set GOOGLE_APPLICATION",
        ),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", _KEY, "(it is not such a key)"),
    ],
)
def test_a_wrong_key_is_one_line_without_the_key(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError) as caught:
        Bucket("gs://bucket/run")
    assert f"cannot read the key of the service account {message}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_profile_without_boto3_is_one_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)  # as if it were not installed
    monkeypatch.setenv("AWS_PROFILE", "mine")
    with pytest.raises(
        InputError, match=r"AWS_PROFILE=mine requires boto3: .*install boto3, or run eval"
    ):
        Bucket(URL)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")  # comes first, as in the command line
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    Bucket(URL)


@pytest.mark.parametrize("size", [0, 32, 33, 100])
def test_a_download_is_the_object(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(buckets, "_PART_BYTES", 32)
    data = bytes(range(size))
    bucket.put("file", data)
    assert bucket.download("file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
    assert not bucket.download("other", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_object_that_is_missing_replaces_no_file(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("file", b"abc")
    assert bucket.fetch("file", tmp_path / "file")
    assert not bucket.fetch("other", tmp_path / "other")
    assert not bucket.fetch("other", tmp_path / "file")
    with pytest.raises(TooLarge):
        bucket.fetch("file", tmp_path / "third", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_an_object_that_is_deleted_while_it_is_read_is_named(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wait: a store that is busy is asked again for 35 s."""
    monkeypatch.setattr(bucket, "about", lambda name: (3, "tag"))
    with pytest.raises(Unavailable, match=f"{URL}/file was deleted while it was read") as raised:
        bucket.download("file", tmp_path / "file")
    assert not isinstance(raised.value, Busy)


BUSY = obstore.exceptions.GenericError("HTTP error: 503 Slow Down")


@pytest.mark.parametrize("method", ["put", "get", "versions", "delete"])
def test_a_busy_store_is_asked_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(URL, MemoryStore(), waits_s=(0.0, 0.0))
    bucket.put("a", b"1")
    name = {"versions": "list"}.get(method, method)
    real, failures = getattr(obstore, name), [BUSY, BUSY]

    def fail(*args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **more)

    monkeypatch.setattr(obstore, name, fail)
    given = {"put": ("a", b"2"), "delete": (["a"],), "versions": ()}
    arguments: Any = given.get(method, ("a",))
    getattr(bucket, method)(*arguments)
    assert not failures
    failures += [BUSY] * 3
    with pytest.raises(Busy, match="check the network and the store"):
        getattr(bucket, method)(*arguments)
    failures += [BUSY]
    with pytest.raises(Busy):
        getattr(bucket.impatient(), method)(*arguments)
    # Waiting does not help.
    failures += [PermissionError("AccessDenied")]
    with pytest.raises(Unavailable, match="allow these credentials"):
        getattr(bucket, method)(*arguments)


def test_a_conditional_write_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise BUSY

    monkeypatch.setattr(obstore, "put", fail)
    with pytest.raises(Unavailable):
        Bucket(URL, MemoryStore(), waits_s=(0.0,)).put_if("a", b"1", None)
    assert len(tries) == 1


@pytest.mark.parametrize(("way", "most"), [("put", 2), ("get", 8)])
def test_all_files_together_have_few_parts_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, most: int
) -> None:
    """Of a file, five parts are in memory: those of four requests, and that of the disk."""
    monkeypatch.setattr(buckets, "_PART_BYTES", 10)
    monkeypatch.setattr(buckets, "_PARTS_IN_MEMORY", 10)
    bucket, real = Bucket(URL, MemoryStore()), {"put": obstore.put, "get": obstore.get}[way]
    changed, now, seen = threading.Lock(), [0], [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        with changed:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
        time.sleep(0.02)
        try:
            return real(*arguments, **options)
        finally:
            with changed:
                now[0] -= 1

    monkeypatch.setattr(obstore, way, counted)
    files = [tmp_path / str(number) for number in range(8)]
    for path in files:
        path.write_bytes(path.name.encode() * 95)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: bucket.put(path.name, path), files))
        list(pool.map(lambda path: bucket.download(path.name, path.with_suffix(".got")), files))
    assert all(path.with_suffix(".got").read_bytes() == path.read_bytes() for path in files)
    assert 1 < seen[0] <= most
    with buckets._MemoryLimit(10).taken(50):  # parts of a file of terabytes
        pass


def test_parts_of_a_download_are_of_the_same_content(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(0).randbytes(1000)
    bucket.put("file", data)
    get, ranges = obstore.get, []

    def ranged(*arguments: Any, options: Any) -> Any:
        ranges.append(options["range"])
        return get(*arguments, options=options)

    monkeypatch.setattr(buckets, "_PART_BYTES", 64)
    monkeypatch.setattr(obstore, "get", ranged)
    assert bucket.download("file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
    assert sorted(ranges) == [(start, min(start + 64, 1000)) for start in range(0, 1000, 64)]

    def replaced(*arguments: Any, options: Any) -> Any:
        if options["range"][0] == 128:
            bucket.put("file", data)
        return get(*arguments, options=options)

    monkeypatch.setattr(obstore, "get", replaced)
    with pytest.raises(Unavailable, match="file changed while it was read"):
        bucket.download("file", tmp_path / "file")


class Patient(Sink):
    """Sends white space before the end of an upload in parts, as S3 does."""

    def exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        status, found, content = super().exchange(method, path, headers, body)
        return status, found, (b" " * 12 if b"CompleteMultipart" in content else b"") + content

    def write(self, file: BinaryIO, content: bytes) -> None:
        text = content.lstrip(b" ")
        for _ in range(len(content) - len(text)):
            file.write(b" ")
            file.flush()
            time.sleep(0.15)
        file.write(text)


def test_an_upload_may_end_slowly_and_reports_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(20 * 2**10 + 1))
    monkeypatch.setattr(buckets, "_PART_BYTES", 2**10)
    monkeypatch.setattr(buckets, "_SILENT_S", "1s")
    sent: list[int] = []
    with Patient() as store:
        for variable, value in store.variables.items():
            monkeypatch.setenv(variable, value)
        Bucket("s3://bucket/run").put("file", tmp_path / "file", sent.append)
    (parts,) = store.parts.values()
    assert sorted(parts.values()) == [1, *(20 * [2**10])]
    assert sum(sent) == 20 * 2**10 + 1
    assert sent[:-1] == 16 * [2**10]  # up to five parts may not be there yet


def test_large_objects_are_not_read(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_MOST_IN_MEMORY", 9)
    bucket.put("file", b"1" * 10)
    with pytest.raises(TooLarge, match=f"{URL}/file has 10 bytes instead of at most 9"):
        bucket.get("file")
    with pytest.raises(TooLarge):
        bucket.download("file", tmp_path / "file", max_bytes=9)
    assert not (tmp_path / "file").exists()
    assert bucket.download("file", tmp_path / "file", max_bytes=10)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3:/bucket/a//b/", "s3://bucket/a/b"),  # as pathlib prints it
        ("gcs://bucket/a", "gs://bucket/a"),
    ],
)
def test_urls_are_normalized(url: str, expected: str) -> None:
    assert buckets.is_bucket(url)
    assert buckets.normalized(url, "--output-dir") == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket", "is not a folder in a bucket: write s3://BUCKET/PATH"),
        ("s3://bucket/a?versionId=3", "remove what follows the question mark"),
        ("https://host/a", "use a local folder, s3://BUCKET/PATH"),
        ("s3://key:secret@bucket/a", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("ftp://host/a", "unknown scheme"),
        ("/tmp/a", "/tmp/a: not a bucket: write s3://BUCKET/PATH or gs://BUCKET/PATH"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(InputError, match="--output-dir") as caught:
        buckets.normalized(url, "--output-dir")
    assert message in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_an_invalid_name_is_not_a_problem_of_the_network(bucket: Bucket) -> None:
    with pytest.raises(InputError, match=r"cannot write a//b .*empty path segment.*: rename"):
        bucket.put("a//b", b"1")


def _answer(code: str, status: str) -> str:
    return (
        f"Generic S3 error: Error performing PUT http://host/bucket/run/a in 4.1ms, after 4 "
        f"retries, max_retries: 4, retry_timeout: 30s  - Server returned non-2xx status code: "
        f"{status}: <Error><Code>{code}</Code></Error>\n\nDebug source:\nGeneric {{\n}}"
    )


GENERIC = obstore.exceptions.GenericError
SENDING = "Generic S3 error: Error performing PUT http://{} in 2s - error sending request"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            GENERIC(_answer("SlowDown", "503 Service Unavailable")),
            "cannot write a (503 Service Unavailable, SlowDown): check the network and the store",
        ),
        (
            GENERIC(_answer("ExpiredToken", "400 Bad Request")),
            "the credentials are wrong or have expired: set AWS_ACCESS_KEY_ID and",
        ),
        (
            PermissionError(_answer("AccessDenied", "403 Forbidden")),
            "allow these credentials to list, read, write, and delete there",
        ),
        (GENERIC(_answer("QuotaExceeded", "403 Forbidden")), "raise the quota or free space"),
        (
            GENERIC(SENDING.format("169.254.169.254/latest/api/token")),
            "cannot write a (no credentials were found): set AWS_ACCESS_KEY_ID",
        ),
        (
            GENERIC(SENDING.format("host/bucket/run/data/4/meta/metadata")),
            "cannot write a (error sending request): check the network and the store",
        ),
        (
            FileNotFoundError(_answer("NoSuchBucket", "404 Not Found")),
            "the bucket bucket does not exist: check its name, or create it",
        ),
    ],
)
def test_an_error_is_one_line_with_the_fix(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(obstore, "put", fail)
    kind = InputError if isinstance(error, FileNotFoundError) else Unavailable
    with pytest.raises(kind) as caught:
        Bucket(URL, MemoryStore(), waits_s=()).put("a", b"1")
    text = str(caught.value)
    assert text.startswith("s3://bucket/run: ")
    assert message in text
    assert "\n" not in text
    assert "Debug" not in text
