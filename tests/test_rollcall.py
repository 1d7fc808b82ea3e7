"""The roll call before jax connects; each process is a thread here, over real sockets."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxtrain import clusters, rollcall
from jaxtrain.clusters import Cluster
from jaxtrain.errors import InputError, RunAgain


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
    """What each of them gets out of the roll call that all hold at the same time."""
    results: list[Exception | None] = [AssertionError("it never came back")] * len(members)

    def hold(number: int) -> None:
        try:
            rollcall.hold(members[number], {clusters.PATIENCE: str(patience_s)})
            results[number] = None
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@contextlib.contextmanager
def listening(greeting: bytes) -> Iterator[int]:
    """Another program at a port; it greets who comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(greeting)
                        connection.recv(1000)
                        time.sleep(0.3)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("count", [2, 16])
def test_all_go_on_when_all_are_there(count: int) -> None:
    port = free_port()
    assert outcomes([member(index, count, port) for index in range(count)]) == [None] * count
    with socket.create_server(("", port)):  # the port is free again: jax wants it now
        pass


@pytest.mark.parametrize(
    "indices", [[0, 1, 1], [0, 0], [0, 0, 1]], ids=lambda indices: "".join(map(str, indices))
)
def test_a_number_given_twice_is_told_to_all(
    indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to those that come a little later; process 2 of this run never comes."""
    monkeypatch.setattr(rollcall, "_LATE_S", 2.0)
    twice = max(set(indices), key=indices.count)
    port, count = free_port(), 3
    said = outcomes([member(index, count, port) for index in indices])
    assert {type(one) for one in said} == {InputError}
    assert len({str(one) for one in said}) == 1
    assert f"two processes are both process {twice} of 3" in str(said[0])


def test_processes_that_count_differently_are_told() -> None:
    port = free_port()
    said = outcomes([member(0, 2, port), member(1, 3, port)])
    assert {type(one) for one in said} == {InputError}
    assert "told of 3 processes, process 0" in str(said[0])


def test_who_does_not_come_is_named_to_all() -> None:
    port = free_port()
    said = outcomes([member(0, 4, port), member(2, 4, port)], patience_s=2)
    assert {type(one) for one in said} == {RunAgain}
    for one in said:
        assert "within 2 s: 1, 3 (there are 0: pid" in str(one)


def test_nobody_listens() -> None:
    (said,) = outcomes([member(1, 2, free_port())], patience_s=0.5)
    assert isinstance(said, RunAgain)
    assert "found no process 0 at 127.0.0.1" in str(said)
    assert "this machine itself" in str(said)


def test_the_address_does_not_lead_to_process_0() -> None:
    cluster = member(0, 2, free_port(), host="192.0.2.123")  # for documentation: nobody has it
    (said,) = outcomes([cluster], patience_s=1)
    assert isinstance(said, RunAgain)
    assert "192.0.2.123" in str(said)
    assert "does not lead there" in str(said)


@pytest.mark.parametrize("greeting", [b"\x00\x00\x12\x04\x00\x00", b"SSH-2.0-x\r\n", b'{"a": 1}\n'])
@pytest.mark.parametrize("index", [0, 1])
def test_another_program_at_the_port_is_told_apart(index: int, greeting: bytes) -> None:
    """As the service of a run that has all its processes: then one more has somebody's number."""
    with listening(greeting) as port:
        (said,) = outcomes([member(index, 2, port)], patience_s=2)
    assert isinstance(said, RunAgain)
    assert "is in use" in str(said)
    assert f"another one is process {index} too" in str(said)


def test_strangers_and_those_who_went_away_do_not_count() -> None:
    port = free_port()
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"index": 1}\n', b""):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), 1) as one,
                ):
                    one.sendall(text)
            # A process 1 that was killed while it waited, and is started again.
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1) as one,
            ):
                one.sendall(b'{"index": 1, "count": 2, "where": "x", "token": "y"}\n')
                time.sleep(0.05)
                break

    thread = threading.Thread(target=disturb)
    first: list[Exception | None] = []
    zero = threading.Thread(target=lambda: first.extend(outcomes([member(0, 2, port)])))
    zero.start()
    thread.start()
    time.sleep(0.5)
    second = outcomes([member(1, 2, port)])
    stop.set()
    zero.join(60)
    thread.join(60)
    assert first + second == [None, None]


def test_patience_is_a_number() -> None:
    with pytest.raises(InputError, match="JAXTRAIN_CONNECT_S is 'long'"):
        rollcall.hold(member(0, 2, free_port()), {clusters.PATIENCE: "long"})
