"""Records a run with the trackers of ``--track``: W&B, Trackio, MLflow.

Each tracker has one thread, which reads ``metrics.jsonl`` as it grows and sends what is new. The
file is the queue: the training thread does nothing per event, nothing is dropped, and a tracker
that hangs or fails neither delays the run nor ends it. What a tracker has not received, it gets
when it works again, or from the next start of the run.

A tracker receives one row per step, with the values of training and validation, in order. Steps
that are repeated after a kill or a rollback are not sent again. ``trackers/NAME.json`` in the run
directory has the id of the tracker's run and the last step that was sent (:class:`Sent`).

To add a tracker NAME, where NAME is also the package that it imports: write
``telemetry/tracker_NAME.py``, with a class that is made from an :class:`Info` and has the methods
of :class:`.recorder.Recorder`; ``tracker_trackio.py`` is the shortest example. Then add NAME to
:data:`TRACKERS`, a case to :func:`open_recorder`, an extra NAME to pyproject.toml, and NAME to the
help of ``--track`` in config/run_flags.py.
"""

import importlib.util
import itertools
import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtrain import versions
from jaxtrain.config.field_values import did_you_mean
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, first_line, short_repr
from jaxtrain.storage import json_lines
from jaxtrain.storage.atomic import read_json, write_whole
from jaxtrain.telemetry import line_files, samples
from jaxtrain.telemetry.events import Ended, StepCompiled
from jaxtrain.telemetry.recorder import Info, Recorder, Row

TRACKERS = ("wandb", "trackio", "mlflow")
"""Their names, which are also those of their packages and extras."""

FOLDER = "trackers"

# How long the end of a run waits for a tracker: of a complete run, and of one that is stopped or
# has failed, where a scheduler may be about to kill the process.
END_S = 60.0
STOPPED_S = 10.0
# Before a tracker that has failed is opened again.
_RETRY_S = (10.0, 60.0, 300.0)
_POLL_S = 1.0
_HARDWARE = ("host", "processes", "devices", "device_kind", "platform", "driver")
_THREAD = "tracker"
# The packages import each other's parts. Two threads that wait for each other's imports get modules
# that are incomplete: wandb had no "errors" in 1 of 8 runs on a machine under load.
_IMPORTING = threading.Lock()


def names(values: Iterable[str]) -> tuple[str, ...]:
    """Returns the trackers in the values of ``--track``, each once."""
    split = (name.strip() for value in values for name in value.split(","))
    return tuple(dict.fromkeys(split))


def problems(track: Iterable[str], *, installed: bool = True) -> Iterator[str]:
    """Finds unknown trackers, and those that are not installed."""
    for name in track:
        if name not in TRACKERS:
            yield f"--track {short_repr(name)}: unknown tracker; {did_you_mean(name, TRACKERS)}"
        elif installed and not _installed(name):
            yield f"--track {name}: {name} is not installed: {versions.install(name)}"


def _installed(name: str) -> bool:
    """Whether a package is installed. W&B writes a folder ``wandb``, which is not the package."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def still_sending() -> bool:
    """Returns whether a tracker hangs. What its package does at exit may hang, too."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def open_recorder(name: str, info: Info) -> Recorder:
    """Opens the run of a tracker."""
    recorder: Callable[[Info], Recorder]
    with _IMPORTING:
        match name:
            case "wandb":
                from jaxtrain.telemetry.tracker_wandb import WandB as recorder
            case "trackio":
                from jaxtrain.telemetry.tracker_trackio import Trackio as recorder
            case "mlflow":
                from jaxtrain.telemetry.tracker_mlflow import MLflow as recorder
            case _:
                raise ValueError(f"unknown tracker {name}")
    return recorder(info)


