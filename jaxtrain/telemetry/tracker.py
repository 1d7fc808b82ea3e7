"""Records a run with the trackers of ``--track``: W&B, Trackio, MLflow.

Each tracker has a process of its own (:mod:`jaxtrain.telemetry.tracker_process`), which reads what
the run writes to its directory: metrics, samples, config. The files are the queue. So the training
thread does nothing per event, nothing is ever dropped, and a tracker that hangs, fails, prints or
leaks memory does not affect the run. What a tracker has not received, it gets when it works again,
or from the next start of the run.

To add a tracker NAME, where NAME is also the package that it imports: write
``telemetry/tracker_NAME.py``, with a class that is made from an ``Info`` and has the methods of
``Recorder`` (both in :mod:`jaxtrain.telemetry.tracker_process`; ``tracker_trackio.py`` is the
shortest example). Then add NAME to :data:`TRACKERS`, a case to ``tracker_process.open_recorder``,
an extra NAME to pyproject.toml, and NAME to the help of ``--track`` in cli/train.py.
"""

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jaxtrain
from jaxtrain import versions
from jaxtrain.config.overrides import did_you_mean
from jaxtrain.errors import DONE, shown
from jaxtrain.storage.atomic import open_own
from jaxtrain.telemetry.events import Ended, StepCompiled

TRACKERS = ("wandb", "trackio", "mlflow")
"""Their names, which are also those of their packages and extras."""

FOLDER = "trackers"

# How long the end of a run waits for a tracker: of a complete run, and of one that is stopped or
# has failed, where a scheduler may be about to kill the process.
END_S = 60.0
STOPPED_S = 10.0
# Before a process that has failed is started again.
_RETRY_S = (10.0, 60.0, 300.0)

WARNING = "warning: "
"""Begins a line of the process that is a warning."""


def names(typed: Iterable[str]) -> tuple[str, ...]:
    """Returns the trackers in the values of ``--track``, each once.

    Args:
        typed: each a name, or several separated by commas.
    """
    split = (name.strip() for value in typed for name in value.split(","))
    return tuple(dict.fromkeys(split))


def problems(track: Iterable[str], *, installed: bool = True) -> Iterator[str]:
    """Finds unknown trackers, and those that are not installed.

    Args:
        track: from :func:`names`.
        installed: whether this process needs them.
    """
    for name in track:
        if name not in TRACKERS:
            yield f"--track {shown(name)}: unknown tracker; {did_you_mean(name, TRACKERS)}"
        elif installed and not _installed(name):
            yield f"--track {name}: {name} is not installed: {versions.install(name)}"


def _installed(name: str) -> bool:
    """Whether a package is installed. W&B writes a folder ``wandb``, which is not the package."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


class Tracker:
    """Starts the process of a tracker, and ends it; process 0 only.

    It starts once the step is compiled, so that a run with wrong input leaves no trace; a run that
    has nothing left to train sends what an earlier start did not. A process that fails is started
    again, after a while and at the end of the run.

    Args:
        name: one of :data:`TRACKERS`.
        directory: the run directory.
        say: prints and logs a line of the process.
    """

    takes = (StepCompiled, Ended)

    def __init__(self, name: str, directory: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self._directory = directory
        self._say = say
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process and its stdin
        self._over = threading.Event()
        self._code = 1
        self._until = 0.0
        self._warned: set[tuple[str, bool]] = set()

    def handle(self, event: StepCompiled | Ended) -> None:
        """Starts the process, or tells it the end of the run; waits for nothing."""
        if isinstance(event, Ended):
            self._end(event.code)
        if self._thread is None and (isinstance(event, StepCompiled) or event.code == DONE):
            self._thread = threading.Thread(target=self._supervise, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for the process until its deadline, and then kills it."""
        thread = self._thread
        if thread is None:
            return
        if not self._over.is_set():  # the end of the run was not logged
            self._end(1)
        thread.join(max(0.0, self._until - time.monotonic()))
        if thread.is_alive():
            self._say(
                f"warning: {self.name} has not finished in time and is stopped: to send what is "
                "missing, run the same command with --resume latest"
            )
            self._thread = None  # it starts no other process, and what it says is too late
            with self._lock:
                if self._process is not None:
                    self._process.kill()
            thread.join(1.0)

    def _end(self, code: int) -> None:
        self._code = code
        self._until = time.monotonic() + (END_S if code == DONE else STOPPED_S)
        self._over.set()
        self._tell()

    def _tell(self) -> None:
        """Tells the process the exit code of the run, once that is known."""
        with self._lock:
            if self._over.is_set() and self._process is not None:
                assert self._process.stdin is not None
                # It may have ended. A pipe is closed only once.
                with contextlib.suppress(OSError, ValueError), self._process.stdin as pipe:
                    pipe.write(str(self._code).encode())

    def _supervise(self) -> None:
        """Starts the process until it has recorded the complete run."""
        for wait_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
            last = self._over.is_set()
            try:
                done = self._run()
            except OSError as error:  # no memory for a process, or a full disk
                done = self._warn(f"cannot be started ({error.strerror})")
            if done or last or self._thread is None:
                return
            self._over.wait(wait_s)

    def _run(self) -> bool:
        """Starts the process, prints its lines, and returns whether it recorded the run."""
        folder = self._directory / FOLDER
        folder.mkdir(exist_ok=True)
        output = open_own(folder / f"{self.name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        package = str(Path(jaxtrain.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        module = "jaxtrain.telemetry.tracker_process"
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, self.name, str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in a terminal is for the run only
            )
        finally:
            os.close(output)
        with self._lock:
            self._process = process
        self._tell()
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                if text.startswith(WARNING):
                    self._warn(text.removeprefix(WARNING))
                elif self._thread is not None:
                    self._say(f"{self.name}: {text}")
        code = process.wait()
        with self._lock, contextlib.suppress(OSError):
            process.stdin.close()
        if code not in (0, 1):  # for 1, it has said why
            self._warn(f"ended with {code}; see {FOLDER}/{self.name}.log")
        return code == 0

    def _warn(self, text: str) -> bool:
        """Prints a warning, if it is a new one; returns False."""
        over = self._over.is_set()  # then what is missing stays missing: say so once more
        if (text, over) not in self._warned and self._thread is not None:
            self._warned.add((text, over))
            then = (
                "to send what is missing, run the same command with --resume latest"
                if over
                else "training continues, and what is missing is sent later"
            )
            self._say(f"warning: {self.name}: {text}: {then}")
        return False
