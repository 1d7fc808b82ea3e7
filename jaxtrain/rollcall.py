"""Before jax connects the processes, each calls at process 0: all are there, and each is once.

Where anything is wrong, a host or a number, jax's own connect waits for minutes and then ends the
process from C++ (a "Check failure stack trace", jax 0.10 to 0.12), which nobody can catch. So they
meet first at the same address over a plain socket, and all of them hear the same sentence.

A caller sends one line of JSON: who it is. It gets one line back when all are there, or when
something is wrong: ``{"jaxtrain": "..."}``, empty for go on.
"""

import contextlib
import dataclasses
import errno
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import clusters
from jaxtrain.clusters import Cluster
from jaxtrain.errors import InputError, RunAgain

# Something else answers at the address, as the end of the last run: so long until it is told.
_FOREIGN_S = 60.0
# After all are there: two that call themselves the same mostly come at the same time.
_LINGER_S = 1.0
# Something is wrong: so long those who come late can still hear it.
_LATE_S = 5.0
_LOOK_EVERY_S = 0.2
_LINE_S = 10.0
_LINE_BYTES = 65536


@dataclasses.dataclass
class _Caller:
    """Who called, and where to answer."""

    index: int
    count: int
    where: str
    token: str
    connection: socket.socket


def hold(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Returns when every process of the run is there.

    Args:
        cluster: of this process.
        environment: ``os.environ``.

    Raises:
        InputError: two processes have the same number, or they disagree about how many there are.
        RunAgain: somebody did not come in time.
    """
    call = _Call(cluster, clusters.patience(environment))
    answer: dict[str, Any] | None = None
    while answer is None:
        # A second process 0 on this host cannot listen, so it calls at the first one.
        listener = _listen(cluster, environment) if cluster.index == 0 else None
        answer = call.attempt() if listener is None else _serve(cluster, listener, call)
    if answer["jaxtrain"]:
        raise (RunAgain if answer["again"] else InputError)(answer["jaxtrain"])


class _Call:
    """One process's call at process 0."""

    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._cluster = cluster
        self._foreign_since: float | None = None
        self._began = time.monotonic()
        self.patience_s = patience_s
        self.deadline = self._began + patience_s
        self.token = secrets.token_hex(8)
        self.ended = threading.Event()  # tells the thread of process 0 that calls itself

    def attempt(self) -> dict[str, Any] | None:
        """Calls once; the answer, or after the deadline what went wrong; None to try again."""
        try:
            answer = self._once()
        except OSError as error:  # or process 0 ends, and is started again
            answer, what, self._foreign_since = None, error.strerror or str(error), None
        else:
            if answer is not None:
                return answer
            what = "whatever answers there does not wait for processes"
            self._foreign_since = self._foreign_since or time.monotonic()
        now = time.monotonic()
        since = self._foreign_since
        if now > self.deadline or (since is not None and now - since > _FOREIGN_S):
            return {"jaxtrain": self._explained(what, since is not None), "again": True}
        time.sleep(_LOOK_EVERY_S)
        return None

    def _once(self) -> dict[str, Any] | None:
        """The answer; None if whoever listens there is not waiting for this run's processes."""
        with socket.create_connection((self._cluster.host, self._cluster.port), _LINE_S) as to:
            said = {"jaxtrain": "here", "index": self._cluster.index, "count": self._cluster.count}
            to.sendall(_line(said | {"where": _where(), "token": self.token}))
            line = _read_line(to, self.deadline + _LINE_S, self.ended.is_set)
        if not line:
            raise ConnectionResetError(0, "the connection broke off")
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and {"jaxtrain", "again"} <= answer.keys():
                return answer
        return None

    def _explained(self, what: str, foreign: bool) -> str:
        cluster = self._cluster
        if foreign:
            return (
                f"{cluster.coordinator} (from {cluster.source}) is in use, but not by processes "
                f"that wait for process {cluster.index} of {cluster.count}: the last run has not "
                f"ended, or all {cluster.count} are there already and another one is process "
                f"{cluster.index} too, or it is another program's: end it, or take another port"
            )
        here = ""
        if clusters.is_loopback(cluster.host):
            here = " (this machine itself: on several hosts give the address of process 0's host)"
        return (
            f"process {cluster.index} on {socket.gethostname()} found no process 0 at "
            f"{cluster.coordinator}{here} within {self.patience_s:.0f} s ({what}): see whether "
            f"process 0 runs on that host, and whether a firewall lets port {cluster.port} through"
        )


def _serve(cluster: Cluster, listener: socket.socket, call: _Call) -> dict[str, Any]:
    """Process 0 waits for all, itself among them: so it knows that the address leads to it."""
    calls: queue.Queue[_Caller] = queue.Queue()
    own: list[dict[str, Any]] = []

    def call_myself() -> None:
        while not (own or call.ended.is_set()):
            own.extend(filter(None, [call.attempt()]))

    accepting = threading.Thread(target=_accept, args=(listener, calls), daemon=True)
    accepting.start()
    threading.Thread(target=call_myself, daemon=True).start()
    callers: list[_Caller] = []
    picture, since = (False, ""), time.monotonic()
    said: dict[str, Any] | None = None
    try:
        while said is None:
            with contextlib.suppress(queue.Empty):
                callers.append(calls.get(timeout=_LOOK_EVERY_S))
            callers = [one for one in callers if _waits(one)]
            complaint = _complaint(cluster, callers)
            complete = {one.index for one in callers} == set(range(cluster.count))
            now = time.monotonic()
            if (complete, complaint) != picture:
                picture, since = (complete, complaint), now
            if complaint:
                if complete or now - since > _LATE_S:
                    said = {"jaxtrain": complaint, "again": False}
            elif complete:
                if now - since > _LINGER_S:
                    said = {"jaxtrain": "", "again": False}
            elif own and own[0]["jaxtrain"] and not own[0]["again"]:
                said = own[0]  # the address leads to another process 0, and that one complains
            elif now > call.deadline:
                said = {"jaxtrain": _absent(cluster, callers, call), "again": True}
    finally:  # also when a signal ends this process: then they hear nothing, and call again
        call.ended.set()
        # A socket that a thread waits at stays open until that wait ends, and jax wants the port.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()
        for one in callers:
            with contextlib.suppress(OSError):
                if said is not None:
                    one.connection.sendall(_line(said))
            one.connection.close()
    return said


def _complaint(cluster: Cluster, callers: list[_Caller]) -> str:
    """What is wrong with those who are there; the same sentence for all of them."""
    by_index: dict[int, _Caller] = {}
    for one in callers:
        if one.count != cluster.count:
            return (
                f"process {one.index} ({one.where}) was told of {one.count} processes, process 0 "
                f"({_where()}) of {cluster.count}: start all with the same number"
            )
        other = by_index.setdefault(one.index, one)
        if other is not one:
            return (
                f"two processes are both process {one.index} of {cluster.count} ({other.where}; "
                f"{one.where}): give each its own number, from 0 to {cluster.count - 1}"
            )
    return ""


def _absent(cluster: Cluster, callers: list[_Caller], call: _Call) -> str:
    here = {one.index: one.where for one in callers}
    if not any(one.token == call.token for one in callers):
        return (
            f"process 0 runs on {socket.gethostname()}, but {cluster.coordinator} (from "
            f"{cluster.source}) does not lead there: give the address of process 0's host"
        )
    missing = ", ".join(str(index) for index in range(cluster.count) if index not in here)
    return (
        f"of {cluster.count} processes these did not come to {cluster.coordinator} within "
        f"{call.patience_s:.0f} s: {missing} (there are "
        + "; ".join(f"{index}: {where}" for index, where in sorted(here.items()))
        + "): look at their output, and whether they can reach that address"
    )


def _accept(listener: socket.socket, calls: "queue.Queue[_Caller]") -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed: the roll call is over
            return
        threading.Thread(target=_hear, args=(connection, calls), daemon=True).start()


def _hear(connection: socket.socket, calls: "queue.Queue[_Caller]") -> None:
    """Reads who calls; whoever is no process of a run (a port scan, a health check) is let go."""
    try:
        said = json.loads(_read_line(connection, time.monotonic() + _LINE_S, lambda: False))
        calls.put(
            _Caller(
                int(said["index"]),
                int(said["count"]),
                str(said["where"]),
                str(said["token"]),
                connection,
            )
        )
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()


def _waits(caller: _Caller) -> bool:
    """Whether a caller is still there: one that went away may have been started again."""
    try:
        caller.connection.setblocking(False)
        there = caller.connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        there = True
    except OSError:
        there = False
    if there:
        caller.connection.settimeout(_LINE_S)
    else:
        caller.connection.close()
    return there


def _listen(cluster: Cluster, environment: Mapping[str, str]) -> socket.socket | None:
    """A socket at the coordinator's port, on all addresses of this host; None if it is in use."""
    bind = environment.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{cluster.port}"
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    families = [socket.AF_INET6, socket.AF_INET] if host == "::" else [None]
    for family in families:
        if family is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # Without SO_REUSEPORT, which jax's own service sets: two of those share a port unseen.
            return socket.create_server(
                ("" if host == "::" else host, int(port)),
                family=family,
                backlog=1024,
                dualstack_ipv6=family == socket.AF_INET6 and host == "::",
            )
        except (OSError, ValueError) as error:
            failure = error
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
    raise InputError(
        f"process 0 cannot listen at {bind} ({failure}): give a free port above 1023 on an "
        "address of this host"
    )


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _read_line(connection: socket.socket, deadline: float, ended: Callable[[], bool]) -> bytes:
    """What comes up to the end of a line; what there is if the other side stops before."""
    connection.settimeout(_LOOK_EVERY_S)
    found = b""
    while not found.endswith(b"\n") and len(found) < _LINE_BYTES:
        if ended() or time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        try:
            piece = connection.recv(4096)
        except TimeoutError:
            if found:  # no program that speaks in lines; as jax's own service, which greets
                return found
            continue
        if not piece:
            break
        found += piece
    return found


def _where() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
