"""The rendezvous before jax connects, over real sockets; most processes are threads here."""

import contextlib
import gc
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import free_port

from jaxtrain.distributed import cluster_env, key_value, rendezvous
from jaxtrain.distributed.cluster_env import Cluster
from jaxtrain.errors import InputError, RunAgain


def member(index: int, count: int, port: int, host: str = "127.0.0.1") -> Cluster:
    return Cluster(
        scheme="test",
        coordinator=f"{host}:{port}",
        source="TEST",
        count=count,
        index=index,
        hosts=None,
        devices=[],
    )


def outcomes(members: list[Cluster], patience_s: float = 60.0) -> list[Exception | None]:
    """Returns the result of each member of a rendezvous that all join at the same time."""
    results: list[Exception | None] = [AssertionError("join did not return")] * len(members)

    def join(number: int) -> None:
        try:
            rendezvous.join(members[number], {cluster_env.PATIENCE: str(patience_s)})
            results[number] = None
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=join, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@contextlib.contextmanager
def listening(greeting: bytes) -> Iterator[int]:
    """Runs another program's server; it greets every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.sendall(greeting)
                    connection.recv(1000)
                    time.sleep(0.3)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("count", [2, 16])
def test_all_continue_when_all_are_present(count: int) -> None:
    port = free_port()
    assert outcomes([member(index, count, port) for index in range(count)]) == [None] * count
    with socket.create_server(("", port)):  # the port is free again, for jax
        pass


def test_a_duplicate_number_is_reported_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even to those that arrive a little later; process 2 of this run never does."""
    monkeypatch.setattr(rendezvous, "_LATE_S", 2.0)
    port = free_port()
    errors = outcomes([member(index, 3, port) for index in (0, 1, 1)])
    assert {type(one) for one in errors} == {InputError}
    assert len({str(one) for one in errors}) == 1
    assert "two processes are both process 1 of 3" in str(errors[0])


def test_different_process_counts_are_reported() -> None:
    port = free_port()
    errors = outcomes([member(0, 2, port), member(1, 3, port)])
    assert {type(one) for one in errors} == {InputError}
    assert "expects 3 processes, process 0" in str(errors[0])


def test_missing_processes_are_named_to_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the others wait, and in the error."""
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.7)
    port = free_port()
    errors = outcomes([member(0, 4, port), member(2, 4, port)], patience_s=2)
    assert {type(one) for one in errors} == {RunAgain}
    for one in errors:
        assert "within 2 s: 1, 3 (present: 0: pid" in str(one)
    lines = capsys.readouterr().err.splitlines()
    first, second = sorted(line for line in lines if "reached" in line)
    assert f"processes 1, 3 of 4, which have not reached 127.0.0.1:{port} (1 s so far)" in first
    assert "the other processes; this one has reached process 0 at 127.0.0.1" in second


@pytest.mark.parametrize("index", [0, 1])
def test_a_program_that_holds_the_port_is_reported(
    index: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While this process waits, and in the error."""
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.7)
    with listening(b"SSH-2.0-x\r\n") as port:
        (error,) = outcomes([member(index, 2, port)], patience_s=2)
    assert isinstance(error, RunAgain)
    assert f"127.0.0.1:{port} (from TEST) is in use" in str(error)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting")]
    assert f"process 0 at 127.0.0.1:{port}: another program answers there" in lines[0]


def test_a_run_that_is_ending_delays_the_next_one() -> None:
    """Its service holds the port meanwhile; the processes of the next run meet afterwards."""
    with listening(b"\x00\x00\x12\x04\x00\x00") as port:
        results: list[Exception | None] = []
        members = [member(index, 2, port) for index in range(2)]
        run = threading.Thread(target=lambda: results.extend(outcomes(members)))
        run.start()
        time.sleep(3)
        assert not results
    run.join(60)
    assert results == [None, None]


@pytest.mark.parametrize(
    ("index", "host", "words"),
    [
        (1, "127.0.0.1", ("found no process 0 at 127.0.0.1", "this machine itself")),
        # An address for documentation, which no host has.
        (0, "192.0.2.123", ("192.0.2.123", "does not lead there")),
    ],
)
def test_a_wrong_address_is_named(index: int, host: str, words: tuple[str, ...]) -> None:
    (error,) = outcomes([member(index, 2, free_port(), host)], patience_s=1)
    assert isinstance(error, RunAgain)
    assert all(word in str(error) for word in words)


@pytest.mark.long
@pytest.mark.parametrize("greeting", [b"\x00\x00\x12\x04\x00\x00", b"SSH-2.0-x\r\n"])
@pytest.mark.parametrize("index", [0, 1])
def test_another_program_at_the_port_is_recognized(index: int, greeting: bytes) -> None:
    """Such as the service of a complete run: then this process's number is taken."""
    with listening(greeting) as port:
        (error,) = outcomes([member(index, 2, port)], patience_s=2)
    assert isinstance(error, RunAgain)
    assert "is in use" in str(error)
    assert f"another process is process {index} too" in str(error)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """Opens a connection to process 0 as soon as it listens."""
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 10)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    with connection:
        yield connection


