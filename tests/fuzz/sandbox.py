"""Runs one case in the fuzzed process, within memory and time limits.

Observed from outside: total resident memory of the case's processes, every 50 ms (and the kernel's
peak), wall time, started processes, and processes that remain after the case. RLIMIT_AS is not
used: it limits address space, of which jax maps far more than it uses.
"""

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from fuzz import fuzzed

MEMORY_BYTES = 4 * 2**30
FRESH_S, FORKED_S = 60.0, 30.0
_LOOK_EVERY_S = 0.05
_LEAVE_S = 1.0  # for processes that end after the main one, such as the resource tracker
_START_S = 120.0
_LONGEST_OUTPUT = 2**20
# Folders of a case: its input, and those that jaxtrain may write to.
INPUT, OUTPUT = "in", "out"
_REQUEST = "request.json"
_OWN = ("home", "tmp", "cache", OUTPUT)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Ended:
    """The result of a case.

    Attributes:
        code: exit code, or minus the signal's number.
        peak_bytes: peak resident memory of all its processes.
        late: whether it exceeded the deadline and was killed.
        events: records of the hook.
        started: command lines of its processes, without parts that differ between runs.
        left: command lines of processes that remained after it.
        changed: input files that it changed.
    """

    code: int
    seconds: float
    peak_bytes: int
    late: bool
    output: dict[str, bytes]
    events: tuple[dict[str, str], ...]
    started: frozenset[str]
    left: tuple[str, ...]
    changed: tuple[str, ...]


