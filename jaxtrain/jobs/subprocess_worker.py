"""Runs a function of the package in a separate Python process, with JSON in and out.

plan, bench, doctor and compare use it for functions that may hang, crash or run out of memory, or
that need other environment variables for jax and XLA, a cold start, or other code::

    request = {"config": "demo"}
    with SubprocessWorker("jaxtrain.planning.compilation:run", request, environment()) as worker:
        for message in worker.messages(timeout_s=60):
            ...

The process calls the function with the request and with ``send``, which sends a JSON object at
once. The process ends whenever its parent ends, even if that is killed: it terminates itself as the
parent would. It ignores Ctrl-C; the parent then terminates it.
"""

import contextlib
import importlib
import json
import os
import select
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
_LONGEST_WAIT_S = 3600.0
_LOOK_EVERY_S = 0.5
_LONGEST = 300  # characters of an error, and of a line of output
_LAST_LINES = 5
_BLOCK = 2**16

Message = dict[str, Any]
Send = Callable[[Message], None]


class WorkerFailed(Exception):
    """The process ended before its function returned.

    Attributes:
        error: the function's error in one line; "" if the process ended otherwise.
        code: its exit code, or minus the signal that killed it.
        killed_by: name of the signal that killed it, such as ``"SIGKILL"``; "" without one.
        how: description, such as ``"was ended by SIGSEGV"`` or ``"ended with exit code 3"``.
    """

    def __init__(self, error: str, code: int, last_lines: list[str]) -> None:
        self.error, self.code = error, code
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
        grace_s: seconds to clean up when it is terminated early (SIGTERM becomes SystemExit), or
            when its parent has ended.
        code: the folder of the package that it imports, if not this one's: that of another commit.
    """

    def __init__(
        self,
        function: str,
        request: Mapping[str, Any],
        variables: Mapping[str, str],
        grace_s: float = 5.0,
        code: Path | None = None,
    ) -> None:
        self._grace_s, self._received = grace_s, b""
        if code is not None:
            paths = [str(code), *filter(None, [variables.get("PYTHONPATH")])]
            variables = {**variables, "PYTHONPATH": os.pathsep.join(paths)}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        envelope = json.dumps({"launched_at": time.time(), "request": request})
        self._process = subprocess.Popen(
            # -P: the current directory is often the checkout, whose package would come first.
            [
                *(sys.executable, *(["-P"] if code is not None else []), "-m", __name__),
                *(function, str(os.getpid()), str(grace_s)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=variables,
        )
        assert self._process.stdin is not None
        # The process may have ended already.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(envelope.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        with self._output, self._process.stdout:
            for end, limit_s in (
                (self._process.terminate, self._grace_s),
                (self._process.kill, _KILL_S),  # unless it waits for a disk in the kernel
            ):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(limit_s)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def terminate(self) -> None:
        """Sends SIGTERM; the process then ends by itself, unless you leave the context."""
        self._process.terminate()

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Yields all messages until the function returns.

        Raises:
            TimeoutError: the function takes longer.
            InputError: the function raised it.
            RunAgain: likewise.
            WorkerFailed: the process ended otherwise.
        """
        deadline = time.monotonic() + timeout_s
        while (line := self._line(deadline - time.monotonic())) is not None:
            kind, content = json.loads(line)
            if kind == "returned":
                return
            if kind == "wrong":
                raise InputError(*content)
            if kind == "again":
                raise RunAgain(content)
            if kind == "failed":
                raise self._failed(content)
            yield content
        raise self._failed("")

    def _line(self, timeout_s: float) -> bytes | None:
        """Returns the next line that the process sent; None when it has ended."""
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], min(left_s, _LONGEST_WAIT_S))[0]:
                if left_s > _LONGEST_WAIT_S:
                    continue
                raise TimeoutError(f"no message within {timeout_s:.0f} s")
            if not (block := os.read(pipe, _BLOCK)):
                return None
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failed(self, error: str) -> WorkerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        code = self._process.returncode
        output = self._output.fileno()  # no seek: the process writes at the same offset
        begin = max(0, os.fstat(output).st_size - _BLOCK)
        lines = os.pread(output, _BLOCK, begin).decode(errors="replace").strip().splitlines()
        return WorkerFailed(error, 1 if code is None else code, lines[-_LAST_LINES:])


def environment(
    outside: Mapping[str, str] = os.environ, *, without: tuple[str, ...] = (), **more: str
) -> dict[str, str]:
    """Returns environment variables with which the process imports this jaxtrain."""
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


def main(function: str, parent: str, grace_s: str) -> int:
    """Reads the request from standard input and calls the function, in the worker process.

    Messages go to the standard output of before; what the function prints goes to standard error.
    """
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    own_signals()
    threading.Thread(target=_end_with, args=(int(parent), float(grace_s)), daemon=True).start()
    envelope = json.load(sys.stdin)

    def write(kind: str, content: Any = None) -> None:
        messages.write(json.dumps([kind, content]) + "\n")
        messages.flush()

    try:
        began = time.perf_counter()
        call = _named(function)
        start = {
            "interpreter": _STARTED_AT - envelope["launched_at"],
            "imports": time.perf_counter() - began,
        }
        call(envelope["request"] | {"start": start}, lambda message: write("message", message))
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


def _end_with(parent: int, grace_s: float) -> None:
    """Ends this process when its parent has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
