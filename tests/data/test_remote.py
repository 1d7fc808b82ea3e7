"""URLs are fetched once and completely, from a loopback HTTP server and in-memory buckets."""

import json
import tarfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos as sample
from storage import file_server
from storage.file_server import Answer, Server

from jaxtrain.data import remote
from jaxtrain.data.video import files, sets
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Bucket, Busy

SECRET = "sEcReT0123"
SIGNED = f"X-Amz-Date=20260101T000000Z&X-Amz-Signature={SECRET}"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes proxies and waits."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(remote, "_RETRIES", 2)
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 1)  # a part of a chunk is lost with its connection


@pytest.fixture
def local_videos(tmp_path: Path) -> Path:
    """Three videos and a tar with one of them."""
    folder = tmp_path / "made"
    for number in range(3):
        sample.write(folder / f"{number}.mp4", 20 + number)
    with tarfile.open(folder / "s.tar", "w") as tar:
        tar.add(folder / "2.mp4", "inner.mp4")
    return folder


@pytest.fixture
def store(local_videos: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """s3://bucket with two videos and a tar."""
    with file_server.bucket(monkeypatch, "bucket") as memory:
        for name in ("0.mp4", "sub/1.mp4"):
            memory.put(name, local_videos / name[-5:])
        memory.put("s.tar", local_videos / "s.tar")
        for name in ("readme.md", "._0.mp4", ".trash/2.mp4"):
            memory.put(name, b"")
        yield memory


@pytest.fixture
def server() -> Iterator[Server]:
    with file_server.serving() as served:
        yield served


def _find(path: str, cache: Path) -> tuple[list[files.VideoFile], list[str]]:
    """Finds the files as a run does; fetches those at http:// as a worker that cuts videos does."""
    said: list[str] = []
    by_http = "http" in (
        path if "://" in path or not Path(path).is_file() else Path(path).read_text()
    )
    how = {"fetch_videos": not by_http, "by_http": by_http}
    found = files.find(path, "--data.path", cache, said.append, **how)
    left = {video.url: video.version for video in found if video.url}
    copies = remote.fetch(left, cache, "--data.path", said.append)
    return [
        video._replace(path=copies[video.url], url="") if video.url else video for video in found
    ], said


def _cached_files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("remote/**/*") if path.is_file())


NAMES = ["bucket/0.mp4", "bucket/s.tar/inner.mp4", "bucket/sub/1.mp4"]