class Tracker:
    """Starts the thread of a tracker, and tells it the end of the run; process 0 only.

    It starts once the step is compiled, so that a run with wrong input leaves no trace; a run that
    has nothing left to train sends what an earlier start did not. A tracker that fails is opened
    again, after a while and at the end of the run.
    """

    takes = (StepCompiled, Ended)

    def __init__(self, name: str, directory: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self._directory = directory
        self._say = say
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._code = 1
        self._until = 0.0
        self._warned: set[tuple[str, bool]] = set()

    def handle(self, event: StepCompiled | Ended) -> None:
        """Starts the thread, or tells it the end of the run; waits for nothing."""
        if isinstance(event, Ended):
            self._end(event.code)
        if self._thread is None and (isinstance(event, StepCompiled) or event.code == DONE):
            self._thread = threading.Thread(target=self._supervise, name=_THREAD, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for the thread until its deadline, and then abandons it."""
        if self._thread is None:
            return
        if not self._over.is_set():  # the end of the run was not logged
            self._end(1)
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive():
            self._say(
                f"warning: {self.name} has not finished in time and is abandoned: to send what is "
                "missing, run the same command with --resume latest"
            )
            self._say = lambda _: None  # what it says is too late

    def _end(self, code: int) -> None:
        self._code = code
        self._until = time.monotonic() + (END_S if code == DONE else STOPPED_S)
        self._over.set()

    def _supervise(self) -> None:
        for wait_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
            over = self._over.is_set()
            try:
                self._follow()
            except BaseException as error:  # a package may also call sys.exit
                self._warn(f"{type(error).__name__}: {first_line(error)}")
                if over:
                    return
                self._over.wait(wait_s)
            else:
                return

    def _follow(self) -> None:
        sent = Sent(self._directory / FOLDER / f"{self.name}.json")
        recorder = open_recorder(self.name, _info(self._directory, sent))
        self._say(f"{self.name}: {recorder.destination}")
        last = recorder.last
        rows = _Rows(self._directory)
        while True:
            over = self._over.is_set()  # before the file is read
            # The resume of a run that was stopped may add a validation to its last step.
            for row in rows.new(complete=over and self._code not in (RUN_AGAIN, INTERRUPTED)):
                if row.step > last:
                    recorder.record(row)
                    last = row.step
            if recorder.keeps:
                sent.note(last)
            if over:
                break
            self._over.wait(_POLL_S)
        recorder.close(self._code)
        sent.note(last)

    def _warn(self, text: str) -> None:
        over = self._over.is_set()  # then what is missing stays missing: say so once more
        if (text, over) not in self._warned:
            self._warned.add((text, over))
            then = (
                "to send what is missing, run the same command with --resume latest"
                if over
                else "training continues, and what is missing is sent later"
            )
            self._say(f"warning: {self.name}: {text}: {then}")


class Sent:
    """What a tracker was sent: ``trackers/NAME.json``.

    Attributes:
        step: the last one that was sent; -1 for none.

    Raises:
        OSError, ValueError, LookupError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            content = read_json(path)
            self.id, self.step = str(content["run"]), int(content["step"])
        else:
            path.parent.mkdir(exist_ok=True)
            self.id, self.step = secrets.token_hex(4), -2  # as of no file
            self.note(-1)

    def note(self, step: int) -> None:
        """Writes the last step, if it is another."""
        if step != self.step:
            write_whole(self._path, json.dumps({"run": self.id, "step": step}) + "\n")
            self.step = step


class _Rows:
    """Reads the rows of a run as they are complete: a later step follows, or the run has ended."""

    def __init__(self, directory: Path) -> None:
        self._reader = json_lines.Reader(directory / line_files.METRICS)
        self._samples = directory / samples.FOLDER
        self._row: Row | None = None

    def new(self, *, complete: bool) -> Iterator[Row]:
        """Yields the rows since the last call; after a rollback, all of them again.

        Args:
            complete: whether nothing is added to the last step.
        """
        for values in self._reader.new():
            step, when = int(values.pop("step")), float(values.pop("time"))
            if self._row is not None and self._row.step == step:
                values = self._row.values | values
            elif self._row is not None and self._row.step < step:  # greater: rolled back
                yield self._row
            self._row = Row(step, when, values, self._samples_of(step, values))
        if complete and self._row is not None:
            yield self._row

    def _samples_of(self, step: int, values: dict[str, float]) -> dict[str, Path]:
        if not any(name.startswith("val/") for name in values):
            return {}
        paths = sorted(self._samples.glob(f"*_{step}.*"))
        return {p.stem.rpartition("_")[0]: p for p in paths if samples.step_of(p) == step}


def _info(directory: Path, sent: Sent) -> Info:
    """Reads what the run has recorded about itself, which has no credentials."""
    starts = (r for r in json_lines.read(directory / "history.jsonl") if r["event"] == "start")
    *_, start = starts
    config = dict(start["config"])
    config["versions"] = start["versions"]
    config["hardware"] = {name: start[name] for name in _HARDWARE}
    config["run"] = {
        "directory": str(directory),
        "arguments": shlex.join(start["arguments"]),
        "resumed_from": start["from"] or "",
    }
    return Info(sent.id, f"{config['name']}/{directory.name}", directory, config, sent.step)