class Sandbox:
    """A folder for cases, one at a time, and a server that forks for them.

    Args:
        folder: for the cases; recreated for each.
        core: the CPU core that the processes use; None for all.
    """

    def __init__(self, folder: Path, compiled: Path, core: int | None = None) -> None:
        self.folder, self._compiled, self._core = folder, compiled, core
        self._server: subprocess.Popen[str] | None = None
        self._heard = b""  # output of the server that is not yet parsed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def clear(self) -> Path:
        """Creates an empty case and returns the folder for its input."""
        _remove(self.folder)
        for name in (*_OWN, INPUT):
            (self.folder / name).mkdir(parents=True)
        return self.folder / INPUT

    def run(
        self,
        arguments: list[str],
        *,
        fresh: bool,
        entry: str = "jaxtrain.main:console",
        memory_bytes: int = MEMORY_BYTES,
        seconds: float | None = None,
    ) -> Ended:
        """Runs the case whose input is in the folder.

        Args:
            arguments: of the command line; paths relative to the case's folder.
            fresh: whether to use a fresh process instead of a fork of the server.
            entry: the function to call, module:function.
            seconds: deadline; by default :data:`FRESH_S` or :data:`FORKED_S`.
        """
        request = {
            "entry": entry,
            "arguments": arguments,
            "folder": str(self.folder),
            "writable": [str(self.folder / name) for name in _OWN] + [str(self._compiled)],
        }
        (self.folder / _REQUEST).write_text(json.dumps(request))
        before = _listing(self.folder)
        limit_s = seconds or (FRESH_S if fresh else FORKED_S)
        begin = self._fresh if fresh else self._forked
        late, status, peak, started, left, took_s = begin(memory_bytes, limit_s)
        after = _listing(self.folder)
        return Ended(
            code=os.waitstatus_to_exitcode(status),
            seconds=took_s,
            peak_bytes=peak,
            late=late,
            output={name: _head(self.folder / f"{name}.txt") for name in ("stdout", "stderr")},
            events=tuple(map(json.loads, _lines(self.folder / fuzzed.EVENTS))),
            started=frozenset(started),
            left=tuple(left),
            changed=tuple(
                sorted(n for n in before.keys() | after if before.get(n) != after.get(n))
            ),
        )

    def _fresh(self, memory: int, limit_s: float) -> Any:
        path = self.folder / _REQUEST
        with (self.folder / "stderr.txt").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, fuzzed.__file__, str(path)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self._pin(process.pid)
        ended: list[tuple[int, int]] = []

        def wait(seconds: float) -> tuple[int, int] | None:
            until = time.monotonic() + seconds
            while not ended:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    # Without the kernel's peak, which includes that of this process before exec.
                    ended.append((status, 0))
                    process.returncode = status
                elif time.monotonic() > until:
                    return None
                else:
                    time.sleep(0.01)
            return ended[0]

        return _watch(process.pid, wait, memory, limit_s)

    def _forked(self, memory: int, limit_s: float) -> Any:
        server = self._started()
        assert server.stdin is not None
        server.stdin.write((self.folder / _REQUEST).read_text() + "\n")  # a line
        server.stdin.flush()
        pid = self._answer(_START_S)["pid"]

        def wait(seconds: float) -> tuple[int, int] | None:
            answer = self._answer(seconds)
            return (answer["status"], answer["peak"]) if answer else None

        return _watch(pid, wait, memory, limit_s)

    def _answer(self, seconds: float) -> Any:
        """Returns the next line of the server; None if it does not arrive in time."""
        assert self._server is not None
        assert self._server.stdout is not None
        # Not readline: if two lines arrive at once, it would buffer the second, which select does
        # not see.
        while b"\n" not in self._heard:
            if not select.select([self._server.stdout], [], [], seconds)[0]:
                return None
            more = os.read(self._server.stdout.fileno(), 65536)
            if not more:
                raise RuntimeError(f"the server ended; see {self.folder.parent / 'server.txt'}")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with (self.folder.parent / "server.txt").open("ab") as errors:
                self._server = subprocess.Popen(
                    [sys.executable, fuzzed.__file__, "--server"],
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    bufsize=1,
                )
            self._pin(self._server.pid)
            ready = self._answer(_START_S)
            if not ready or ready["threads"] != 1:
                raise RuntimeError(f"the server must have one thread before it forks: {ready}")
        return self._server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def _pin(self, pid: int) -> None:
        """Pins a process to the core, right after its start so that all its threads inherit it."""
        if self._core is not None:
            os.sched_setaffinity(pid, {self._core})

    def _environment(self) -> dict[str, str]:
        kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        home = str(self.folder / "home")
        return environment | {
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/.cache",
            "XDG_CONFIG_HOME": f"{home}/.config",
            "XDG_DATA_HOME": f"{home}/.local/share",
            "XDG_RUNTIME_DIR": home,
            "TMPDIR": str(self.folder / "tmp"),
            "JAXTRAIN_CACHE": str(self.folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self._compiled),
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TOKENIZERS_PARALLELISM": "false",
            "OPENBLAS_NUM_THREADS": "1",  # otherwise it starts threads before the fork
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def _watch(pid: int, wait: Any, memory: int, limit_s: float) -> Any:
    """Waits for a case; kills it if it exceeds its time or memory."""
    began = time.monotonic()
    started: set[str] = set()
    peak, late, ended = 0, False, None
    while ended is None:
        ended = wait(_LOOK_EVERY_S)
        found = _tree(pid)
        started |= {_described(one) for one in found if one != pid} - {""}
        peak = max(peak, sum(map(_resident, found)))
        late = late or (ended is None and time.monotonic() - began > limit_s)
        if late or peak > memory:
            _kill(found)
    took_s = time.monotonic() - began
    until = time.monotonic() + _LEAVE_S
    left: list[int] = []
    while (left := [one for one in _tree(pid) if one != pid]) and time.monotonic() < until:
        time.sleep(0.01)
    names = [_described(one) or "a fork" for one in left]
    _kill(left)
    status, noted = ended
    return late, status, max(peak, noted), started, names, took_s


def _tree(leader: int) -> list[int]:
    """Returns a case's live processes: its descendants and all of its session."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has just ended
            # pid (name) state parent group session ...
            words = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if words[0] in "ZX":
                continue
            parents[int(name)] = int(words[1])
            if int(name) == leader or int(words[3]) == leader:
                found.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * _PAGE
    return 0


def _described(pid: int) -> str:
    """Returns a process's command line without numbers and paths.

    Empty if it has ended or is a fork that runs no other program: the hook records forks.
    """
    with contextlib.suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
        if any(os.path.basename(word) == os.path.basename(fuzzed.__file__) for word in words):
            return ""
        known = [name for name in ("resource_tracker", "spawn_main") if name in " ".join(words)]
        return " ".join([os.path.basename(words[0]).rstrip("0123456789."), *known]).strip()
    return ""


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and modification time of all files that jaxtrain must not change."""
    found: dict[str, tuple[int, int]] = {}
    ours = {"stdout.txt", "stderr.txt", fuzzed.EVENTS}
    for place, folders, names in os.walk(os.fsencode(folder)):
        if place == os.fsencode(folder):
            folders[:] = [os.fsencode(INPUT)]
        for name in names:
            path = os.path.join(place, name)
            status = os.lstat(path)
            shown = os.fsdecode(os.path.relpath(path, os.fsencode(folder)))
            if shown not in ours:
                found[shown] = (status.st_size, status.st_mtime_ns)
    return found


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST_OUTPUT)
    except FileNotFoundError:  # the case ended before its start
        return b""


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []
