"""Observes and controls a launcher and its processes through the operating system."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
LAUNCHER = CHECKOUT / "launch" / "local.sh"
_MARK = "JAXTRAIN_CHAOS_RUN"
# The launcher's timeouts, short because this model saves in less than a second.
_PATIENCE = {"RESTART_DELAY_S": "0", "GRACE_S": "3", "KILL_S": "3", "SAVE_S": "30"}


@dataclass(frozen=True)
class Process:
    """A process of the run.

    Attributes:
        index: number of the training process; None for workers and the launcher's processes.
        trains: whether it is a training process or one of its workers.
    """

    pid: int
    index: int | None
    trains: bool


class Launched:
    """One start of ``launch/local.sh``, whose processes all have a mark in their environment.

    Args:
        place: working directory, which also contains caches and temporary files.
    """

    def __init__(
        self, count: int, arguments: list[str], place: Path, mark: str, variables: dict[str, str]
    ) -> None:
        self._mark = f"{_MARK}={mark}".encode()
        self._output = (place / "launcher.txt").open("ab")
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        (place / "tmp").mkdir(exist_ok=True)
        self._launcher = subprocess.Popen(
            ["bash", str(LAUNCHER), str(count), *arguments],
            cwd=place,
            env=kept
            | {
                "PYTHON": sys.executable,
                "PYTHONPATH": str(CHECKOUT),
                "TMPDIR": str(place / "tmp"),
                _MARK: mark,
            }
            | _PATIENCE
            | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def code(self) -> int | None:
        """Returns the launcher's exit code; None while it runs."""
        return self._launcher.poll()

    def signal_launcher(self, number: signal.Signals) -> bool:
        """Signals only the launcher; returns whether it was running."""
        if self._launcher.poll() is not None:
            return False
        self._launcher.send_signal(number)
        return True

    def processes(self) -> list[Process]:
        """Returns all marked processes that have not ended."""
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # the process has just ended
                environment = Path(entry.path, "environ").read_bytes()
                if self._mark not in environment.split(b"\0"):
                    continue
                # pid (name) state ...
                state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":  # zombies have ended
                    found.append(_described(int(entry.name), environment))
        return found

    def training(self) -> dict[int, int]:
        """Returns index -> PID of the training processes."""
        return {
            process.index: process.pid for process in self.processes() if process.index is not None
        }

    def kill_everything(self) -> None:
        """Kills the launcher and all its processes.

        Raises:
            RuntimeError: some are still running after 30 s.
        """
        deadline = time.monotonic() + 30
        while (left := self.processes()) or self._launcher.poll() is None:
            for process in left:
                send(process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"still running after SIGKILL: {left}")
            time.sleep(0.01)

    def close(self) -> None:
        """Kills all remaining processes."""
        self.kill_everything()
        self._output.close()


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; returns whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _described(pid: int, environment: bytes) -> Process:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if b"python" not in os.path.basename(command[0]):
        return Process(pid, None, trains=False)
    if b"jaxtrain.main" not in command:
        worker = any(b"multiprocessing" in word for word in command)
        return Process(pid, None, trains=worker)
    name = b"JAX_PROCESS_ID="
    indices = [word[len(name) :] for word in environment.split(b"\0") if word.startswith(name)]
    return Process(pid, int(indices[0]) if indices else 0, trains=True)
