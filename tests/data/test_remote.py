"""URLs are fetched once and completely, from a loopback HTTP server and in-memory buckets."""

import base64
import builtins
import errno
import json
import tarfile
import time
import types
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_server
import pytest
import sample_videos as sample
from file_server import Answer, Server

from jaxtrain.data import remote, video
from jaxtrain.data.video import files
from jaxtrain.errors import InputError, RunAgain

SECRET = "sEcReT0123"
SIGNED = f"X-Amz-Date=20260101T000000Z&X-Amz-Signature={SECRET}"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes proxies, logins and waits."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Three videos and a tar with one of them."""
    folder = tmp_path / "made"
    for number in range(3):
        sample.write(folder / f"{number}.mp4", 20 + number)
    with tarfile.open(folder / "s.tar", "w") as tar:
        tar.add(folder / "2.mp4", "inner.mp4")
    return folder


@pytest.fixture
def store(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """s3://bucket with two videos, a tar and a list."""
    with file_server.bucket(monkeypatch) as memory:
        for name in ("0.mp4", "sub/1.mp4"):
            memory.pipe(f"/bucket/{name}", (made / name[-5:]).read_bytes())
        memory.pipe("/bucket/s.tar", (made / "s.tar").read_bytes())
        memory.pipe("/bucket/list.txt", b"0.mp4\ns3://bucket/sub/1.mp4\ns.tar\n")
        memory.pipe("/bucket/readme.md", b"")
        yield memory


@pytest.fixture
def server() -> Iterator[Server]:
    with file_server.serving() as made:
        yield made


def _find(path: str, cache: Path) -> tuple[list[files.Found], list[str]]:
    said: list[str] = []
    return files.find(path, "--data.path", cache, said.append), said


def _kept(cache: Path) -> list[str]:
    """Names of the fetched files in the cache, without their records."""
    return sorted(path.name for path in cache.glob("remote/*/*/*"))


NAMES = ["bucket/0.mp4", "bucket/s.tar/inner.mp4", "bucket/sub/1.mp4"]


def test_folders_lists_and_files_are_fetched_once(store: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found, said = _find("s3://bucket", cache)
    assert [one.name for one in found] == NAMES
    assert said == [f"fetching 3 of 3 files into {cache / 'remote'} (once)"]
    assert Path(found[0].path).read_bytes() == (tmp_path / "made/0.mp4").read_bytes()
    store.rm("/bucket/0.mp4")
    store.pipe("/bucket/0.mp4", b"other")
    again, said = _find("s3://bucket", cache)
    assert (again, said) == (found, [])
    listed, _ = _find("s3://bucket/list.txt", cache)
    assert sorted(one.name for one in listed) == NAMES
    own = tmp_path / "own.txt"
    own.write_text("s3://bucket/sub/1.mp4\nmade/2.mp4\n")
    mixed, _ = _find(str(own), cache)
    assert [one.name for one in mixed] == ["bucket/sub/1.mp4", "made/2.mp4"]
    assert not list(cache.rglob(".*"))


def test_fetched_files_are_opened_like_local_ones(store: Any, tmp_path: Path) -> None:
    model = types.SimpleNamespace(frames=6, height=32, width=48)
    config = video.Config(
        path="s3://bucket/list.txt", batch_size=1, cache_dir=str(tmp_path / "cache")
    )
    sources = config.open(model, seed=0, say=lambda line: None)
    assert (sources.files, sources.bad) == (3, ())


def test_a_truncated_object_is_not_kept(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(store).info
    monkeypatch.setattr(
        type(store), "info", lambda self, path, **more: {**real(self, path), "size": 10**6}
    )
    with pytest.raises(
        RunAgain, match=r"bucket/0\.mp4 .*: received [\d,]+ of 1,000,000 bytes \(4 tries"
    ):
        _find("s3://bucket/0.mp4", tmp_path)
    assert not _kept(tmp_path)


class _GoogleError(Exception):
    """Like gcsfs's error of an HTTP status."""

    code = 503


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("isdir", OSError(errno.EBUSY, "Reduce your request rate")),  # s3fs for HTTP 503
        ("find", OSError(errno.EREMOTEIO, "We encountered an internal error")),  # and for 500
        ("find", ConnectionError("reset")),
        ("open", _GoogleError("unavailable")),
    ],
    ids=str,
)
def test_a_busy_bucket_is_asked_again(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    real, failures = getattr(type(store), method), [error] * 2

    def fail_twice(self: Any, *arguments: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(self, *arguments, **more)

    monkeypatch.setattr(type(store), method, fail_twice)
    found, said = _find("s3://bucket", tmp_path / "cache")
    assert [one.name for one in found] == NAMES
    assert sum("retrying in" in line for line in said) == 2

    failures = [error] * 99
    with pytest.raises(RunAgain, match=r"--data\.path s3://bucket.*cannot be fetched: .*4 tries"):
        _find("s3://bucket", tmp_path / "other")


def test_the_variables_of_outputs_are_enough_for_inputs(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that botocore and gcsfs do not read; obstore does."""

    def options(address: str) -> Any:
        return remote._bucket(address, "--data.path")[0].storage_options

    for name in ("AWS_REGION", "GOOGLE_SERVICE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert options("s3://bucket/0.mp4") == options("gs://bucket/0.mp4") == {}
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", f'{{"private_key": "{SECRET}"}}')
    assert options("s3://bucket/0.mp4") == {"client_kwargs": {"region_name": "eu-west-1"}}
    assert options("gs://bucket/0.mp4") == {"token": {"private_key": SECRET}}
    for wrong in (SECRET, f'["{SECRET}"]', "[" * 9000 + SECRET):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", wrong)
        with pytest.raises(InputError, match="GOOGLE_SERVICE_ACCOUNT_KEY is not the content") as c:
            options("gs://bucket/0.mp4")
        assert SECRET not in str(c.value)


def test_wrong_addresses_give_one_line(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, words in (
        ("s3://bucket/gone.mp4", "gone.mp4 cannot be fetched: FileNotFoundError"),
        ("s3://nothing", "no video files found"),
        ("nosuch://a/b.mp4", "use a path, https://, s3://, or gs://"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            _find(address, tmp_path)
        assert "\n" not in str(caught.value)

    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"s3://b/a.mp4 requires .*pip install -e '\.\[cloud\]'"):
        _find("s3://b/a.mp4", tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/hostname",
        "ftp://host/a.mp4",
        "ssh://host/a.mp4",
        "memory://host/a.mp4",
        "local:///etc/hostname",
        "data://text/a.mp4",
        "simplecache::file:///etc/passwd",
        "https://x::file:///etc/a.mp4",
        "https://host/a::file:///etc/a.mp4",
        "zip://a.mp4::https://host/b.zip",
        "https:///a.mp4",
        "https://ho st/a.mp4",
        "https://host:port/a.mp4",
        "https://host\\@other/a.mp4",
        "s3:///a.mp4",
        f"https://user:{SECRET}@host/a.mp4",
        f"https://{SECRET}@host/a.mp4",
        f"s3://key:{SECRET}@bucket/a.mp4",
        f"https://user:pa/{SECRET}@host/a.mp4",
        f"HTTPS://user:{SECRET}@host/a.mp4",
        f" https://user:{SECRET}@host/a.mp4",
        "https://host/a.mp4?signed",
        "https://host/a.mp4?query=sha256:f94e14b94966",
    ],
)
def test_other_addresses_are_rejected_before_a_request(address: str, tmp_path: Path) -> None:
    """On the command line, in a local list, and in a list at a URL."""
    with pytest.raises(InputError) as caught:
        _find(address, tmp_path)
    assert SECRET not in str(caught.value)
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([address]))
    with pytest.raises(InputError) as caught:
        _find(str(listed), tmp_path)
    assert SECRET not in str(caught.value)
    with pytest.raises(InputError) as caught:
        files._listed("https://host/list.json", "--data.path", listed)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [
        "/etc/hostname",
        "~/a.mp4",
        "//other/a.mp4",
        "../../a.mp4",
        "sub/../../../a.mp4",
        "http://host/a.mp4",
        "file:///etc/hostname",
        "memory://bucket/a.mp4",
        "..\x00/a.mp4",
    ],
)
def test_a_list_at_an_address_cannot_reach_local_files(item: str, tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    for entry in (item, {"full_path": item}):
        listed.write_text(json.dumps([entry]))
        with pytest.raises(InputError, match=r"--data\.path https://host/data/list\.json"):
            files._listed("https://host/data/list.json", "--data.path", listed)


def test_relative_items_stay_on_the_host_of_the_list(tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    items = ["a.mp4", "../b.mp4", "./c/../d.mp4", "e.mp4?v=1", "s3://other/f.mp4", "g:/@x/h.mp4"]
    listed.write_text(json.dumps(items))
    found = files._listed(f"https://host/data/l.json?{SIGNED}", "--data.path", listed)
    assert [one.path for one in found] == [
        "https://host/data/a.mp4",
        "https://host/b.mp4",
        "https://host/data/d.mp4",
        "https://host/data/e.mp4?v=1",
        "s3://other/f.mp4",
        "https://host/data/g:/@x/h.mp4",
    ]
    listed.write_text('["http://other/a.mp4"]')
    (one,) = files._listed("http://host/l.json", "--data.path", listed)
    assert one.path == "http://other/a.mp4"


def test_fetched_files_have_a_record(server: Server, made: Path, tmp_path: Path) -> None:
    body = (made / "0.mp4").read_bytes()
    server.files["/a b.mp4"] = Answer(body)
    server.files["/a%20b.mp4"] = Answer(body, headers={"ETag": '"tag"'})
    (one,), _ = _find(f"{server.base}/a b.mp4", tmp_path / "cache")
    assert Path(one.path).read_bytes() == body
    (record,) = (tmp_path / "cache/remote").glob("*/*.json")
    found = json.loads(record.read_text())
    assert (found["size"], found["etag"]) == (len(body), '"tag"')
    assert server.asked == ["/a%20b.mp4"]
    chunked = f"{server.base}/c.mp4"
    server.files["/c.mp4"] = Answer(body, chunked=True)
    (one,), _ = _find(chunked, tmp_path / "cache")
    assert Path(one.path).read_bytes() == body


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Answer(b"x" * 9000, sent=5000), RunAgain, r"received 5,000 of 9,000 bytes \(4 tries"),
        (Answer(b"x" * 9000, sent=5000, chunked=True), RunAgain, "ended after [0-9,]+ bytes"),
        (Answer(b"x" * 9000, sent=5000, announced=False), InputError, "announces no size"),
        (Answer(b"<html>log in</html>"), InputError, "contains HTML, perhaps a login page: open"),
        (Answer(b"\n <!DOCTYPE HTML><p>log in"), InputError, "contains HTML"),
        (Answer(b"x", headers={"Content-Type": "text/html; charset=x"}), InputError, "web page"),
        (Answer(b"x", headers={"Content-Encoding": "gzip"}), InputError, "Content-Encoding"),
        (Answer(b"x", 206), InputError, "HTTP 206"),
        (Answer(b"x", 403), InputError, r"HTTP 403 Forbidden: .*netrc"),
        (Answer(b"x", 404), InputError, "HTTP 404 Not Found"),
        (Answer(b"x", 503), RunAgain, r"HTTP 503 Service Unavailable \(4 tries"),
        (
            Answer(b"x", headers={"Content-Length": str(10**17)}),
            RunAgain,
            "are free",
        ),
    ],
    ids=map(str, range(12)),
)
def test_anything_but_the_complete_file_is_never_kept(
    answer: Answer, error: type[Exception], words: str, server: Server, tmp_path: Path
) -> None:
    server.files["/x.mp4"] = answer
    with pytest.raises(error, match=words) as caught:
        _find(f"{server.base}/x.mp4?{SIGNED}", tmp_path)
    assert "\n" not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None
    assert not _kept(tmp_path)
    assert not list(tmp_path.rglob(".x*"))
    assert len(server.asked) == (4 if "4 tries" in str(caught.value) else 1)


def test_a_list_has_a_limit(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_LIST_BYTES", 100)
    server.files["/announced.txt"] = Answer(b"a.mp4\n" * 100)
    server.files["/chunked.txt"] = Answer(b"a.mp4\n" * 100, chunked=True)
    for name in ("announced", "chunked"):
        with pytest.raises(InputError, match=r"may have at most 100|more than 100 bytes"):
            _find(f"{server.base}/{name}.txt", tmp_path)
    assert not _kept(tmp_path)


def test_a_list_is_small_enough_to_be_parsed(server: Server, tmp_path: Path) -> None:
    """The limit is 2**26 bytes, which JSON may expand to 1.4 GB in memory."""
    server.files["/a.json"] = Answer(b"", headers={"Content-Length": str(2**26 + 1)})
    with pytest.raises(
        InputError, match="67,108,865 bytes, but a list at a URL may have at most 67,108,8"
    ):
        _find(f"{server.base}/a.json", tmp_path)


def test_names_of_any_length_and_script_are_kept(
    server: Server, made: Path, tmp_path: Path
) -> None:
    body = (made / "0.mp4").read_bytes()
    for stem in ("v" * 300, "視" * 100, "é" * 200, "🙂" * 80):
        server.files[urllib.parse.quote(f"/{stem}.mp4")] = Answer(body)
        (one,), _ = _find(f"{server.base}/{stem}.mp4", tmp_path)
        kept = Path(one.path)
        assert kept.read_bytes() == body
        assert 145 < len(kept.name.encode()) <= 150
        assert f"{stem}.mp4".endswith(kept.name)


def test_an_invalid_host_name_is_reported(tmp_path: Path) -> None:
    address = f"https://ü{'a' * 70}.org/x.mp4?{SIGNED}"
    with pytest.raises(InputError) as caught:
        _find(address, tmp_path)
    said = str(caught.value)
    assert said.startswith("--data.path https://ü")
    assert said.endswith("aaa.org' is not a valid host name: check the URL")
    assert r": '\xfcaaa" in said
    assert SECRET not in said


def test_temporary_failures_are_retried(server: Server, made: Path, tmp_path: Path) -> None:
    body = (made / "0.mp4").read_bytes()
    server.files["/x.mp4"] = [
        Answer(b"", 500),
        Answer(body, sent=100),
        Answer(b"", 429, headers={"Retry-After": "0"}),
        Answer(body),
    ]
    (one,), said = _find(f"{server.base}/x.mp4?{SIGNED}", tmp_path)
    assert Path(one.path).read_bytes() == body
    assert [line for line in said if "HTTP 429" in line]
    assert len(server.asked) == 4
    assert SECRET not in "".join(said)


def test_an_unreachable_server_is_a_temporary_failure(tmp_path: Path) -> None:
    with file_server.serving() as gone:
        base = gone.base
    with pytest.raises(RunAgain, match=r"the connection failed \(Connection refused\) \(4 tries\)"):
        _find(f"{base}/x.mp4", tmp_path)


def _late(server: Server, path: str) -> Answer:
    time.sleep(8)
    return Answer(b"x")


@pytest.mark.parametrize("slow", ["body", "headers", "chunks"])
def test_a_stalled_download_is_aborted(
    slow: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends occasional bytes, which never triggers a socket timeout."""
    monkeypatch.setattr(remote, "_STALL_S", 0.4)
    monkeypatch.setattr(remote, "_TRIES", 2)
    body = b"x" * 10**5
    if slow == "body":
        server.files["/x.mp4"] = Answer(body, pause_s=0.05)
    elif slow == "headers":
        monkeypatch.setattr(Server, "take", _late)
    else:
        chunks = {"Transfer-Encoding": "chunked"}  # the size of the first chunk, digit by digit
        server.files["/x.mp4"] = Answer(b"0" * 10**4, headers=chunks, announced=False, pause_s=0.05)
    begun = time.monotonic()
    with pytest.raises(RunAgain, match=r"fewer than 65,536 in 0\.4 s\) \(2 tries\)"):
        _find(f"{server.base}/x.mp4", tmp_path)
    assert time.monotonic() - begun < 7
    assert not _kept(tmp_path)


def test_a_copy_with_a_different_size_is_fetched_again(
    server: Server, made: Path, tmp_path: Path
) -> None:
    body = (made / "0.mp4").read_bytes()
    server.files["/x.mp4"] = Answer(body)
    address = f"{server.base}/x.mp4"
    (one,), _ = _find(address, tmp_path)
    (record,) = tmp_path.glob("remote/*/*.json")
    for spoil in (
        lambda: Path(one.path).write_bytes(body[:500]),
        lambda: record.write_text("{"),
        lambda: record.write_text('{"size": "x"}'),
    ):
        spoil()
        (again,), said = _find(address, tmp_path)
        assert Path(again.path).read_bytes() == body
        assert [line for line in said if "fetching it again" in line]
    assert len(server.asked) == 4
    record.unlink()  # older versions wrote none
    _, said = _find(address, tmp_path)
    assert said == []


@pytest.mark.parametrize("name", ["x.mp4", "x.tar", "x.json"])
def test_unreadable_files_are_removed_from_the_cache(
    name: str, server: Server, made: Path, tmp_path: Path
) -> None:
    """For example an invalid file kept by an older version, or an interrupted upload."""
    good = {
        "x.mp4": (made / "0.mp4").read_bytes(),
        "x.tar": (made / "s.tar").read_bytes(),
        "x.json": b'["y.mp4"]',
    }
    server.files[f"/{name}"] = [Answer(good[name][:-10][:700]), Answer(good[name])]
    server.files["/y.mp4"] = Answer(good["x.mp4"])
    if name == "x.json":
        server.files["/x.json"] = [Answer(b'["y.mp4"'), Answer(good["x.json"])]
    model = types.SimpleNamespace(frames=6, height=32, width=48)
    config = video.Config(
        path=f"{server.base}/{name}",
        val_path=str(made / "1.mp4"),
        batch_size=1,
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(InputError, match="removed from the cache"):
        config.open(model, seed=0, say=lambda line: None)
    assert not _kept(tmp_path / "cache")
    assert config.open(model, seed=0, say=lambda line: None).bad == ()


def test_redirects_are_followed_to_http_only(server: Server, made: Path, tmp_path: Path) -> None:
    server.files["/good.mp4"] = Answer((made / "0.mp4").read_bytes())
    for number, target in enumerate(
        (
            "/good.mp4",
            "file:///etc/hostname",
            "ftp://127.0.0.1/a.mp4",
            "data:video/mp4,abc",
            f"http://user:{SECRET}@127.0.0.1/a.mp4",
            "/3.mp4",
            "http://[/",
        )
    ):
        server.files[f"/{number}.mp4"] = Answer(b"", 302, headers={"Location": target})
    (one,), _ = _find(f"{server.base}/0.mp4", tmp_path)
    assert Path(one.path).read_bytes() == (made / "0.mp4").read_bytes()
    for number in range(1, 7):
        with pytest.raises(
            InputError, match=r"redirect is not followed|cannot be fetched"
        ) as wrong:
            _find(f"{server.base}/{number}.mp4", tmp_path)
        assert SECRET not in str(wrong.value)
    handler = remote._Redirects()
    request = remote._request("https://host/a.mp4", "--data.path")
    fp = types.SimpleNamespace(close=lambda: None)
    with pytest.raises(remote.urllib.error.HTTPError):  # from https to http
        handler.redirect_request(request, fp, 302, "", {}, "http://host/a.mp4")
    assert handler.redirect_request(request, fp, 302, "", {}, "https://other/a.mp4")


def test_a_proxy_login_is_sent_only_to_the_proxy(
    server: Server, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_server.serving() as proxy:
        target = server.base.replace("127.0.0.1", "localhost")
        proxy.files["http://host.invalid/x.mp4"] = Answer(
            b"", 302, headers={"Location": f"{target}/x.mp4"}
        )
        server.files["/x.mp4"] = Answer((made / "0.mp4").read_bytes())
        monkeypatch.setenv("http_proxy", proxy.base.replace("://", f"://user:{SECRET}@"))
        monkeypatch.setenv("no_proxy", "localhost")
        _find("http://host.invalid/x.mp4", tmp_path)
    login = base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert proxy.proxy_logins == [f"Basic {login}"]
    assert server.asked == ["/x.mp4"]
    assert server.proxy_logins == [None]


def test_logins_come_from_netrc(server: Server, made: Path, tmp_path: Path) -> None:
    body = (made / "0.mp4").read_bytes()
    server.files["/x.mp4"] = Answer(body)
    server.files["/y.mp4"] = Answer(
        b"", 302, headers={"Location": server.base.replace("127.0.0.1", "localhost") + "/x.mp4"}
    )
    file = tmp_path / "home/.netrc"
    file.parent.mkdir()
    file.write_text(f"machine 127.0.0.1 login me password {SECRET}\ndefault login d password e\n")
    file.chmod(0o600)
    _find(f"{server.base}/x.mp4", tmp_path)
    assert server.logins == ["Basic bWU6c0VjUmVUMDEyMw=="]
    _find(f"{server.base}/y.mp4", tmp_path / "other")
    assert server.logins[1:] == ["Basic bWU6c0VjUmVUMDEyMw==", None]  # another host gets none
    assert remote._login("other") is None
    plain = remote.urllib.parse.urlsplit("http://example.org/")
    assert not remote._is_private(plain)


def test_addresses_that_differ_in_their_signature_are_the_same_file(
    server: Server, made: Path, tmp_path: Path
) -> None:
    server.files["/x.mp4"] = Answer((made / "0.mp4").read_bytes())
    first, _ = _find(f"{server.base}/x.mp4?{SIGNED}", tmp_path)
    second, said = _find(f"{server.base}/x.mp4?{SIGNED}more&X-Amz-Expires=60", tmp_path)
    assert (first, said) == (second, [])
    assert server.asked == [f"/x.mp4?{SIGNED}"]  # the server gets the complete query


def test_addresses_that_differ_in_their_query_are_different_files(
    server: Server, made: Path, tmp_path: Path
) -> None:
    server.files["/x.mp4"] = [Answer((made / f"{n}.mp4").read_bytes()) for n in range(2)]
    listed = tmp_path / "list.txt"
    listed.write_text(f"{server.base}/x.mp4?part=1&token={SECRET}\n{server.base}/x.mp4?part=2\n")
    found, _ = _find(str(listed), tmp_path)
    assert len({one.name for one in found}) == len({one.path for one in found}) == 2
    assert all(one.name.endswith(".mp4") for one in found)
    assert SECRET not in str(found)
