"""Real runs in a bucket, through an S3 API on loopback, with kills, faults and separate disks.

The tests with ``gs`` in their names use Google's protocol, which a proxy translates for the same
server. Not part of the suite: requires ``pip install -e '.[test,buckets]'``. Run it with
``python -m pytest tests/checkpoint/real_buckets.py``, or ``.ci/run buckets``.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from program import (
    TINY_MLM,
    command,
    environment,
    example_ids,
    execute,
    losses,
    run,
    started,
    train,
    two_processes,
    wait_for,
    write_corpus,
)
from storage import of_users
from storage.bucket_server import BUCKET, SECRET, FaultProxy, GoogleProxy, Server, Sink

from jaxtrain.storage.bucket import Bucket

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


@pytest.fixture(params=[FaultProxy, GoogleProxy], ids=["s3", "gs"])
def proxy(server: Server, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    with request.param(server.port) as one:
        yield one


def arguments(name: str, steps: int, scheme: str = "s3") -> list[str]:
    where = f"{scheme}://{BUCKET}/{name}"
    return [*TINY, "--loop.steps", str(steps), "--output-dir", where, "--resume", "latest"]


def same_as_straight(place: Path, server: Server, name: str) -> None:
    """Compares every loss and every example in the bucket with the undisturbed run.

    No credential is in the bucket, or in the files of the run on disk.
    """
    copy = place / f"copy-{name}"
    server.files_of_run(name, copy)
    stages = (place / "cache" / "buckets").glob("*/run*")
    files = [one for folder in (copy, *stages) for one in folder.rglob("*") if one.is_file()]
    assert {one.name for one in files} >= {"log.txt", "config.json", "report.html"}
    assert [one for one in files if SECRET.encode() in one.read_bytes()] == []
    assert losses(copy) == losses(place / "straight")
    assert example_ids(copy) == example_ids(place / "straight")
    assert (copy / "report.html").is_file()
    assert [json.loads(line) for line in (copy / "history.jsonl").read_text().splitlines()]
    assert ".lease" not in server.sizes(name)


def steps_in(server: Server, name: str) -> tuple[set[str], set[str]]:
    """Returns the steps of the checkpoints in the bucket, and those that have files there."""
    names = "\n".join(server.sizes(name))
    return (
        set(re.findall(r"^checkpoints/(\d+)\.json$", names, re.MULTILINE)),
        set(re.findall(r"^checkpoints/files/(\d+)-", names, re.MULTILINE)),
    )


def test_a_kill_during_an_upload_and_the_loss_of_the_disk(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    name = f"killed-{proxy.scheme}"

    def later(method: str, path: str) -> bool:
        return method == "PUT" and "/files/" in path and "/files/4-" not in path

    proxy.fault = lambda method, path: "slow" if later(method, path) else ""
    process = started(place, *arguments(name, 16, proxy.scheme), **proxy.variables)
    wait_for(lambda: any(later(method, path) for method, path, _ in proxy.requests), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    steps, with_files = steps_in(server, name)
    assert steps == {"4"}
    assert with_files >= {"4"}
    shutil.rmtree(place / "cache" / "buckets")
    proxy.fault = lambda method, path: ""
    text = train(place, *arguments(name, 16, proxy.scheme), **proxy.variables)
    url = f"{proxy.scheme}://{BUCKET}/{name}"
    assert f"fetching checkpoints/4 from {url}" in text
    assert f"run directory {url}, local copies in {place / 'cache' / 'buckets'}/" in text
    assert f"resumed from {url}/checkpoints/4: step 4 of 16" in text
    assert text.count(str(place / "cache" / "buckets")) == 1
    same_as_straight(place, server, name)
    steps, with_files = steps_in(server, name)
    assert "16" in steps
    assert len(steps) <= 2
    # Nothing is left of deleted checkpoints and of the interrupted upload.
    assert with_files == steps


def two(place: Path, disks: tuple[str, str], steps: int, name: str, proxy: FaultProxy) -> None:
    """Runs two processes with separate disks, which reach the bucket through the proxy."""
    caches = [{"JAXTRAIN_CACHE": str(place / disk)} for disk in disks]
    with two_processes(
        place,
        *arguments(name, steps, proxy.scheme),
        both=proxy.variables | {"TMPDIR": str(place)},
        first=caches[0],
        second=caches[1],
    ) as processes:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def test_two_hosts_that_share_nothing_and_then_one(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    name = f"hosts-{proxy.scheme}"
    disks = f"{name}-0", f"{name}-1"
    two(place, disks, 8, name, proxy)
    stored = json.loads(server.read(f"{name}/checkpoints/8.json"))
    there = {one for one in server.sizes(name) if one.startswith(f"{stored['data']}/")}
    assert {f"{stored['data']}/{one}" for one in stored["files"]} < there
    own = [
        {path.name for path in (place / disk).glob(f"buckets/*/run*/{stored['data']}/state/ocdbt*")}
        for disk in disks
    ]
    assert own == [{"ocdbt.process_0"}, {"ocdbt.process_1"}]  # each has its shards

    # One host is replaced, and fetches all files of the checkpoint.
    shutil.rmtree(place / disks[1] / "buckets")
    two(place, disks, 12, name, proxy)

    # Both are replaced by one host.
    text = train(
        place,
        *arguments(name, 16, proxy.scheme),
        **proxy.variables,
        JAXTRAIN_CACHE=str(place / f"{name}-2"),
    )
    assert "fetching checkpoints/12" in text
    assert "resumed from" in text
    copy = place / f"copy-{name}"
    server.files_of_run(name, copy)
    assert losses(copy) == losses(place / "straight")
    straight = {step: sorted(ids) for step, (_, ids) in example_ids(place / "straight").items()}
    assert {step: sorted(ids) for step, (_, ids) in example_ids(copy).items()} == straight


def test_the_bucket_has_the_reason_of_a_failure(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    name = f"failed-{proxy.scheme}"
    flags = [*arguments(name, 60, proxy.scheme), "--optim.peak_lr", "1e30"]
    ended = run(place, *flags, **proxy.variables)
    assert ended.returncode == 2, ended.stderr
    reason = next(one for one in ended.stderr.splitlines() if one.startswith("error: "))
    copy = place / f"copy-{name}"
    server.files_of_run(name, copy)
    assert reason in (copy / "log.txt").read_text()
    last = json.loads((copy / "history.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["code"]) == ("end", 2)


def test_a_connection_with_many_faults(place: Path, server: Server, proxy: FaultProxy) -> None:
    name = f"faults-{proxy.scheme}"
    kinds = ("SlowDown", "cut", "InternalError", "ExpiredToken", "QuotaExceeded", "TooManyRequests")
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
        shutil.rmtree(place / name, ignore_errors=True)
        for _ in range(5):  # a launcher would restart it
            found = run(
                place,
                *arguments(name, steps, proxy.scheme),
                **proxy.variables,
                JAXTRAIN_CACHE=str(place / name),
            )
            text += found.stdout + found.stderr
            assert found.returncode in (0, 75), text
            if found.returncode == 0:
                break
        assert found.returncode == 0, text
    assert all(injected.values()), injected
    assert f"is not uploaded yet: {proxy.scheme}://bucket/{name}: cannot" in text
    assert "Traceback" not in text
    assert "Debug source" not in text
    assert SECRET not in text
    same_as_straight(place, server, name)


def test_a_start_without_access_is_one_line(place: Path, proxy: FaultProxy) -> None:
    """test_bucket.py has the messages of the other errors."""
    proxy.fault = lambda method, path: "ExpiredToken"
    found = run(place, *arguments("refused", 8, proxy.scheme), **proxy.variables)
    assert found.returncode == 75, found.stdout + found.stderr
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the credentials are wrong or have expired: set " in errors[0]
    assert SECRET not in found.stdout + found.stderr


def test_a_second_live_run_and_a_missing_bucket_are_refused(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    name = f"live-{proxy.scheme}"
    first = subprocess.Popen(
        command(*arguments(name, 100_000, proxy.scheme)),
        cwd=place,
        env=environment(place, **proxy.variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_for(lambda: "checkpoints/4.json" in server.sizes(name), first)
        server.delete(f"{name}/.lease")  # by mistake: written again, and nothing stops
        wait_for(lambda: ".lease" in server.sizes(name), first, seconds=60)
        second = run(
            place,
            *arguments(name, 8, proxy.scheme),
            **proxy.variables,
            JAXTRAIN_CACHE=str(place / "other"),
        )
        assert second.returncode == 75
        url = f"{proxy.scheme}://bucket/{name}"
        assert f"another run is using {url} (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(WAIT_S) == 75
    finally:
        first.kill()
        first.wait()
    stored = sorted(server.sizes(f"{name}/checkpoints"))
    copy = place / f"copy-{name}"
    server.files_of_run(name, copy)
    logged = (copy / "log.txt").read_text()
    last = int(logged.rpartition(" steps are done and saved")[0].rpartition(" of ")[0].split()[-1])
    assert f"{last}.json" in stored  # the last state was uploaded before the end
    missing = run(
        place, *TINY, "--output-dir", f"{proxy.scheme}://no-bucket/run", **proxy.variables
    )
    assert missing.returncode == 2
    assert "the bucket no-bucket does not exist: check its name" in missing.stderr


def test_files_of_a_user_in_the_bucket_stay_byte_for_byte(place: Path, server: Server) -> None:
    """Before a run, they are a refusal; beside one, nothing touches them, also not a prune."""
    files = of_users.files(3)
    for name, content in files.items():
        server.write(f"taken/{name}", content)
    done = run(place, *arguments("taken", 8), **server.variables)
    assert done.returncode == 2, done.stderr
    assert f"--output-dir s3://{BUCKET}/taken is not empty and not a run" in done.stderr
    assert server.sizes("taken").keys() == files.keys()
    train(place, *arguments("shared", 8), **server.variables)
    for name, content in files.items():
        server.write(f"shared/{name}", content)
    train(place, *arguments("shared", 12), **server.variables)
    back = [*arguments("shared", 10)[:-1], "8"]  # --resume 8
    train(place, *back, **server.variables)
    done = run(place, "checkpoints", f"s3://{BUCKET}/shared", "--prune", **server.variables)
    assert done.returncode == 0, done.stderr
    assert "deleted 1 checkpoint of" in done.stdout
    assert {name: server.read(f"shared/{name}") for name in files} == files


@pytest.mark.parametrize("told", ["straight/checkpoints/12", "8"])
def test_a_start_is_known_on_another_machine(place: Path, server: Server, told: str) -> None:
    """Killed before its first save, a run in a bucket still starts from what it was told."""
    name = f"told-{Path(told).name}"
    for steps in (8, 12) if told == "8" else ():  # the last save of each is uploaded for certain
        train(place, *arguments(name, steps), **server.variables)
    flags = [*arguments(name, 16)[:-1], told]
    hooks = Path(__file__).parent.parent / "launch" / "kills"
    killed = place / f"kills-{name}"
    for moment in ("open_sources", "compile_in_all_processes"):
        killed.write_text(f"jaxtrain.training.setup:{moment} 0 1 SIGKILL\n")
        found = run(
            place,
            *flags,
            **server.variables,
            KILLS=str(killed),
            PYTHONPATH=f"{hooks}:{environment(place)['PYTHONPATH']}",
        )
        assert found.returncode == -signal.SIGKILL, found.stderr
        server.delete(f"{name}/.lease")  # not to wait until it expires
        shutil.rmtree(place / "cache" / "buckets")
        flags[-1] = "latest"
    text = train(place, *flags, **server.variables)
    source = place / told if told != "8" else f"s3://{BUCKET}/{name}/checkpoints/8"
    assert f"resumed from {source}: step {Path(told).name} of 16" in text
    copy = place / f"copy-{name}"
    server.files_of_run(name, copy)
    first = 13 if told != "8" else 1
    straight = losses(place / "straight")
    assert losses(copy) == {step: straight[step] for step in range(first, 17)}


def test_a_damaged_checkpoint_in_the_bucket_is_moved_there(
    place: Path, server: Server, proxy: FaultProxy
) -> None:
    name = f"damaged-{proxy.scheme}"
    url = f"{proxy.scheme}://{BUCKET}/{name}"
    train(place, *arguments(name, 8, proxy.scheme), **proxy.variables)
    shutil.rmtree(place / "cache" / "buckets")
    (file,) = (
        one
        for one in server.sizes(name)
        if one.startswith("checkpoints/files/8-") and one.endswith("/tokenizer.json")
    )
    server.write(f"{name}/{file}", server.read(f"{name}/{file}").replace(b"model", b"modem"))
    ended = run(place, *arguments(name, 16, proxy.scheme), **proxy.variables)
    assert ended.returncode == 0, ended.stderr
    assert f"checkpoint {url}/checkpoints/8 is damaged" in ended.stderr
    assert "fetching checkpoints/4 from" in ended.stdout
    same_as_straight(place, server, name)
    assert any(re.fullmatch(r"aside/8-\w+\.json", one) for one in server.sizes(name))


UPLOAD = """
import sys
from pathlib import Path
from jaxtrain.storage.bucket import Bucket
Bucket("s3://bucket/run").put("file", Path(sys.argv[1]))
# Not getrusage: its maximum starts with that of the parent process.
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM:")))
"""


def test_a_large_upload_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**30)  # uses no disk
    with Sink() as sink:
        ended = execute(tmp_path, sys.executable, "-c", UPLOAD, str(path), **sink.variables)
    assert ended.returncode == 0, ended.stderr
    (parts,) = sink.parts.values()
    # S3 and Google allow 10,000 of 5 MiB or more.
    assert parts == dict.fromkeys(range(1, 65), 2**24)
    (digests,) = sink.digests.values()
    assert set(digests.values()) == {hashlib.sha256(bytes(2**24)).hexdigest()}
    assert int(ended.stdout) / 1024 < 256  # MiB; 125 measured


def test_of_many_writers_of_one_version_one_succeeds(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in proxy.variables.items():
        monkeypatch.setenv(variable, value)
    bucket = Bucket(f"{proxy.scheme}://{BUCKET}/race-{proxy.scheme}")
    version = None
    for number in range(5):
        data = [f"{number} {writer}".encode() for writer in range(8)]
        write = functools.partial(bucket.put_if, "lease", version=version)
        with ThreadPoolExecutor(8) as pool:
            written = list(pool.map(write, data))
        before = version
        (version,) = (one for one in written if one is not None)
        found = bucket.get("lease")
        assert found is not None
        assert (found.data, found.version) == (data[written.index(version)], version)
        assert bucket.put_if("lease", b"late", before) is None
    bucket.put("other", b"")
    bucket.delete(["lease", "missing", "other"])
    assert bucket.sizes() == {}
    assert bucket.put_if("lease", b"late", version) is None  # it is gone


def test_commands_read_runs_in_a_bucket(place: Path, proxy: FaultProxy) -> None:
    train(place, *arguments(f"read-{proxy.scheme}", 8, proxy.scheme), **proxy.variables)
    url = f"{proxy.scheme}://{BUCKET}/read-{proxy.scheme}"
    cache = place / f"reader-{proxy.scheme}"
    variables = proxy.variables | {"JAXTRAIN_CACHE": str(cache)}
    listed = run(place, "checkpoints", url, **variables)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "checkpoints/8" in listed.stdout
    assert "verified" in listed.stdout
    filled = run(place, "fill", f"{url}/", "ab [MASK] cd", **variables)
    assert filled.returncode == 0, filled.stderr
    exported = run(place, "export", f"{url}/checkpoints/8", "out.safetensors", **variables)
    assert exported.returncode == 0, exported.stderr
    report = run(place, "report", url, **variables)
    assert report.returncode == 0, report.stderr
    assert (place / "report.html").is_file()
    text = train(
        place,
        *TINY,
        *("--loop.steps", 12, "--output-dir", f"from-{proxy.scheme}", "--resume", url),
        **variables,
    )
    assert f"resumed from {url}/checkpoints/8: step 8 of 12" in text
    nothing = run(
        place, "export", f"{proxy.scheme}://{BUCKET}/nothing", "x.safetensors", **variables
    )
    assert nothing.returncode == 2
    assert "no complete checkpoint found in" in nothing.stderr
    assert os.listdir(cache)
