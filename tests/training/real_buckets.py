"""Real runs in a bucket, through a real S3 API on loopback, with kills, faults and separate disks.

Not part of the suite: it requires ``pip install -e '.[test,buckets]'``. Run it with
``python -m pytest tests/training/real_buckets.py``, or ``.ci/run buckets``.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_server import BUCKET, FaultProxy, GoogleProxy, Server
from program import (
    TINY_MLM,
    command,
    environment,
    example_ids,
    losses,
    run,
    train,
    two_processes,
    write_corpus,
)

TINY = [
    *TINY_MLM,
    *("--data.path", "corpus", "--mesh.fsdp", "2", "--mesh.shard", "params"),
    *("--simulate-devices", "2", "--checkpoint.every", "4", "--checkpoint.keep", "2"),
    *("--loop.record_examples", "True"),
]
WAIT_S = 280


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a run of 16 steps on disk, which the others are compared with."""
    directory = tmp_path_factory.mktemp("buckets")
    write_corpus(directory)
    train(directory, *TINY, "--loop.steps", 16, "--output-dir", "straight")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("moto") / "log.txt") as one:
        yield one


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as one:
        yield one


def arguments(name: str, steps: int) -> list[str]:
    where = f"s3://{BUCKET}/{name}"
    return [*TINY, "--loop.steps", str(steps), "--output-dir", where, "--resume", "latest"]


def same_as_straight(place: Path, server: Server, name: str) -> None:
    """Compares every loss and every example in the bucket with the undisturbed run."""
    copy = place / f"copy-{name}"
    server.download(name, copy, without="data/")
    assert losses(copy) == losses(place / "straight")
    assert example_ids(copy) == example_ids(place / "straight")
    assert (copy / "report.html").is_file()
    assert [json.loads(line) for line in (copy / "history.jsonl").read_text().splitlines()]
    assert ".lease" not in server.sizes(name)


