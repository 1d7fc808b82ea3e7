"""Data prepared in a bucket through a real S3 API on loopback, with kills and faults.

Not part of the suite: it requires ``pip install -e '.[test,buckets,ray]'``. Run it with
``python -m pytest tests/jobs/real_buckets_prepare.py``, or ``.ci/run buckets``.
"""

import datetime
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos as sample
from launch.hosts import wait_for
from program import started
from storage.bucket_server import BUCKET, KEYS, FaultProxy, GoogleProxy, Server

from jaxtrain.data import remote
from jaxtrain.errors import InputError
from jaxtrain.storage.bucket import Bucket

# Ray's workers have niceness 15, so on a busy machine they would wait for all other processes.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
# Ray forks, and leaves sockets open.
pytestmark = pytest.mark.filterwarnings("default")

SIZE = ("--height", "32", "--width", "48", "--frames", "16", "--min-frames", "8")
SIZE += ("--min-side", "16", "--keep-cuts")
VIDEOS = 16
FILMS = f"s3://{BUCKET}/films"
KINDS = ("SlowDown", "InternalError", "cut", "slow")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("moto") / "log.txt") as one:
        yield one


@pytest.fixture
def proxy(server: Server, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    """Injects a fault into every thirtieth request."""
    kind: type[FaultProxy] = getattr(request, "param", FaultProxy)
    with kind(server.port) as one:

        def fault(method: str, path: str) -> str:
            number = len(one.requests)
            return "" if number % 30 else KINDS[number // 30 % len(KINDS)]

        one.fault = fault
        yield one


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """Videos in a folder and in the bucket under the same names, and the set of the folder.

    They are so large that each has its own tar.
    """
    folder = tmp_path_factory.mktemp("prepared")
    films = folder / "videos" / BUCKET / "films"
    for number in range(VIDEOS):
        frames = sample.busy(44 + number, number, height=128, width=128)
        sample.write(films / f"{number}.mkv", frames, codec="ffv1", pix_fmt="bgr0")
    (films / "broken.mp4").write_bytes(b"no video" * 99)
    for path in films.iterdir():
        server.write(f"films/{path.name}", path.read_bytes())
    output(prepare(folder, folder / "videos", folder / "clips"), 1)
    return folder


def start(place: Path, *words: object, **variables: str) -> subprocess.Popen[str]:
    return started(place, "prepare", *words, **variables)


def prepare(
    place: Path, source: Path | str, out: Path | str, *flags: str, **variables: str
) -> subprocess.Popen[str]:
    return start(place, "clips", source, out, *SIZE, *flags, **variables)


def output(process: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    return said


def without_versions(name: str, data: bytes) -> bytes:
    """Returns the content of a file without what identifies the video's own version."""
    if name.startswith(".jobs/records/"):
        return json.dumps(json.loads(data) | {"identity": None}).encode()
    if name.startswith(".jobs/"):
        return json.dumps(json.loads(data) | {"list": None}).encode()
    return data


def same_as_local(place: Path, server: Server, name: str) -> None:
    """Compares every object with the files of the folder."""
    copy = place / f"copy-{name}"
    server.download(name, copy)
    found = {
        top: {
            (inside := path.relative_to(top).as_posix()): without_versions(
                inside, path.read_bytes()
            )
            for path in top.rglob("*")
            if path.is_file() and path.suffix != ".lock"
        }
        for top in (copy, place / "clips")
    }
    assert found[copy] == found[place / "clips"]
    assert len(found[copy]) > 2 * VIDEOS
    assert not list((place / "cache").glob("scratch/*/*"))


def records(server: Server, name: str) -> int:
    return sum(one.startswith(".jobs/records/") for one in server.sizes(name))


@pytest.mark.parametrize("proxy", [FaultProxy, GoogleProxy], indirect=True)
def test_a_killed_command_resumes_through_a_connection_with_faults(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    source = FILMS.replace("s3", proxy.scheme)
    name = f"killed-{proxy.scheme}"
    out = f"{proxy.scheme}://{BUCKET}/{name}"
    process = prepare(place, source, out, "--workers", "2", **proxy.variables)
    wait_for(lambda: records(server, name) >= 5, "the first videos")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = records(server, name)
    assert 5 <= before < VIDEOS, "it was killed too late"
    assert "report.json" not in server.sizes(name)
    said = output(prepare(place, source, out, "--workers", "2", **proxy.variables), 1)
    assert "videos are already done" in said
    assert len({fault for _, _, fault in proxy.requests}) == 1 + len(KINDS)
    same_as_local(place, server, name)


def test_names_with_special_characters_are_fetched(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a b.mp4", "ü/é.mp4", "100%.mp4", "a%20b.mp4", "a#b.mp4", "p&q=1;[z]~{1}'.mp4"]
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    for name in names:
        server.write(f"names/{name}", name.encode())
    listed = remote.list_folder(f"s3://{BUCKET}/names", "--data.path")
    assert listed == {
        f"s3://{BUCKET}/{name}": version
        for name, version in Bucket(f"s3://{BUCKET}").versions("names").items()
    }
    paths = remote.fetch(listed, tmp_path, "--data.path", print)
    found = {name.partition("/names/")[2]: Path(path).read_text() for name, path in paths.items()}
    assert found == dict(zip(names, names, strict=True))


def test_profiles_of_the_aws_command_line_are_read_by_boto3(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "keys").write_text(
        "[default]\naws_access_key_id=FIRST\naws_secret_access_key=x\n"
        "[other]\naws_access_key_id=OTHER\naws_secret_access_key=y\nregion=eu-west-1\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    signed = []

    class Recorder(FaultProxy):
        def exchange(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
            signed.append(
                headers.get("authorization", "").partition("Credential=")[2].partition("/s3/")[0]
            )
            return super().exchange(method, path, headers, body)

    with Recorder(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        Bucket(f"s3://{BUCKET}").sizes("none")
        monkeypatch.setenv("AWS_PROFILE", "other")
        Bucket(f"s3://{BUCKET}").sizes("none")
        monkeypatch.setenv("AWS_PROFILE", "missing")
        with pytest.raises(
            InputError, match=r"profile \(missing\) could not be found: correct AWS"
        ):
            Bucket(f"s3://{BUCKET}")
        monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
        monkeypatch.delenv("AWS_PROFILE")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        Bucket(f"s3://{BUCKET}").sizes("none")
    today = f"{datetime.datetime.now(datetime.UTC):%Y%m%d}"
    assert signed == [f"FIRST/{today}/us-east-1", f"OTHER/{today}/eu-west-1", ""]


def test_a_store_that_stays_unavailable_is_one_line(place: Path, proxy: FaultProxy) -> None:
    proxy.fault = lambda method, path: (
        "SlowDown" if method == "PUT" and "/busy/" in path and ".tar" in path else ""
    )
    said = output(prepare(place, FILMS, f"s3://{BUCKET}/busy", **proxy.variables), 75)
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert re.search(r"cannot write [01]+\.tar \(503 Service Unavailable", error)
    assert "Traceback" not in said


def tokens(
    place: Path, path: Path | str, where: Path | str, **variables: str
) -> subprocess.Popen[str]:
    data = ("--data.path", path, "--data.cache_dir", where, "--model.vocab_size", 300)
    return start(place, "tokens", "--config", "demo_mlm", *data, **variables)


def test_tokens_are_uploaded_after_a_kill_and_fetched_by_another_machine(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    (place / "texts").mkdir()
    for number in range(6):
        words = [f"word{number * 7 + n % (50 + number)}" for n in range(3000)]
        (place / f"texts/{number}.txt").write_text(" ".join(words) + ".\n\n")
        server.write(f"texts/{number}.txt", (place / f"texts/{number}.txt").read_bytes())
    local, texts = place / "local", f"s3://{BUCKET}/texts"
    output(tokens(place, place / "texts", local))

    url = f"s3://{BUCKET}/cache"
    proxy.fault = lambda method, path: "slow" if method == "PUT" and "/tokens" in path else ""
    process = tokens(place, texts, url, **proxy.variables)
    wait_for(lambda: any("/tokens" in path for _, path, _ in proxy.requests), "the upload")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not [name for name in server.sizes("cache") if "/records/" in name]

    said = output(tokens(place, texts, url, **proxy.variables))
    assert f"ready in {url}: train with" in said
    assert "training a tokenizer" not in said  # uploaded before the kill
    said = output(
        tokens(place, texts, url, **server.variables, JAXTRAIN_CACHE=str(place / "other"))
    )
    assert "1 of 1 parts of the text are already done" in said
    assert said.count("MB from s3://bucket/cache/text/") == 3  # tokenizer, shard, and sequences
    copy = place / "copy-cache"
    server.download("cache", copy)
    (other,) = (place / "other/copies").iterdir()
    found = [
        {
            f"{path.parent.name.partition('-')[0]}/{path.name}": path.read_bytes()
            for path in top.glob("text/[a-z]*/*")
            # Names of shards depend on the times or ETags of the files.
            if path.name != "manifest.json" and path.suffix != ".shards"
        }
        for top in (copy, other, local)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].keys() >= {"shard/tokens", "vocabulary/tokenizer.json"}
