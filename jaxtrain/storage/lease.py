"""Allows one run at a time to write to a folder of a bucket: its process 0 renews a lease there.

A killed process cannot release its lease, and clocks of machines differ. So no times are compared:
a run that finds a lease watches it. If it changes within ``EXPIRES_S``, its run is alive; if it
does not, that run is gone, and the lease is taken over. A process that died on this machine is
recognized at once. All writes of the lease are conditional, so that of two runs that take it over,
one fails.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import lock
from jaxtrain.storage.bucket import Bucket, Content, Unavailable

NAME = ".lease"
EXPIRES_S = 45.0
_RENEWALS = 4  # until it would expire
_PAUSES_S = (0.0, 0.5, 1.0)  # before each attempt to release it


class Lost(RunAgain):
    """Another run has taken over the lease, so this one must not write any more."""


class Lease:
    """The lease of one run. Safe to use from several threads.

    Args:
        expires_s: how long a lease that is not renewed counts.
    """

    def __init__(
        self,
        bucket: Bucket,
        say: Callable[[str], None],
        expires_s: float = EXPIRES_S,
    ) -> None:
        # A request that waits would outlast the lease, and renewals are tried again anyway.
        self._bucket, self._say, self._expires_s = bucket.impatient(), say, expires_s
        self._about = _this_process() | {"run": secrets.token_hex(6)}
        self._renewals = 0
        self._version: Any = None
        self._renewed_at = 0.0
        self._lost = ""
        self._deleted = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lease, and renews it in a thread until :meth:`release`.

        Raises:
            RunAgain: a live run holds it, which its renewals show, or the store is unavailable.
            InputError: the bucket does not exist or has no conditional writes.
        """
        while self._version is None:
            left = watched(self._bucket, self._say, self._expires_s)
            self._write(None if left is None else left.version)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that this run still holds the lease, before it completes something.

        Raises:
            Lost: another run does.
            Unavailable, InputError: it cannot be renewed at the moment.
        """
        with self._lock:
            if not self._lost and time.monotonic() - self._renewed_at > self._expires_s / 2:
                self._renew_once()
            if self._lost:
                raise Lost(self._lost)

    @property
    def name(self) -> str:
        """Returns 12 hexadecimal digits that identify this start of the run."""
        return str(self._about["run"])

    @property
    def lost(self) -> str:
        """Returns why this run must end; "" while it holds the lease."""
        return self._lost

    def release(self) -> None:
        """Deletes the lease, unless another run holds it. Releasing again does nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(self._expires_s)
        with self._lock:
            if self._version is None or self._lost:
                return
            self._version = None
            for pause_s in _PAUSES_S:  # credentials may be renewed at this moment
                time.sleep(pause_s)
                with contextlib.suppress(RunAgain, InputError):
                    if self._is_mine(self._bucket.get(NAME)):
                        self._bucket.delete([NAME])
                    return

    def _renew(self) -> None:
        while not self._over.wait(self._expires_s / _RENEWALS):
            with self._lock, contextlib.suppress(Unavailable, InputError):  # tried again
                if not self._lost:
                    self._renew_once()

    def _renew_once(self) -> None:
        if self._write(self._version):
            return
        content = self._bucket.get(NAME)
        if self._is_mine(content):  # the answer to an earlier write was lost
            assert content is not None
            self._version, self._renewed_at = content.version, time.monotonic()
        elif content is None and time.monotonic() - self._renewed_at > self._expires_s:
            self._lost = (
                f"another run may have used {self._bucket.url} since this one last renewed its "
                f"lease, more than {self._expires_s:g} s ago, and the lease is gone: resume"
            )
            self._say(f"warning: {self._lost}")
        elif content is None:
            if not self._deleted:
                url = f"{self._bucket.url}/{NAME}"
                self._say(f"warning: the lease {url} was deleted: written again")
            self._deleted = True
            self._write(None)
        else:
            self._lost = (
                f"another run has taken over {self._bucket.url} ({_holder(content)}), "
                f"because this one could not renew its lease for {self._expires_s:g} s: stop one"
                " of them"
            )
            self._say(f"warning: {self._lost}")

    def _write(self, version: Any) -> bool:
        """Writes the lease; returns whether it was that version before."""
        self._renewals += 1
        data = json.dumps(self._about | {"renewals": self._renewals}).encode()
        began = time.monotonic()
        written = self._bucket.put_if(NAME, data, version)
        if written is None and version is None and self._is_mine(content := self._bucket.get(NAME)):
            assert content is not None
            written = content.version
        if written is not None:
            self._version, self._renewed_at = written, began
        return written is not None

    def _is_mine(self, content: Content | None) -> bool:
        return content is not None and _parsed(content).get("run") == self._about["run"]


def watched(
    bucket: Bucket, say: Callable[[str], None], expires_s: float = EXPIRES_S
) -> Content | None:
    """Returns the lease of a folder once it is clear that nothing renews it; None without one.

    Raises:
        RunAgain: a live run holds it, or the store is unavailable.
        InputError: the bucket does not exist.
    """
    bucket, first, first_seen_at = bucket.impatient(), None, time.monotonic()
    while (content := bucket.get(NAME)) is not None and not _is_dead(content):
        if first is None:
            first, first_seen_at = content, time.monotonic()
            say(
                f"{bucket.url} is in use by {_holder(content)}: waiting up to {expires_s:g} s to "
                "see whether it is alive"
            )
        elif content.version != first.version:
            raise RunAgain(
                f"another run is using {bucket.url} ({_holder(content)}): wait until it ends, or "
                "stop it"
            )
        elif time.monotonic() - first_seen_at >= expires_s:
            break
        time.sleep(expires_s / 20)
    return content


def holder(bucket: Bucket) -> str:
    """Describes the process that holds the lease of a folder; "" if none does.

    A process that was killed on another machine is described as if it were alive.
    """
    content = bucket.get(NAME)
    return "" if content is None or _is_dead(content) else _holder(content)


def _this_process() -> dict[str, Any]:
    """Returns what identifies this process among all machines, and what names it for people."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()} | {
        "started": _started(os.getpid())
    }


def _machine() -> str:
    """Returns an identifier of this boot of the machine and of its namespace of process IDs."""
    with contextlib.suppress(OSError):
        return f"{lock.boot()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """Returns when a process of this machine started; "" if there is none."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _is_dead(content: Content) -> bool:
    """Whether a lease is of a process of this machine that has ended, or of this process."""
    about, machine = _parsed(content), _machine()
    pid = about.get("pid")
    if not machine or about.get("machine") != machine or type(pid) is not int or pid < 1:
        return False
    return pid == os.getpid() or _started(pid) != about.get("started")


def _parsed(content: Content) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        about = json.loads(content.data[:10_000])
        if isinstance(about, dict):
            return about
    return {}


def _holder(content: Content) -> str:
    about = _parsed(content)
    pid, host = str(about.get("pid", "unknown"))[:20], str(about.get("host", "unknown host"))[:60]
    return f"process {pid} on {host}"