def test_a_kill_during_an_upload_and_the_loss_of_the_disk(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    def later(method: str, path: str) -> bool:
        return method == "PUT" and "/data/" in path and "/data/4-" not in path

    proxy.fault = lambda method, path: "slow" if later(method, path) else ""
    variables = environment(place, **proxy.variables)
    process = subprocess.Popen(
        command(*arguments("killed", 16)),
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + WAIT_S
    while not any(later(method, path) for method, path, _ in proxy.requests):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = server.sizes("killed")
    assert [name for name in there if name.startswith("checkpoints/")] == ["checkpoints/4.json"]
    assert {name.split("-")[0] for name in there if name.startswith("data/")} >= {"data/4"}
    shutil.rmtree(place / "cache" / "buckets")
    text = train(place, *arguments("killed", 16), **server.variables)
    assert f"fetching checkpoint 4 from s3://{BUCKET}/killed" in text
    same_as_straight(place, server, "killed")
    there = server.sizes("killed")
    steps = {Path(name).stem for name in there if name.startswith("checkpoints/")}
    assert "16" in steps
    assert len(steps) <= 2
    saves = {name.split("/")[1].partition("-")[0] for name in there if name.startswith("data/")}
    assert saves == steps  # nothing is left of deleted checkpoints and of the interrupted upload


def two(
    place: Path, disks: tuple[str, str], steps: int, name: str, *servers: dict[str, str]
) -> str:
    """Runs two processes with separate disks; returns the output of process 0."""
    first, second = (str(place / disk) for disk in disks)
    with two_processes(
        place,
        *arguments(name, steps),
        both=servers[0] | {"TMPDIR": str(place)},
        second={"JAXTRAIN_CACHE": second, **servers[-1]},
        first={"JAXTRAIN_CACHE": first},
    ) as processes:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs[0]


def test_two_hosts_that_share_nothing_and_then_one(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    two(place, ("host0", "host1"), 8, "hosts", server.variables)
    stored = json.loads(server.read("hosts/checkpoints/8.json"))
    assert stored["layout"] == {"shards": 2, "of_part": [[0], [1]]}
    assert {name.partition("/")[0] for name in stored["files"]} == {"0", "1"}

    # One host is replaced, and fetches only its own part.
    shutil.rmtree(place / "host1" / "buckets")
    two(place, ("host0", "host1"), 12, "hosts", server.variables, proxy.variables)
    fetched = [path for method, path, _ in proxy.requests if method == "GET" and "/data/" in path]
    assert fetched
    assert not [path for path in fetched if "/data/" in path and "/0/" in path]

    # Both are replaced by one host.
    text = train(
        place, *arguments("hosts", 16), **server.variables, JAXTRAIN_CACHE=str(place / "host2")
    )
    assert "fetching checkpoint 12" in text
    assert "parts 0, 1" in text
    assert "resumed from" in text
    copy = place / "copy-hosts"
    server.download("hosts", copy, without="data/")
    assert losses(copy) == losses(place / "straight")
    straight = {step: sorted(ids) for step, (_, ids) in example_ids(place / "straight").items()}
    assert {step: sorted(ids) for step, (_, ids) in example_ids(copy).items()} == straight


def test_a_connection_with_many_faults(place: Path, server: Server, proxy: FaultProxy) -> None:
    kinds = ("SlowDown", "cut", "InternalError", "ExpiredToken", "QuotaExceeded", "cut")
    injected = dict.fromkeys(kinds, 0)

    def fault(method: str, path: str) -> str:
        number = len(proxy.requests)
        if (".lease" in path and method == "PUT" and number < 20) or number % 12:
            return ""  # the start of a run requires the lease
        kind = kinds[number // 12 % len(kinds)]
        injected[kind] += 1
        return kind

    proxy.fault = fault
    text = ""
    for steps in (8, 16):  # the second one also fetches
        shutil.rmtree(place / "faulty", ignore_errors=True)
        for _ in range(5):  # a launcher would restart it
            found = run(
                place,
                *arguments("faults", steps),
                **proxy.variables,
                JAXTRAIN_CACHE=str(place / "faulty"),
            )
            text += found.stdout + found.stderr
            assert found.returncode in (0, 75), text
            if found.returncode == 0:
                break
        assert found.returncode == 0, text
    assert all(injected.values()), injected
    assert "is not uploaded yet: s3://bucket/faults: cannot" in text
    assert "Traceback" not in text
    assert "Debug source" not in text
    same_as_straight(place, server, "faults")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ExpiredToken", "the credentials are wrong or have expired: set AWS_ACCESS_KEY_ID"),
        ("AccessDenied", "allow these credentials to list, read, write, and delete there"),
        ("QuotaExceeded", "raise the quota or free space"),
    ],
)
def test_a_start_without_access_is_one_line(
    place: Path, proxy: FaultProxy, kind: str, message: str
) -> None:
    proxy.fault = lambda method, path: kind
    found = run(place, *arguments("refused", 8), **proxy.variables)
    assert found.returncode == 75, found.stdout + found.stderr
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_second_live_run_and_a_missing_bucket_are_refused(place: Path, server: Server) -> None:
    first = subprocess.Popen(
        command(*arguments("live", 100_000)),
        cwd=place,
        env=environment(place, **server.variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while "checkpoints/4.json" not in server.sizes("live"):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.delete("live/.lease")  # by mistake: written again, and nothing stops
        began = time.monotonic()
        while ".lease" not in server.sizes("live"):
            assert time.monotonic() < began + 60
            time.sleep(0.5)
        second = run(
            place, *arguments("live", 8), **server.variables, JAXTRAIN_CACHE=str(place / "other")
        )
        assert second.returncode == 75
        assert f"another run is using s3://bucket/live (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(WAIT_S) == 75
    finally:
        first.kill()
        first.wait()
    stored = sorted(server.sizes("live/checkpoints"))
    logged = server.read("live/log.txt").decode()
    last = int(logged.rpartition(" steps are done and saved")[0].rpartition(" of ")[0].split()[-1])
    assert f"{last}.json" in stored  # the last state was uploaded before the end
    missing = run(place, *TINY, "--output-dir", "s3://no-bucket/run", **server.variables)
    assert missing.returncode == 2
    assert "the bucket no-bucket does not exist: create it" in missing.stderr


def test_a_mirror_survives_the_loss_of_the_disk_and_damage(place: Path, server: Server) -> None:
    flags = [*TINY, "--output-dir", "local", "--checkpoint.mirror", f"s3://{BUCKET}/mirror"]
    train(place, *flags, "--loop.steps", 8, **server.variables)
    shutil.rmtree(place / "local")
    (name,) = (
        name
        for name in server.sizes("mirror")
        if name.startswith("data/8-") and name.endswith("/meta/metadata")
    )
    server.write(f"mirror/{name}", server.read(f"mirror/{name}").replace(b"step", b"stop"))
    text = train(place, *flags, "--loop.steps", 16, "--resume", "latest", **server.variables)
    assert "checkpoint s3://bucket/mirror/checkpoints/8 is damaged" in text
    assert "fetching checkpoint 4 from" in text
    same_as_straight(place, server, "mirror")
    assert losses(place / "local") == losses(place / "straight")
    assert "damaged/checkpoints/8.json" in server.sizes("mirror")


def test_google_cloud_storage(place: Path, server: Server) -> None:
    with GoogleProxy(server.port) as proxy:
        flags = [*TINY, "--output-dir", f"gs://{BUCKET}/google", "--resume", "latest"]
        train(place, *flags, "--loop.steps", 8, **proxy.variables)
        shutil.rmtree(place / "cache" / "buckets")
        text = train(place, *flags, "--loop.steps", 16, **proxy.variables)
    assert f"fetching checkpoint 8 from gs://{BUCKET}/google" in text
    same_as_straight(place, server, "google")


def test_commands_read_runs_in_a_bucket(place: Path, server: Server) -> None:
    url = f"s3://{BUCKET}/mirror"  # of the test before this one
    cache = {"JAXTRAIN_CACHE": str(place / "reader")}
    variables = server.variables | cache
    listed = run(place, "checkpoints", url, **variables)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "checkpoints/16" in listed.stdout
    assert "verified" in listed.stdout
    filled = run(place, "fill", f"{url}/", "ab [MASK] cd", **variables)
    assert filled.returncode == 0, filled.stderr
    exported = run(place, "export", f"{url}/checkpoints/16", "out.safetensors", **variables)
    assert exported.returncode == 0, exported.stderr
    report = run(place, "report", url, **variables)
    assert report.returncode == 0, report.stderr
    assert (place / "report.html").is_file()
    started = train(
        place,
        *TINY,
        *("--loop.steps", 20, "--output-dir", "from-bucket", "--resume", url),
        **variables,
    )
    assert "step 16 of 20" in started
    nothing = run(place, "export", f"s3://{BUCKET}/nothing", "x.safetensors", **variables)
    assert nothing.returncode == 2
    assert "has no intact checkpoint" in nothing.stderr
    assert os.listdir(place / "reader")
