"""Runs a function of the package in a separate Python process.

plan, bench and doctor use it for functions that may hang, crash or run out of memory, or that need
other environment variables for jax and XLA, or a cold start::

    request = {"config": "demo"}
    with SubprocessWorker("jaxtrain.planning.compilation:run", request, environment()) as worker:
        for message in worker.messages(timeout_s=60):
            ...

The process calls the function with the request and with ``send``, which sends a JSON object at
once. The process ends whenever its parent ends. It ignores Ctrl-C; the parent then terminates it.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from jaxtrain.errors import InputError, RunAgain, first_line

# Set before the process imports anything heavy.
_STARTED_AT = time.time()

_KILL_S = 5.0
_LONGEST = 300  # characters of an error, and of a line of output
_LAST_LINES = 5
_TAIL_BYTES = 2**16

Message = dict[str, Any]
Send = Callable[[Message], None]


class WorkerFailed(Exception):
    """The process ended before its function returned.

    Attributes:
        error: the function's error in one line; "" if the process ended otherwise.
        killed_by: name of the signal that killed it, such as ``"SIGKILL"``; "" without one.
        how: description, such as ``"was ended by SIGSEGV"`` or ``"ended with exit code 3"``.
        last_lines: last lines of its output.
    """

    def __init__(self, error: str, code: int, last_lines: list[str]) -> None:
        self.error = error
        self.killed_by = signal.Signals(-code).name if code < 0 else ""
        memory = " (out of host memory?)" if self.killed_by == "SIGKILL" else ""
        killed = f"was ended by {self.killed_by}{memory}"
        self.how = killed if self.killed_by else f"ended with exit code {code}"
        self.last_lines = last_lines
        reason = error or (last_lines[-1] if last_lines else "")
        super().__init__(f"{self.how}: {reason[:_LONGEST]}" if reason else self.how)


class SubprocessWorker:
    """A process that runs a function of the package and sends messages.

    It ends when you leave the context.

    Args:
        function: ``"module:name"``; takes the request and a :data:`Send`.
        request: a JSON object. The function also receives ``"start"`` in it: the seconds in which
            the interpreter started (``"interpreter"``) and its module was imported (``"imports"``).
        variables: the environment of the process, from :func:`environment`.
        grace_s: seconds to clean up when it is terminated early (SIGTERM becomes SystemExit); with
            0 it is killed at once.
    """

    def __init__(
        self,
        function: str,
        request: Mapping[str, Any],
        variables: Mapping[str, str],
        grace_s: float = 5.0,
    ) -> None:
        self._grace_s = grace_s
        self._returned = False
        self._lines: queue.Queue[tuple[str, Any] | None] = queue.Queue()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        reading, writing = os.pipe()
        asked = json.dumps({"launched_at": time.time(), "request": request})
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, function, str(writing), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=(writing,),
        )
        os.close(writing)
        self._thread = threading.Thread(target=self._listen, args=(reading,), daemon=True)
        self._thread.start()
        assert self._process.stdin is not None
        # The process may have ended already.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(asked.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._output:
            ended = self._returned and self._ends_within(self._grace_s)
            if not ended and self._grace_s:
                self._process.terminate()
            if not self._ends_within(self._grace_s):
                self._process.kill()
                if not self._ends_within(_KILL_S):
                    return  # it waits for a disk in the kernel; its pipe stays open
            self._thread.join(_KILL_S)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Yields all messages until the function returns.

        Args:
            timeout_s: for all messages together.

        Raises:
            TimeoutError: the function takes longer.
            InputError: the function raised it.
            RunAgain: likewise.
            WorkerFailed: the process ended otherwise.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self.receive(deadline - time.monotonic())) is not None:
            yield message

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next message; None when the function has returned.

        Raises:
            TimeoutError: no message arrived in this time.
            InputError: the function raised it.
            RunAgain: likewise.
            WorkerFailed: the process ended otherwise.
        """
        try:
            line = self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError(f"no message within {timeout_s:.0f} s") from None
        died: tuple[str, Any] = ("died", "")
        kind, content = line or died
        if kind == "message":
            message: Message = content
            return message
        if kind == "returned":
            self._returned = True
            return None
        if kind == "wrong":
            raise InputError(*content)
        if kind == "again":
            raise RunAgain(content)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        code = self._process.returncode
        raise WorkerFailed(content, 1 if code is None else code, self._last_lines())

    def unread(self) -> list[Message]:
        """Returns the messages not yet received; complete after the context."""
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        return [line[1] for line in lines if line is not None and line[0] == "message"]

    def _listen(self, reading: int) -> None:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # otherwise it was killed while writing
                    kind, content = json.loads(line)
                    self._lines.put((kind, content))
        self._lines.put(None)

    def _last_lines(self) -> list[str]:
        output = self._output.fileno()  # no seek: the process writes at the same offset
        begin = max(0, os.fstat(output).st_size - _TAIL_BYTES)
        text = os.pread(output, _TAIL_BYTES, begin).decode(errors="replace")
        return text.strip().splitlines()[-_LAST_LINES:]

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def environment(
    outside: Mapping[str, str] = os.environ, *, without: tuple[str, ...] = (), **more: str
) -> dict[str, str]:
    """Returns environment variables with which the process imports this jaxtrain.

    Args:
        outside: variables of this process.
        without: names to remove.
        more: variables to set.
    """
    from jaxtrain.config import invocation

    checkout = str(Path(__file__).resolve().parents[2])
    paths = [checkout, *filter(None, [outside.get("PYTHONPATH")])]
    return {name: value for name, value in outside.items() if name not in without} | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        invocation.PROGRAM: invocation.program(outside),
        **more,
    }


def own_signals() -> None:
    """Ignores SIGINT, and makes SIGTERM exit through finally clauses.

    Ctrl-C is for the parent, which then sends SIGTERM. Call it in the worker process, and again
    after a library has installed other handlers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM exit through finally clauses, which end the child processes."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main(function: str, pipe: str, parent: str) -> int:
    """Reads the request from standard input and calls the function, in the worker process."""
    own_signals()
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    os.set_inheritable(int(pipe), False)
    asked = json.load(sys.stdin)
    with open(int(pipe), "w", encoding="utf-8") as lines:

        def write(kind: str, content: Any = None) -> None:
            lines.write(json.dumps([kind, content]) + "\n")
            lines.flush()

        try:
            began = time.perf_counter()
            call = _named(function)
            start = {
                "interpreter": _STARTED_AT - asked["launched_at"],
                "imports": time.perf_counter() - began,
            }
            call(asked["request"] | {"start": start}, lambda message: write("message", message))
        except InputError as error:
            write("wrong", list(map(str, error.messages)))
        except RunAgain as error:
            write("again", str(error))
        except Exception as error:
            traceback.print_exc()
            write("failed", f"{type(error).__name__}: {first_line(error)[:_LONGEST]}")
            return 1
        else:
            write("returned")
    return 0


def _named(function: str) -> Callable[[dict[str, Any], Send], None]:
    module, _, name = function.partition(":")
    call: Callable[[dict[str, Any], Send], None] = getattr(importlib.import_module(module), name)
    return call


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