def test_folders_and_files_are_fetched_once(store: Bucket, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found, said = _find("s3://bucket", cache)
    assert [one.name for one in found] == NAMES
    assert said == [f"fetching 3 of 3 files into {cache / 'remote'} (once)"]
    assert Path(found[0].path).read_bytes() == (tmp_path / "made/0.mp4").read_bytes()
    again, said = _find("s3://bucket/", cache)
    assert (again, said) == (found, [])
    own = tmp_path / "own.txt"
    own.write_text("s3://bucket/sub/1.mp4\nmade/2.mp4\n")
    mixed, _ = _find(str(own), cache)
    assert [one.name for one in mixed] == ["bucket/sub/1.mp4", "made/2.mp4"]
    assert not list(cache.rglob(".*"))


@pytest.mark.parametrize("path", ["s3://bucket", "s3://bucket/0.mp4", "s3://bucket/s.tar"])
def test_a_changed_object_is_fetched_again_and_said(
    store: Bucket, local_videos: Path, tmp_path: Path, path: str
) -> None:
    cache = tmp_path / "cache"
    first, _ = _find(path, cache)
    name = "s.tar" if path.endswith("tar") else "0.mp4"
    with tarfile.open(local_videos / "new.tar", "w") as tar:
        tar.add(local_videos / "1.mp4", "inner.mp4")
    new = (local_videos / ("new.tar" if name == "s.tar" else "2.mp4")).read_bytes()
    store.put(name, new)
    second, said = _find(path, cache)
    assert [one.name for one in second] == [one.name for one in first]
    changed = next(one for one in second if name in one.file)
    assert Path(changed.file).read_bytes() == new
    assert said[0] == (
        f"--data.path: 1 of {3 if path == 's3://bucket' else 1} files have changed since they were "
        f"fetched, such as s3://bucket/{name}"
    )
    assert sum(one in first for one in second) == len(first) - 1
    assert _find(path, cache) == (second, [])


def test_errors_of_a_bucket_name_the_flag(
    store: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, words in (
        (
            "s3://bucket/gone.mp4",
            r"s3://bucket/gone\.mp4 cannot be fetched: there is no such object",
        ),
        ("s3://bucket/none", "no video files found"),
        ("s3://bucket/0.mp4?versionId=1", r"0\.mp4\?hidden has a query"),
        ("nosuch://a/b.mp4", "use a path, https://, s3://, or gs://"),
    ):
        with pytest.raises(InputError, match=f"--data.path {words}|{words}") as caught:
            _find(address, tmp_path)
        assert "\n" not in str(caught.value)

    def busy(*arguments: Any, **more: Any) -> None:
        raise Busy("s3://bucket: cannot read")

    for name in ("versions", "download"):
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, name, busy)
            with pytest.raises(Busy, match=r"--data\.path s3://bucket: cannot read"):
                _find("s3://bucket", tmp_path)
    assert not _cached_files(tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/hostname",
        "ftp://host/a.mp4",
        "zip://a.mp4::https://host/b.zip",
        "https:///a.mp4",
        "https://host:99999/a.mp4",
        "https://host\\@other/a.mp4",
        f"s3://key:{SECRET}@bucket/a.mp4",
        f"https://user:pa/{SECRET}@host/a.mp4",
        f" HTTPS://user:{SECRET}@host/a.mp4",
        "https://host/a.mp4?hidden",
    ],
)
def test_other_addresses_are_rejected_before_a_request(address: str, tmp_path: Path) -> None:
    """On the command line, and in a list."""
    with pytest.raises(InputError) as caught:
        _find(address, tmp_path)
    assert SECRET not in str(caught.value)
    listed = tmp_path / "list.jsonl"
    listed.write_text(json.dumps(address))
    with pytest.raises(InputError) as caught:
        _find(str(listed), tmp_path)
    assert SECRET not in str(caught.value)


