"""Checks that every process is present, exactly once, before jax.distributed starts.

If a host or a number is wrong, jax's own connect waits for minutes and then ends the process from
C++ (a "Check failure stack trace", jax 0.10 to 0.12), which Python cannot catch. So every process
first calls process 0 at the same address over a plain socket, and all of them get the same message.

Both sides prove that they know the run's token (JAXTRAIN_RUN_TOKEN), which is never sent. They
exchange three lines, each a JSON object:

1. process 0 greets each caller with a random ``nonce``;
2. the caller identifies itself, adds a ``nonce`` of its own, and signs both;
3. process 0 answers when all processes are present, or when something is wrong:
   ``{"jaxtrain": "..."}`` with the error, which is empty on success. It signs the answer and both
   nonces.

A signature (``proof``) is an HMAC-SHA256 with the token as key. A peer that cannot sign is ignored,
as a caller and as process 0. Without a token the key is empty and everyone can sign: then an error
may be caused by a foreign process, so the run ends with 75 (temporary failure) instead of 2 (wrong
use).

This protects only the start. jax's own coordination service takes the port afterwards. It neither
authenticates nor encrypts, and neither do the connections between devices (NCCL, gloo): let only
the hosts of the run reach its ports.
"""

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import psutil

from jaxtrain import terminal
from jaxtrain.distributed import cluster_env
from jaxtrain.distributed.cluster_env import TOKEN, Cluster
from jaxtrain.distributed.key_value import announced
from jaxtrain.errors import InputError, RunAgain

# How long to retry while something else answers at the address, such as a run that is ending.
_FOREIGN_S = 60.0
# Wait after all are present: two processes with the same number mostly arrive at the same time.
_LINGER_S = 1.0
# Wait after an error, so that processes that arrive late get it, too.
_LATE_S = 5.0
_LOOK_EVERY_S = 0.2
_RETRY_FOREIGN_S = 1.0
# An incomplete line that does not continue for this long is not of this protocol.
_QUIET_S = 2.0
_LINE_S = 10.0
_CALLER_BYTES, _ANSWER_BYTES = 4096, 65536
# Unverified connections. Above this number, those older than _GRACE_S are closed to make room: a
# flood delays the processes of the run, but does not keep them out.
_MOST_UNVERIFIED = 256
_GRACE_S = 0.5
_SHOWN = 120  # characters of a caller's description of itself
_LISTED = 32  # callers in a message


@dataclasses.dataclass
class _Caller:
    """A caller that has proved that it belongs to the run, and its connection."""

    index: int
    count: int
    where: str
    call: str
    nonces: list[str]
    connection: socket.socket


@dataclasses.dataclass
class _Unverified:
    """A connection that is not verified yet."""

    address: str
    since: float
    nonce: str
    heard: bytes = b""


@dataclasses.dataclass(frozen=True)
class _Answer:
    """How the rendezvous ended for one process.

    Attributes:
        message: the error; empty if all processes are present.
        again: whether a retry may succeed.
        heard: whether process 0 sent it; otherwise this process concluded it.
    """

    message: str
    again: bool
    heard: bool