def closed(connection: socket.socket, patience_s: float = 30.0) -> bool:
    """Returns whether the other side closes the connection within that time."""
    connection.settimeout(patience_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def call(to: socket.socket, **fields: Any) -> None:
    """Calls as a process of the run would, without waiting."""
    assert json.loads(to.makefile("r").readline()) == {"jaxtrain": "who"}
    identity = {"jaxtrain": "here", "index": 1, "count": 2, "where": "x", "call": "y"}
    to.sendall(json.dumps(identity | fields).encode() + b"\n")


@contextlib.contextmanager
def waiting(count: int, port: int, patience_s: float = 60.0) -> Iterator[list[Exception | None]]:
    """Runs process 0, which waits for the others; its result is available after the block."""
    found: list[Exception | None] = []
    zero = threading.Thread(
        target=lambda: found.extend(outcomes([member(0, count, port)], patience_s))
    )
    zero.start()
    yield found
    zero.join(100)


FOREIGN = (
    b'{"index":1,"count":3,"where":"x"}\n',
    b'{"jaxtrain":"here","index":"1","count":2,"where":"x","call":"y"}\n',
    b"[" * 60_000 + b"\n",
    b"x" * 5_000_000,
    b'{"jaxtrain": "\xff\xfe"}\n',
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b'{"jaxtrain":"here"',
)


def test_what_is_not_of_the_protocol_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    """Each is sent while process 0 waits; then the real process 1 calls."""
    port = free_port()
    with waiting(2, port) as first:
        for line in FOREIGN:
            with connected(port) as connection, contextlib.suppress(OSError):
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
                assert closed(connection)
        second = outcomes([member(1, 2, port)])
    assert first + second == [None, None]
    assert capfd.readouterr() == ("", "")


def test_a_slow_line_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_LINE_S", 1.0)
    port = free_port()
    with waiting(2, port) as first:
        with connected(port) as slow, connected(port) as silent:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    slow.sendall(b"{")
                time.sleep(0.1)
            assert closed(slow, 1)
            assert closed(silent, 1)
        assert outcomes([member(1, 2, port)]) == [None]
    assert first == [None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": 2}, r"process 2 \(x\) is outside the 2 processes .* from 0 to 1"),
        ({"index": 1, "count": 5}, r"process 1 \(x\) expects 5 processes"),
    ],
)
def test_a_misconfigured_process_of_the_run_is_a_one_line_error(
    fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LATE_S", 0.5)
    port = free_port()
    with waiting(2, port) as first, connected(port) as one:
        call(one, **fields)
        answer = json.loads(one.makefile("r").readline())
    (error,) = first
    assert isinstance(error, InputError)
    assert re.search(message, str(error))
    assert answer["jaxtrain"] == str(error)


def test_a_caller_that_left_does_not_count() -> None:
    """Such as a process 1 that was killed while it waited, and is restarted."""
    port = free_port()
    with waiting(2, port) as first:
        with connected(port) as one:
            call(one)
            time.sleep(0.05)
        assert outcomes([member(1, 2, port)]) == [None]
    assert first == [None]


def listeners(port: int) -> set[str]:
    """Returns the addresses on which a process listens at the port, in the kernel's hex format."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    there = [line[1].split(":") for line in lines if line[3] == "0A"]
    # gRPC listens at IPv4 addresses in their IPv6-mapped form.
    mapped = "0000000000000000FFFF0000"
    return {at.removeprefix(mapped) for at, number in there if int(number, 16) == port}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_run_on_one_machine_is_not_reachable_from_others(host: str) -> None:
    port = free_port()
    zero = threading.Thread(target=lambda: outcomes([member(0, 2, port, host)], patience_s=2))
    zero.start()
    with connected(port):
        assert listeners(port) == {"0100007F"}
    zero.join(30)


def test_the_bind_address_can_be_set() -> None:
    port = free_port()
    variables = {cluster_env.PATIENCE: "1", cluster_env.BIND: f"127.0.0.2:{port}"}
    with pytest.raises(RunAgain, match="does not lead there"):
        rendezvous.join(member(0, 2, port), variables)
    with pytest.raises(InputError, match=r"cannot listen at 127\.0\.0\.1:99999"):
        rendezvous.join(member(0, 2, port), {cluster_env.BIND: "127.0.0.1:99999"})
    gc.collect()  # an unclosed socket is a warning, which fails the test


def test_the_connection_timeout_must_be_a_number() -> None:
    with pytest.raises(InputError, match="JAXTRAIN_CONNECT_S is 'long'"):
        rendezvous.join(member(0, 2, free_port()), {cluster_env.PATIENCE: "long"})