def test_queries_and_escapes_are_sent_as_they_are(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    body = (local_videos / "0.mp4").read_bytes()
    query = f"a=b%20c&d=%2F&{SIGNED}"
    server.files["/a%20b%2Fc.mp4"] = Answer(body, query=query)
    (one,), _ = _find(f"{server.base}/a%20b%2Fc.mp4?{query}#part", tmp_path / "cache")
    assert Path(one.path).read_bytes() == body
    assert server.asked == [f"/a%20b%2Fc.mp4?{query}"]
    server.files["/d%20e.mp4"] = Answer(body)
    _find(f"{server.base}/d e.mp4", tmp_path / "cache")
    assert server.asked[1:] == ["/d%20e.mp4"]


@pytest.mark.parametrize(
    ("answer", "error", "words", "requests"),
    [
        (Answer(b"x" * 9000, sent=5000), RunAgain, r"received \d,000 of 9,000 bytes, after 8", 9),
        (Answer(b"x" * 9000, chunked=True), InputError, "announces no size", 1),
        (Answer(b"x" * 9000, sent=5000, announced=False), InputError, "announces no size", 1),
        (Answer(b"<html>log in</html>"), InputError, "is an HTML page, .* a login page, and", 1),
        (Answer(b"\n <!DOCTYPE HTML><p>log in"), InputError, "is an HTML page", 1),
        (Answer(b"<Error><Code>AccessDenied"), InputError, "error message of a server", 1),
        (Answer(b"version https://git-lfs.github.com/spec/v1\n"), InputError, "LFS pointer", 1),
        (Answer(b"x", headers={"Content-Type": "text/html; charset=x"}), InputError, "web page", 1),
        (Answer(b"x", 401), InputError, r"HTTP 401 Unauthorized: .*login", 1),
        (Answer(b"x", 403), InputError, r"HTTP 403 Forbidden: a presigned URL may have exp", 1),
        (Answer(b"x", 404), InputError, "HTTP 404 Not Found: check the URL", 1),
        (Answer(b"x", 410), InputError, "HTTP 410 Gone: check the URL", 1),
        (Answer(b"x", 503), RunAgain, r"HTTP 503 Service Unavailable: start again later", 3),
        (Answer(b"x", headers={"Content-Length": str(10**17)}), RunAgain, "are free", 1),
    ],
    ids=map(str, range(14)),
)
def test_anything_but_the_complete_file_is_never_kept(
    answer: Answer,
    error: type[Exception],
    words: str,
    requests: int,
    server: Server,
    tmp_path: Path,
) -> None:
    server.files["/x.mp4"] = answer
    with pytest.raises(error, match=words) as caught:
        _find(f"{server.base}/x.mp4?{SIGNED}", tmp_path)
    assert "\n" not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None
    assert not _cached_files(tmp_path)
    assert not list(tmp_path.rglob(".x*"))
    assert len(server.asked) == requests


@pytest.mark.parametrize(("ranges", "tag"), [(True, '"1"'), (True, None), (False, 'W/"1"')])
def test_a_broken_connection_is_continued(
    ranges: bool, tag: str | None, server: Server, local_videos: Path, tmp_path: Path
) -> None:
    body = (local_videos / "0.mp4").read_bytes()
    headers = {} if tag is None else {"ETag": tag}
    server.files["/x.mp4"] = [
        Answer(body, sent=100, ranges=ranges, headers=headers),
        Answer(body, ranges=ranges, headers=headers),
    ]
    (one,), _ = _find(f"{server.base}/x.mp4", tmp_path)
    assert Path(one.path).read_bytes() == body
    # obstore itself continues a file that has a tag, but only in the first minutes of a download.
    # Without ranges, the last request is for the complete file.
    later = [(asked or "complete").partition("-")[0] for asked in server.ranges[1:]]
    assert later == ["bytes=100"] * (len(later) - (not ranges)) + ["complete"] * (not ranges)
    assert len(later) <= 2 + (not ranges)


def test_parts_of_two_versions_are_not_joined(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    old, new = ((local_videos / f"{number}.mp4").read_bytes() for number in range(2))
    server.files["/x.mp4"] = [
        Answer(old, sent=100, ranges=True, headers={"ETag": '"1"'}),
        Answer(new, ranges=True, headers={"ETag": '"2"'}),
    ]
    (one,), _ = _find(f"{server.base}/x.mp4", tmp_path)
    assert Path(one.path).read_bytes() == new


def test_names_of_any_length_and_script_are_kept(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    body = (local_videos / "0.mp4").read_bytes()
    stem = "v" * 200 + "🙂" * 40
    server.files[urllib.parse.quote(f"/{stem}.mp4")] = Answer(body)
    (one,), _ = _find(f"{server.base}/{stem}.mp4", tmp_path)
    kept = Path(one.path)
    assert kept.read_bytes() == body
    assert 145 < len(kept.name.encode()) <= 150
    assert f"{stem}.mp4".endswith(kept.name)


def test_an_unreachable_server_is_a_temporary_failure(tmp_path: Path) -> None:
    with file_server.serving() as gone:
        base = gone.base
    with pytest.raises(RunAgain, match=r"x\.mp4 cannot be fetched: the connection failed: check"):
        _find(f"{base}/x.mp4", tmp_path)
    with pytest.raises(InputError, match=r"host\.invalid is an unknown host"):
        _find("http://host.invalid/x.mp4", tmp_path)


def test_a_silent_server_is_a_temporary_failure(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_TIMEOUTS", {"read_timeout": "100ms"})
    monkeypatch.setattr(remote, "_BREAKS", 1)
    server.files["/x.mp4"] = Answer(b"x" * 3, pause_s=0.5)
    with pytest.raises(RunAgain, match=r"received \d of 3 bytes, after 1 broken connections"):
        _find(f"{server.base}/x.mp4", tmp_path)
    assert not _cached_files(tmp_path)


def test_the_first_failure_stops_the_others(server: Server, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(f"{server.base}/slow.mp4\n{server.base}/gone.mp4\n")
    server.files["/slow.mp4"] = Answer(b"x" * 10**5, pause_s=0.01)
    with pytest.raises(InputError, match=r"gone\.mp4 cannot be fetched: HTTP 404"):
        _find(str(listed), tmp_path)
    assert not _cached_files(tmp_path)


def test_an_unreadable_tar_is_named_and_fetched_again_once_it_is_removed(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    """For example after an interrupted upload to the server."""
    good = (local_videos / "s.tar").read_bytes()
    server.files["/x.tar"] = [Answer(good[:700]), Answer(good)]
    words = r"^(.*/x\.tar) cannot be read as a tar: .*: copy it again, or remove it$"
    with pytest.raises(InputError, match=words) as caught:
        _find(f"{server.base}/x.tar", tmp_path / "cache")
    Path(str(caught.value).partition(" cannot")[0]).unlink()
    (one,), _ = _find(f"{server.base}/x.tar", tmp_path / "cache")
    assert one.name.endswith("/inner.mp4")


@pytest.mark.parametrize("name", ["x.mp4", "x.tar", "list.txt"])
def test_runs_fetch_nothing_by_http(name: str, server: Server, tmp_path: Path) -> None:
    """Preparation does, in the worker that cuts the video."""
    path = f"{server.base}/{name}"
    if name == "list.txt":
        (tmp_path / name).write_text(f"{server.base}/x.mp4?{SIGNED}\n")
        path = str(tmp_path / name)
    words = f"prepare these first with `.* prepare clips {path} OUT`, and pass --data.path OUT"
    with pytest.raises(InputError, match=words) as caught:
        sets.CachedSet.of(path, "--data.path", Settings(), tmp_path, print)
    assert SECRET not in str(caught.value)
    assert not server.asked


def test_redirects_are_followed_to_http_only(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    server.files["/good.mp4"] = Answer((local_videos / "0.mp4").read_bytes())
    targets = ("/good.mp4", "file:///etc/hostname", "ftp://127.0.0.1/a.mp4", "/3.mp4")
    for number, target in enumerate(targets):
        server.files[f"/{number}.mp4"] = Answer(b"", 302, headers={"Location": target})
    (one,), _ = _find(f"{server.base}/0.mp4", tmp_path)
    assert Path(one.path).read_bytes() == (local_videos / "0.mp4").read_bytes()
    for number in range(1, len(targets)):
        with pytest.raises(InputError, match="redirect is not followed"):
            _find(f"{server.base}/{number}.mp4", tmp_path)


def test_addresses_that_differ_in_their_signature_are_the_same_file(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    server.files["/x.mp4"] = Answer((local_videos / "0.mp4").read_bytes())
    first, _ = _find(f"{server.base}/x.mp4?{SIGNED}", tmp_path)
    second, said = _find(f"{server.base}/x.mp4?{SIGNED}more&X-Amz-Expires=60", tmp_path)
    assert (first, said) == (second, [])
    assert server.asked == [f"/x.mp4?{SIGNED}"]  # the server gets the complete query


def test_addresses_that_differ_in_their_query_are_different_files(
    server: Server, local_videos: Path, tmp_path: Path
) -> None:
    server.files["/x.mp4"] = [Answer((local_videos / f"{n}.mp4").read_bytes()) for n in range(2)]
    listed = tmp_path / "list.txt"
    listed.write_text(f"{server.base}/x.mp4?part=1&token={SECRET}\n{server.base}/x.mp4?part=2\n")
    found, _ = _find(str(listed), tmp_path)
    assert len({one.name for one in found}) == len({one.path for one in found}) == 2
    assert all(one.name.endswith(".mp4") for one in found)
    assert SECRET not in str(found)


def test_links_to_fetched_files_are_never_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes of a host make the same links, and active runs read them."""
    copy = tmp_path / "cache" / "all.tar"
    copy.parent.mkdir()
    copy.write_bytes(b"content")
    listed = {"gs://bucket/one/sub/all.tar": (7, "etag")}
    monkeypatch.setattr(remote, "list_folder", lambda address, flag: listed)
    monkeypatch.setattr(remote, "fetch", lambda listed, *more: dict.fromkeys(listed, str(copy)))
    place = tmp_path / "set" / "sub" / "all.tar"
    for _ in range(2):
        remote.copy_folder("gcs://bucket/one/", tmp_path / "set", tmp_path, "--x", print)
        assert place.read_bytes() == b"content"
    assert [path.name for path in place.parent.iterdir()] == ["all.tar"]
    monkeypatch.setattr(Path, "unlink", None)  # a link that is right is not touched
    remote.copy_folder("gcs://bucket/one/", tmp_path / "set", tmp_path, "--x", print)