def join(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Waits until every process of the run is present.

    Args:
        cluster: the run's processes, as seen by this one.
        environment: ``os.environ``.

    Raises:
        InputError: two processes have the same number, one is outside the range, or they disagree
            about the number of processes.
        RunAgain: a process did not arrive in time; or any of these errors in a run without a
            token, where a foreign process may have caused it.
    """
    call = _Call(cluster, cluster_env.patience(environment), cluster_env.token(environment))
    if cluster.index == 0 and not call.key and not cluster_env.is_local(cluster):
        _warn(
            f"{TOKEN} is not set, so anyone who reaches {cluster.coordinator} can disturb the "
            "start of this run: set the same random string on all hosts"
        )
    answer: _Answer | None = None
    with announced(lambda: call.waits_for):
        while answer is None:
            # If another process 0 on this host already listens, call that one.
            listener = _listen(cluster, environment) if cluster.index == 0 else None
            call.listens = listener is not None
            call.waits_for = call.blocked()
            answer = call.attempt() if listener is None else _serve(cluster, listener, call)
    if answer.message:
        raise (RunAgain if answer.again else InputError)(answer.message)


class _Foreign(Exception):
    """The listener at the address is not process 0 of this run."""


class _Call:
    """One process's call to process 0."""

    def __init__(self, cluster: Cluster, patience_s: float, key: bytes) -> None:
        self._cluster = cluster
        self._foreign_since: float | None = None
        self._refused = False  # what answered did not know the token
        self._began = time.monotonic()
        self.key = key
        self.patience_s = patience_s
        self.deadline = self._began + patience_s
        self.id = secrets.token_hex(8)
        self.ended = threading.Event()  # stops the thread of process 0 that calls itself
        self.listens = False  # whether this is process 0 and listens at the port
        self.waits_for = ""

    def attempt(self) -> _Answer | None:
        """Calls once; returns the answer, an error after the deadline, or None to try again."""
        foreign = False
        try:
            return self._once()
        except OSError as error:  # such as process 0 not listening yet, or being restarted
            why = error.strerror or str(error)
            taken = self._cluster.index == 0 and not self.listens
            what = self._in_use() if taken else self._not_found(why)
            self._foreign_since = None
        except _Foreign as error:
            what, foreign = str(error), True
            self._foreign_since = self._foreign_since or time.monotonic()
        now = time.monotonic()
        since = self._foreign_since
        if not self.listens:
            self.waits_for = self.blocked(foreign)
        if self._refused:  # process 0 may have given up meanwhile, but this is the reason
            what = self._no_token()
        if now > self.deadline or (since is not None and now - since > _FOREIGN_S):
            return _Answer(what, again=True, heard=False)
        self.ended.wait(_RETRY_FOREIGN_S if foreign else _LOOK_EVERY_S)
        return None

    def _once(self) -> _Answer:
        cluster, nonce = self._cluster, secrets.token_hex(16)
        with socket.create_connection((cluster.host, cluster.port), _LINE_S) as to:
            line = _read_line(to, time.monotonic() + _LINE_S, self.ended.is_set)
            greeting = _parsed(line)
            asked = greeting.get("nonce")
            if greeting.get("jaxtrain") != "who" or not isinstance(asked, str):
                raise _Foreign(self._in_use())
            identity = {"jaxtrain": "here", "index": cluster.index, "count": cluster.count}
            identity |= {"where": _where(), "call": self.id, "nonce": nonce}
            nonces = [asked, nonce]
            to.sendall(_signed(self.key, "caller", nonces, identity))
            if cluster.index > 0:
                self.waits_for = (
                    f"the other processes; this one has reached process 0 at {cluster.coordinator}"
                )
            line = _read_line(to, self.deadline + _LINE_S, self.ended.is_set)
        answer = _parsed(line)
        message, again = answer.get("jaxtrain"), answer.get("again")
        if not _is_signed(self.key, "process 0", nonces, answer):
            self._refused = True
            raise _Foreign(self._no_token())
        if not isinstance(message, str) or not isinstance(again, bool):
            raise _Foreign(self._in_use())
        return _Answer(_shown(message, _ANSWER_BYTES), again, heard=True)

    def blocked(self, foreign: bool = False) -> str:
        """Describes what a call that has not reached process 0 waits for.

        Args:
            foreign: whether another program answered at the address.
        """
        cluster = self._cluster
        if self._refused:
            return f"a process 0 at {cluster.coordinator} that knows this run's token ({TOKEN})"
        if cluster.index == 0 and not self.listens:
            owner = _owner(cluster.port)
            return f"port {cluster.port}, which {owner or 'another program'} holds on this host"
        if foreign:
            return f"process 0 at {cluster.coordinator}: another program answers there"
        return f"process 0, which does not answer at {cluster.coordinator}"

    def _in_use(self) -> str:
        cluster = self._cluster
        return (
            f"{cluster.coordinator} (from {cluster.source}) is in use{self._by()}, but not by a "
            f"run that waits for process {cluster.index} of {cluster.count}: either the last run "
            f"has not ended, or this run is complete and another process is process "
            f"{cluster.index} too, or another program uses the port: end it, or use another port"
        )

    def _by(self) -> str:
        """Names the process that holds a port of this host, if the system reports it."""
        owner = _owner(self._cluster.port) if self._cluster.index == 0 else None
        return f" by {owner}" if owner else ""

    def _no_token(self) -> str:
        cluster = self._cluster
        return (
            f"process {cluster.index} on {socket.gethostname()} reached {cluster.coordinator} "
            f"(from {cluster.source}), but what answers there does not know this run's token "
            f"({TOKEN} is {_set_or_not(self.key)} here): set the same one on all hosts; if another "
            "run uses the port, use another one"
        )

    def _not_found(self, what: str) -> str:
        cluster = self._cluster
        here = ""
        if cluster_env.is_loopback(cluster.host):
            here = " (this machine itself: with several hosts, set the address of process 0's host)"
        return (
            f"process {cluster.index} on {socket.gethostname()} found no process 0 at "
            f"{cluster.coordinator}{here} within {self.patience_s:.0f} s ({what}): check that "
            f"process 0 runs on that host, and that no firewall blocks port {cluster.port}"
        )


def _serve(cluster: Cluster, listener: socket.socket, call: _Call) -> _Answer:
    """Waits in process 0 for all callers; its own call proves that the address leads to it."""
    own: list[_Answer] = []

    def call_myself() -> None:
        while not (own or call.ended.is_set()):
            own.extend(filter(None, [call.attempt()]))

    acceptor = _Acceptor(listener, call.key, cluster.count)
    threading.Thread(target=call_myself, daemon=True).start()
    status, since = (False, ""), time.monotonic()
    verdict: _Answer | None = None
    try:
        while verdict is None:
            acceptor.serve(_LOOK_EVERY_S)
            callers = acceptor.callers
            complaint = _complaint(cluster, callers)
            missing = sorted(set(range(cluster.count)) - {one.index for one in callers})
            complete = not missing
            call.waits_for = (
                f"{'process' if len(missing) == 1 else 'processes'} "
                f"{_listed([str(index) for index in missing], ', ')} of {cluster.count}, which "
                f"{'has' if len(missing) == 1 else 'have'} not reached {cluster.coordinator}"
            )
            now = time.monotonic()
            if (complete, complaint) != status:
                status, since = (complete, complaint), now
            if complaint:
                if complete or now - since > _LATE_S:
                    # Without a token, a foreign process may have caused it.
                    verdict = _Answer(complaint, again=not call.key, heard=False)
            elif complete:
                if now - since > _LINGER_S:
                    verdict = _Answer("", again=False, heard=False)
            elif own and own[0].message and own[0].heard:
                verdict = own[0]  # the address leads to another process 0, which reports an error
            elif now > call.deadline:
                verdict = _Answer(_absent(cluster, acceptor, call), again=True, heard=False)
    finally:  # also when a signal ends this process: the callers get no answer and call again
        call.ended.set()
        acceptor.close(verdict)
    return verdict


class _Acceptor:
    """Accepts the callers that know the run's token; process 0 runs it in one thread.

    Other connections are dropped, and reported once. They may be a port scan, a health check, a
    process with another token, or hostile.

    Args:
        listener: the listening socket.
        key: the run's token.
        count: number of processes of the run.
    """

    def __init__(self, listener: socket.socket, key: bytes, count: int) -> None:
        self.callers: list[_Caller] = []
        self.without_token: dict[str, None] = {}  # addresses of such callers
        self._key, self._count = key, count
        self._reported: set[str] = set()
        self._unverified: dict[socket.socket, _Unverified] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listener, self._listens = listener, False

    def serve(self, seconds: float) -> None:
        """Accepts callers for that time; then ``callers`` holds those that still wait."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._make_room()
            for ready, _ in self._selector.select(left):
                if ready.fileobj is self._listener:
                    self._accept()
                elif isinstance(ready.fileobj, socket.socket):
                    self._hear(ready.fileobj)
        self.callers = [one for one in self.callers if _waits(one)]

    def close(self, verdict: _Answer | None) -> None:
        """Answers the callers, if there is an answer, and frees the port, which jax needs."""
        for connection in list(self._unverified):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        for one in self.callers:
            with contextlib.suppress(OSError):
                if verdict is not None:
                    answer = {"jaxtrain": verdict.message, "again": verdict.again}
                    one.connection.sendall(_signed(self._key, "process 0", one.nonces, answer))
            one.connection.close()

    def _make_room(self) -> None:
        full = len(self._unverified) >= _MOST_UNVERIFIED
        latest = time.monotonic() - (_GRACE_S if full else _LINE_S)
        for connection, unverified in list(self._unverified.items()):
            if unverified.since > latest:
                break  # in order of arrival
            self._reject(connection, "stranger")
        wanted = len(self._unverified) < _MOST_UNVERIFIED
        if wanted != self._listens:
            self._listens = wanted
            if wanted:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no free file descriptors
                for connection in list(self._unverified):
                    self._drop(connection)
                time.sleep(_LOOK_EVERY_S)
            return
        connection.setblocking(False)
        host = str(address[0]).removeprefix("::ffff:")
        unverified = _Unverified(host, time.monotonic(), secrets.token_hex(16))
        self._unverified[connection] = unverified
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.sendall(_line({"jaxtrain": "who", "nonce": unverified.nonce}))
        except OSError:
            self._drop(connection)

    def _hear(self, connection: socket.socket) -> None:
        unverified = self._unverified.get(connection)
        if unverified is None:  # dropped meanwhile
            return
        try:
            piece = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        unverified.heard += piece
        if not unverified.heard:  # it only probed the port, or died
            self._drop(connection)
        elif not piece or b"\n" in unverified.heard or len(unverified.heard) > _CALLER_BYTES:
            self._verify(connection, unverified)

    def _verify(self, connection: socket.socket, unverified: _Unverified) -> None:
        identity = _parsed(unverified.heard)
        if identity.get("jaxtrain") != "here":
            self._reject(connection, "stranger")
            return
        nonces = [unverified.nonce, str(identity.get("nonce"))]
        if not _is_signed(self._key, "caller", nonces, identity):
            with contextlib.suppress(OSError):
                connection.sendall(_line({"jaxtrain": "unproven"}))
            if len(self.without_token) < _LISTED:
                self.without_token[unverified.address] = None
            self._reject(connection, "token")
            return
        index, count = identity.get("index"), identity.get("count")
        # Without a token, any number of callers can get this far.
        if not (_is_number(index) and _is_number(count)) or len(self.callers) >= (
            self._count + _MOST_UNVERIFIED
        ):
            self._reject(connection, "stranger")
            return
        del self._unverified[connection]
        self._selector.unregister(connection)
        where, call = _shown(str(identity.get("where")), _SHOWN), str(identity.get("call"))
        self.callers.append(_Caller(index, count, where, call, nonces, connection))

    def _reject(self, connection: socket.socket, kind: str) -> None:
        address = self._unverified[connection].address
        self._drop(connection)
        if kind in self._reported:
            return
        self._reported.add(kind)
        if kind == "token":
            _warn(
                f"a caller from {address} did not know this run's token ({TOKEN} is "
                f"{_set_or_not(self._key)} here) and is ignored, as are all such callers: set the "
                "same one on all hosts"
            )
        else:
            _warn(f"a connection from {address} is not a process of this run and is ignored")

    def _drop(self, connection: socket.socket) -> None:
        del self._unverified[connection]
        self._selector.unregister(connection)
        connection.close()


def _complaint(cluster: Cluster, callers: list[_Caller]) -> str:
    """Returns the error in the callers' numbers, one sentence for all of them; or empty."""
    by_index: dict[int, _Caller] = {}
    for one in callers:
        if one.count != cluster.count:
            return (
                f"process {one.index} ({one.where}) expects {one.count} processes, process 0 "
                f"({_where()}) expects {cluster.count}: start all with the same number"
            )
        if not 0 <= one.index < cluster.count:
            return (
                f"process {one.index} ({one.where}) is outside the {cluster.count} processes of "
                f"this run: number them from 0 to {cluster.count - 1}"
            )
        other = by_index.setdefault(one.index, one)
        if other is not one:
            return (
                f"two processes are both process {one.index} of {cluster.count} ({other.where}; "
                f"{one.where}): give each its own number, from 0 to {cluster.count - 1}"
            )
    return ""


def _absent(cluster: Cluster, acceptor: _Acceptor, call: _Call) -> str:
    here = {one.index: one.where for one in acceptor.callers}
    if not any(one.call == call.id for one in acceptor.callers):
        return (
            f"process 0 runs on {socket.gethostname()}, but {cluster.coordinator} (from "
            f"{cluster.source}) does not lead there: set the address of process 0's host"
        )
    missing = [str(index) for index in range(cluster.count) if index not in here]
    present = [f"{index}: {where}" for index, where in sorted(here.items())]
    message = (
        f"of {cluster.count} processes, these did not reach {cluster.coordinator} within "
        f"{call.patience_s:.0f} s: {_listed(missing, ', ')} (present: {_listed(present, '; ')}): "
        "look at their output, and check that they can reach that address"
    )
    if acceptor.without_token:
        message += (
            f"; callers from {', '.join(acceptor.without_token)} did not know this run's token "
            f"({TOKEN} is {_set_or_not(call.key)} here): set the same one on all hosts"
        )
    return message


def _listed(items: list[str], separator: str) -> str:
    rest = [f"and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return separator.join(items[:_LISTED] + rest)


def _waits(caller: _Caller) -> bool:
    """Returns whether a caller is still connected; one that left may have been restarted."""
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


def _owner(port: int) -> str | None:
    """Names the process that listens at a port of this host; None if the system hides it."""
    with contextlib.suppress(psutil.Error, OSError):  # processes of other users, or gone
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                name = psutil.Process(one.pid).name()
                return f"{_shown(name, _SHOWN)} (process {one.pid})"
    return None


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    """Parses a line as a JSON object; empty if it is not one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _signed(key: bytes, side: str, nonces: list[str], content: Mapping[str, Any]) -> bytes:
    return _line({**content, "proof": _proof(key, side, nonces, content)})


def _is_signed(key: bytes, side: str, nonces: list[str], content: Mapping[str, Any]) -> bool:
    proof = content.get("proof")
    if not isinstance(proof, str) or not proof.isascii():
        return False
    fields = {name: value for name, value in content.items() if name != "proof"}
    try:
        return hmac.compare_digest(proof, _proof(key, side, nonces, fields))
    except (ValueError, RecursionError):  # values that JSON cannot encode again
        return False


def _proof(key: bytes, side: str, nonces: list[str], content: Mapping[str, Any]) -> str:
    text = json.dumps([side, nonces, content], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket, deadline: float, ended: Callable[[], bool]) -> bytes:
    """Reads up to the end of a line, or what has arrived if it does not continue.

    Raises:
        OSError: nothing arrived, or not enough before the deadline.
    """
    connection.settimeout(_LOOK_EVERY_S)
    found, last = b"", time.monotonic()
    while b"\n" not in found and len(found) < _ANSWER_BYTES:
        now = time.monotonic()
        if ended() or now > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        try:
            piece = connection.recv(4096)
        except TimeoutError:
            if found and now - last > _QUIET_S:  # such as the greeting of jax's own service
                return found
            continue
        if not piece:
            break
        found, last = found + piece, now
    if not found:
        raise ConnectionResetError(0, "the connection was closed")
    return found


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 2**31


def _shown(text: str, limit: int) -> str:
    """Makes another process's text safe to print: one line without control characters."""
    kept = "".join(one if one.isprintable() else "?" for one in text[: limit + 1])
    return kept if len(kept) <= limit else kept[:limit] + "..."


def _set_or_not(key: bytes) -> str:
    return "set" if key else "not set"


def _warn(message: str) -> None:
    terminal.warn(f"warning: {message}")


def _where() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
