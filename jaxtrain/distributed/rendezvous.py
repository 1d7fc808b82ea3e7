"""Checks that every process is present, exactly once, before jax.distributed starts.

If a host or a number is wrong, jax's own connect waits for minutes and then ends the process from
C++ (a "Check failure stack trace", jax 0.10 to 0.12), which Python cannot catch. So every process
first calls process 0 at the same address over a plain socket, and all of them get the same message.
They exchange three lines, each a JSON object:

1. process 0 greets each caller: ``{"jaxtrain": "who"}``;
2. the caller identifies itself by its ``index``, its ``count`` of processes, and ``where`` it runs;
3. process 0 answers when all processes are present, or when something is wrong:
   ``{"jaxtrain": "..."}`` with the error, which is empty on success.

Nothing is authenticated, here or in jax's coordination service, which takes the port afterwards:
let only the hosts of the run reach its ports. What is not of this protocol, such as a port scan or
a health check, is ignored.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.distributed import cluster_env
from jaxtrain.distributed.cluster_env import Cluster
from jaxtrain.distributed.key_value import announced
from jaxtrain.errors import InputError, RunAgain

# Wait after all are present: two processes with the same number mostly arrive at the same time.
_LINGER_S = 1.0
# Wait after an error, so that processes that arrive late get it, too.
_LATE_S = 5.0
_LOOK_EVERY_S = 0.2
# An incomplete line that does not continue for this long is not of this protocol.
_QUIET_S = 2.0
_LINE_S = 10.0
_MOST_BYTES = 65536  # of a line
_LISTED = 32  # callers in a message


@dataclasses.dataclass
class _Caller:
    index: int
    count: int
    location: str
    call: str
    connection: socket.socket


@dataclasses.dataclass(frozen=True)
class _Answer:
    """How the rendezvous ended for one process.

    Attributes:
        heard: whether process 0 sent it; otherwise this process concluded it.
    """

    message: str
    again: bool
    heard: bool


def join(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Waits until every process of the run is present.

    Raises:
        InputError: two processes have the same number, one is outside the range, or they disagree
            about the number of processes.
        RunAgain: a process did not arrive in time, or another program answers at the address.
    """
    call = _Call(cluster, cluster_env.patience(environment))
    answer: _Answer | None = None
    with announced(lambda: call.waits_for):
        while answer is None:
            # If another process 0 on this host already listens, call that one.
            listener = _listen(cluster, environment) if cluster.index == 0 else None
            call.listens = listener is not None
            answer = call.attempt() if listener is None else _serve(cluster, listener, call)
    if answer.message:
        raise (RunAgain if answer.again else InputError)(answer.message)


class _Foreign(Exception):
    """The listener at the address is not process 0 of this run."""


class _Call:
    def __init__(self, cluster: Cluster, patience_s: float) -> None:
        self._cluster = cluster
        self.patience_s = patience_s
        self.deadline = time.monotonic() + patience_s
        self.id = secrets.token_hex(8)
        self.ended = threading.Event()  # stops the thread of process 0 that calls itself
        self.listens = False  # whether this is process 0 and listens at the port
        self.waits_for = f"process 0 at {cluster.coordinator}"

    def attempt(self) -> _Answer | None:
        """Calls once; returns the answer, an error after the deadline, or None to try again."""
        cluster = self._cluster
        try:
            return self._once()
        except OSError as error:  # such as process 0 not listening yet, or being restarted
            taken = cluster.index == 0 and not self.listens
            message = self._in_use() if taken else self._not_found(error.strerror or str(error))
            waits_for = f"process 0, which does not answer at {cluster.coordinator}"
        except _Foreign:  # such as jax's service of a run that is ending
            message = self._in_use()
            waits_for = f"process 0 at {cluster.coordinator}: another program answers there"
        if not self.listens:
            self.waits_for = waits_for
        if time.monotonic() > self.deadline:
            return _Answer(message, again=True, heard=False)
        self.ended.wait(_LOOK_EVERY_S)
        return None

    def _once(self) -> _Answer:
        cluster = self._cluster
        with socket.create_connection((cluster.host, cluster.port), _LINE_S) as to:
            line = _read_line(to, time.monotonic() + _LINE_S, self.ended.is_set)
            if _parsed(line).get("jaxtrain") != "who":
                raise _Foreign
            identity = {"jaxtrain": "here", "index": cluster.index, "count": cluster.count}
            to.sendall(_line(identity | {"where": _own_location(), "call": self.id}))
            if cluster.index > 0:
                self.waits_for = (
                    f"the other processes; this one has reached process 0 at {cluster.coordinator}"
                )
            answer = _parsed(_read_line(to, self.deadline + _LINE_S, self.ended.is_set))
        message, again = answer.get("jaxtrain"), answer.get("again")
        if not isinstance(message, str) or not isinstance(again, bool):
            raise _Foreign
        return _Answer(_printable(message), again, heard=True)

    def _in_use(self) -> str:
        cluster = self._cluster
        return (
            f"{cluster.coordinator} (from {cluster.source}) is in use, but not by a run that waits "
            f"for process {cluster.index} of {cluster.count}: either the last run "
            f"has not ended, or this run is complete and another process is process "
            f"{cluster.index} too, or another program uses the port: end it, or use another port"
        )

    def _not_found(self, reason: str) -> str:
        cluster = self._cluster
        self_hint = ""
        if cluster_env.is_loopback(cluster.host):
            self_hint = (
                " (this machine itself: with several hosts, set the address of process 0's host)"
            )
        return (
            f"process {cluster.index} on {socket.gethostname()} found no process 0 at "
            f"{cluster.coordinator}{self_hint} within {self.patience_s:.0f} s ({reason}): check "
            f"that process 0 runs on that host, and that no firewall blocks port {cluster.port}"
        )


