"""Tests that a folder of a bucket allows one run at a time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from obstore.store import MemoryStore

from jaxtrain.errors import RunAgain
from jaxtrain.storage import lease
from jaxtrain.storage.bucket import Bucket, Unavailable
from jaxtrain.storage.lease import Lease, Lost

EXPIRES_S = 0.4


@pytest.fixture
def bucket() -> Bucket:
    return Bucket("s3://bucket/run", MemoryStore())


@pytest.fixture
def acquire_lease(bucket: Bucket) -> Iterator[Callable[..., Lease]]:
    """Acquires leases, and releases them at the end."""
    made: list[Lease] = []

    def acquire(expires_s: float = EXPIRES_S) -> Lease:
        made.append(Lease(bucket, print, expires_s))
        made[-1].acquire()
        return made[-1]

    yield acquire
    for one in made:
        one.release()


def content(bucket: Bucket) -> dict[str, object]:
    found = bucket.get(lease.NAME)
    assert found is not None
    parsed: dict[str, object] = json.loads(found.data)
    return parsed


def elsewhere(bucket: Bucket, **changes: object) -> None:
    """Makes the lease look like that of another machine."""
    about = content(bucket) | {"machine": "another", "host": "elsewhere"} | changes
    bucket.put(lease.NAME, json.dumps(about).encode())


def test_a_live_run_is_recognized_by_its_renewals(
    bucket: Bucket, acquire_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = acquire_lease(5.0)  # its thread may get no time for a second
    monkeypatch.setattr(lease, "_is_dead", lambda found: False)  # as on another machine
    with pytest.raises(RunAgain, match=rf"another run is using {bucket.url} \(process \d+ on"):
        acquire_lease(5.0)
    first.check()
    assert not first.lost


def test_a_lease_that_is_not_renewed_is_taken_over(
    bucket: Bucket, acquire_lease: Callable[..., Lease], capsys: pytest.CaptureFixture[str]
) -> None:
    first = acquire_lease()
    first._over.set()  # as if its process were stopped
    elsewhere(bucket)
    began = time.monotonic()
    second = acquire_lease()
    assert time.monotonic() - began >= EXPIRES_S
    assert "in use by process" in capsys.readouterr().out
    assert content(bucket)["run"] == second.name
    first._renew_once()
    with pytest.raises(Lost, match="has taken over"):
        first.check()
    first.release()  # does not delete the other's
    assert content(bucket)["run"] == second.name


def test_a_process_that_died_here_is_recognized_at_once(
    bucket: Bucket, acquire_lease: Callable[..., Lease]
) -> None:
    script = (
        "import json; from jaxtrain.storage import lease;"
        "print(json.dumps(lease._this_process() | {'run': 'other'}))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    bucket.put(lease.NAME, printed)
    assert json.loads(printed)["pid"] != os.getpid()
    assert lease.holder(bucket) == ""
    elsewhere(bucket, machine="other")
    assert lease.holder(bucket) != ""  # unknown
    bucket.put(lease.NAME, printed)
    began = time.monotonic()
    acquire_lease()
    assert time.monotonic() - began < EXPIRES_S


def test_a_deleted_lease_is_written_again(
    bucket: Bucket, acquire_lease: Callable[..., Lease], capsys: pytest.CaptureFixture[str]
) -> None:
    one = acquire_lease()
    for _ in range(2):
        bucket.delete([lease.NAME])
        time.sleep(EXPIRES_S)
        one.check()
        assert content(bucket)["run"] == one.name
    assert capsys.readouterr().out.count("was deleted: written again") == 1


def test_a_lease_that_is_missing_after_a_long_pause_is_lost(
    bucket: Bucket, acquire_lease: Callable[..., Lease]
) -> None:
    """Another run may have taken over, saved checkpoints, and released it."""
    one = acquire_lease()
    one._over.set()  # no renewal while this machine is cut off
    assert one._thread is not None
    one._thread.join()
    bucket.delete([lease.NAME])
    time.sleep(EXPIRES_S)
    with pytest.raises(Lost, match=r"another run may have used s3://bucket/run since .*: resume$"):
        one.check()
    assert bucket.get(lease.NAME) is None


def test_a_renewal_whose_answer_was_lost_counts(
    bucket: Bucket, acquire_lease: Callable[..., Lease]
) -> None:
    one = acquire_lease()
    with one._lock:
        before = one._version
        one._write(before)
        one._version = before  # as if the answer had not arrived
        one._renew_once()
    one.check()


def test_a_release_that_fails_once_is_attempted_again(
    bucket: Bucket, acquire_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with credentials that expired a moment ago is refused."""
    one, delete, calls = acquire_lease(), Bucket.delete, list[int]()

    def refuse_first(self: Bucket, names: list[str]) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Unavailable("ExpiredToken")
        delete(self, names)

    monkeypatch.setattr(Bucket, "delete", refuse_first)
    monkeypatch.setattr(lease, "_PAUSES_S", (0.0, 0.0, 0.0))
    one.release()
    assert bucket.get(lease.NAME) is None
    assert len(calls) == 2


def test_an_unavailable_store_does_not_lose_the_lease(
    bucket: Bucket, acquire_lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = acquire_lease()

    def fail(*_: object) -> None:
        raise Unavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put_if", fail)
        time.sleep(EXPIRES_S)
        with pytest.raises(Unavailable):
            one.check()
    one.check()
    assert not one.lost
