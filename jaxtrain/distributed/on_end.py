"""Runs the command of ``--on-end`` when a run ends, for example to shut down a rented machine.

The command runs in ``sh``, once per host: in the first process of the run there, after its files
are complete and just before it exits. A command that must run once per run, such as a webhook,
checks that ``JAXTRAIN_PROCESS`` is 0. It gets these variables:

- ``JAXTRAIN_OUTCOME``: ``done``; ``stopped`` by a signal or ``loop.max_hours``; ``failed``; or
  ``hung``, which the watchdog has ended.
- ``JAXTRAIN_EXIT_CODE``: of this process. After any other than 0, 2, and 130, launchers restart the
  run.
- ``JAXTRAIN_REASON``: one line.
- ``JAXTRAIN_RUN_DIRECTORY``: the absolute path, of a run in a bucket its folder in the cache; empty
  if the run ended before it had one.
- ``JAXTRAIN_PROCESS``: the number of this process.

Nothing runs after a wrong command line, nor after SIGKILL or a crash inside a library.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.distributed import key_value
from jaxtrain.distributed.signals import exit_code, why
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, Stopped, one_line

# Launchers end a process that takes 300 s (SAVE_S) after a stop, and clouds some 30 to 120 s.
LIMIT_S = 60.0

FLAG = "--on-end"


class OnEnd:
    """Runs a command at most once; neither its failure nor its time limit changes the exit code.

    Args:
        command: for ``sh``; None runs nothing.
        limit_s: after this many seconds the command is killed, with its children.

    Attributes:
        describe: returns the run directory, and why the run has ended ("" if that is unknown).
    """

    def __init__(self, command: str | None, limit_s: float = LIMIT_S) -> None:
        self.command = command
        self._limit_s = limit_s
        self._process = 0
        self._claimed = threading.Lock()
        self._over = threading.Event()
        self.describe: Callable[[], tuple[Path | None, str]] = lambda: (None, "")

    def agree(self, gather: Callable[[str, str], list[str]]) -> None:
        """Chooses the process of each host that runs the command; all processes must call this.

        Before, each process would run it.

        Args:
            gather: returns the texts of all processes
                (:func:`jaxtrain.distributed.process_group.gather`).
        """
        self._process = key_value.of_run().index
        host = socket.gethostname()
        if gather("host", host).index(host) != self._process:
            self.command = None

    def returned(self, code: int) -> None:
        """The run has ended with this exit code, and saved its state unless it is 2."""
        self._run(_OUTCOMES.get(code, "failed"), code)

    def failed(self, error: BaseException) -> None:
        """An error or a signal has ended the run."""
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        self._run("stopped" if stopped else "failed", exit_code(error), why(error))

    def hung(self, reason: str, code: int = RUN_AGAIN) -> None:
        """The watchdog ends the run: it hangs, or another process is gone."""
        self._run("hung" if code == RUN_AGAIN else _OUTCOMES.get(code, "failed"), code, reason)

    def stopped(self, code: int) -> None:
        """A signal ends the process during a long call."""
        self._run("stopped", code)

    def _run(self, outcome: str, code: int, reason: str = "") -> None:
        if self.command is None:
            return
        if not self._claimed.acquire(blocking=False):
            # Another thread runs it. The caller then ends the process, and the command with it.
            self._over.wait(self._limit_s)
            return
        try:
            self._call(self.command, outcome, code, reason)
        except Exception as error:
            terminal.warn(f"warning: {FLAG}: the command did not run: {error}")
        finally:
            self._over.set()

    def _call(self, command: str, outcome: str, code: int, reason: str) -> None:
        directory, known = self.describe()
        reason = one_line(reason or known)
        # Without the command, which may contain a secret.
        words = f"{FLAG}: the run has {_VERBS[outcome]} with exit code {code}"
        terminal.warn(f"{words}{f' ({reason})' if reason else ''}: running the command")
        variables = {
            "JAXTRAIN_OUTCOME": outcome,
            "JAXTRAIN_EXIT_CODE": str(code),
            "JAXTRAIN_REASON": reason,
            "JAXTRAIN_RUN_DIRECTORY": "" if directory is None else os.path.abspath(directory),
            "JAXTRAIN_PROCESS": str(self._process),
        }
        with subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            env=os.environ | variables,
            start_new_session=True,
        ) as started:
            try:
                returned = started.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                terminal.warn(
                    f"warning: {FLAG}: the command took more than {self._limit_s:g} s and was "
                    "killed: put longer work in the background with setsid or nohup"
                )
            else:
                if returned:
                    terminal.warn(f"warning: {FLAG}: the command ended with exit code {returned}")
            finally:
                if started.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(started.pid, signal.SIGKILL)


_OUTCOMES = {DONE: "done", RUN_AGAIN: "stopped", INTERRUPTED: "stopped"}
_VERBS = {"done": "finished", "stopped": "stopped", "failed": "failed", "hung": "hung"}