def _serve(cluster: Cluster, listener: socket.socket, call: _Call) -> _Answer:
    """Waits in process 0 for all callers; its own call proves that the address leads to it."""
    callers: list[_Caller] = []
    own_answers: list[_Answer] = []

    def call_myself() -> None:
        while not (own_answers or call.ended.is_set()):
            own_answers.extend(filter(None, [call.attempt()]))

    def accept() -> None:
        while not call.ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                threading.Thread(target=hear, args=(connection,), daemon=True).start()

    def hear(connection: socket.socket) -> None:
        caller = _identified(connection, call.ended.is_set)
        if caller is None:
            connection.close()
        else:
            callers.append(caller)

    listener.settimeout(_LOOK_EVERY_S)
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    threading.Thread(target=call_myself, daemon=True).start()
    status, changed_at = (False, ""), time.monotonic()
    decision: _Answer | None = None
    try:
        while decision is None:
            time.sleep(_LOOK_EVERY_S)
            present = [caller for caller in list(callers) if _waits(caller)]
            complaint = _complaint(cluster, present)
            missing = sorted(set(range(cluster.count)) - {caller.index for caller in present})
            complete = not missing
            call.waits_for = (
                f"{'process' if len(missing) == 1 else 'processes'} "
                f"{_listed([str(index) for index in missing], ', ')} of {cluster.count}, which "
                f"{'has' if len(missing) == 1 else 'have'} not reached {cluster.coordinator}"
            )
            now = time.monotonic()
            if (complete, complaint) != status:
                status, changed_at = (complete, complaint), now
            if complaint:
                if complete or now - changed_at > _LATE_S:
                    decision = _Answer(complaint, again=False, heard=False)
            elif complete:
                if now - changed_at > _LINGER_S:
                    decision = _Answer("", again=False, heard=False)
            elif own_answers and own_answers[0].message and own_answers[0].heard:
                decision = own_answers[
                    0
                ]  # the address leads to another process 0, which reports an error
            elif now > call.deadline:
                decision = _Answer(_absent(cluster, present, call), again=True, heard=False)
    finally:  # also when a signal ends this process: the callers get no answer and call again
        call.ended.set()
        accepting.join()
        listener.close()  # frees the port, which jax needs
        for caller in callers:
            with contextlib.suppress(OSError), caller.connection as connection:
                if decision is not None:
                    answer = {"jaxtrain": decision.message, "again": decision.again}
                    connection.settimeout(_LINE_S)
                    connection.sendall(_line(answer))
    return decision


def _identified(connection: socket.socket, ended: Callable[[], bool]) -> _Caller | None:
    """Greets a caller, and returns it once it has identified itself; None if it does not."""
    try:
        connection.sendall(_line({"jaxtrain": "who"}))
        identity = _parsed(_read_line(connection, time.monotonic() + _LINE_S, ended))
    except OSError:
        return None
    index, count = identity.get("index"), identity.get("count")
    if identity.get("jaxtrain") != "here" or type(index) is not int or type(count) is not int:
        return None
    connection.setblocking(False)
    location, call = _printable(str(identity.get("where"))), str(identity.get("call"))
    return _Caller(index, count, location, call, connection)


def _complaint(cluster: Cluster, callers: list[_Caller]) -> str:
    """Returns the error in the callers' numbers, one sentence for all of them; or empty."""
    by_index: dict[int, _Caller] = {}
    for caller in callers:
        if caller.count != cluster.count:
            return (
                f"process {caller.index} ({caller.location}) expects {caller.count} processes, "
                f"process 0 ({_own_location()}) expects {cluster.count}: start all with the same "
                "number"
            )
        if not 0 <= caller.index < cluster.count:
            return (
                f"process {caller.index} ({caller.location}) is outside the {cluster.count} "
                f"processes of this run: number them from 0 to {cluster.count - 1}"
            )
        other = by_index.setdefault(caller.index, caller)
        if other is not caller:
            return (
                f"two processes are both process {caller.index} of {cluster.count} "
                f"({other.location}; {caller.location}): give each its own number, from 0 to "
                f"{cluster.count - 1}"
            )
    return ""


def _absent(cluster: Cluster, callers: list[_Caller], call: _Call) -> str:
    if not any(caller.call == call.id for caller in callers):
        return (
            f"process 0 runs on {socket.gethostname()}, but {cluster.coordinator} (from "
            f"{cluster.source}) does not lead there: set the address of process 0's host"
        )
    locations = {caller.index: caller.location for caller in callers}
    missing = [str(index) for index in range(cluster.count) if index not in locations]
    present = [f"{index}: {text}" for index, text in sorted(locations.items())]
    return (
        f"of {cluster.count} processes, these did not reach {cluster.coordinator} within "
        f"{call.patience_s:.0f} s: {_listed(missing, ', ')} (present: {_listed(present, '; ')}): "
        "look at their output, and check that they can reach that address"
    )


def _listed(items: list[str], separator: str) -> str:
    rest = [f"and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return separator.join(items[:_LISTED] + rest)


def _waits(caller: _Caller) -> bool:
    """Returns whether a caller is still connected; one that left may have been restarted."""
    try:
        return caller.connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _listen(cluster: Cluster, environment: Mapping[str, str]) -> socket.socket | None:
    """Listens at the coordinator's port, which jax uses later; None if the port is in use."""
    bind = cluster_env.bind_address(cluster, environment)
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    families = [socket.AF_INET6, socket.AF_INET] if host == "::" else [None]
    for family in families:
        if family is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return _server("" if host == "::" else host, int(port), family)
        except (OSError, ValueError, OverflowError) as error:
            failure = error
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
    raise InputError(
        f"process 0 cannot listen at {bind} ({failure}): use a free port above 1023 on an "
        "address of this host"
    )


def _server(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    """Creates a listening socket; the host "" with IPv6 serves both families.

    ``socket.create_server`` leaks its socket if the port is above 65535 (OverflowError).
    """
    server = socket.socket(family)
    try:
        # No SO_REUSEPORT: jax's service sets it, and would share the port with us unnoticed.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != ""))
        server.bind((host, port))
        server.listen(1024)
    except BaseException:
        server.close()
        raise
    return server


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_line(connection: socket.socket, deadline: float, ended: Callable[[], bool]) -> bytes:
    """Reads up to the end of a line, or what has arrived if it does not continue.

    Raises:
        OSError: nothing arrived, or not enough before the deadline.
    """
    connection.settimeout(_LOOK_EVERY_S)
    line, last = b"", time.monotonic()
    while b"\n" not in line and len(line) < _MOST_BYTES:
        now = time.monotonic()
        if ended() or now > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        try:
            received = connection.recv(4096)
        except TimeoutError:
            if line and now - last > _QUIET_S:  # such as the greeting of jax's own service
                return line
            continue
        if not received:
            break
        line, last = line + received, now
    if not line:
        raise ConnectionResetError(0, "the connection was closed")
    return line


def _printable(text: str) -> str:
    """Makes another program's text safe to print: one line without control characters."""
    return "".join(
        character if character.isprintable() else "?" for character in text[:_MOST_BYTES]
    )


def _own_location() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
