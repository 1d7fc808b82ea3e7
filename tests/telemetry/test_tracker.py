"""Trackers, with a fake MLflow; real_trackers.py tests the real packages."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
from planning.step_findings import COST
from program import wait_for

import jaxtrain
from jaxtrain import versions
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.errors import InputError
from jaxtrain.telemetry import tracker
from jaxtrain.telemetry.events import (
    Ended,
    EventLog,
    Metrics,
    Rewound,
    Sample,
    Started,
    StepCompiled,
)
from jaxtrain.telemetry.sinks import file_sinks
from jaxtrain.training import preflight

# It stores requests in a file, and behaves as the file "mood" says.
FAKE = """
import json, os, pathlib, time, types

FOLDER = pathlib.Path(__file__).parent

def stored():
    path = FOLDER / "stored.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

def store(*request):
    print("noise of a library")
    with open(FOLDER / "stored.jsonl", "a") as file:
        file.write(json.dumps(request) + "\\n")

def mood():
    path = FOLDER / "mood"
    words = path.read_text() if path.exists() else ""
    if words == "hang":
        while path.exists():
            time.sleep(0.02)
    if words == "fail":
        raise ConnectionError("no server at http://user:secret@host/")
    if words == "exit":
        raise SystemExit("3")

def get_tracking_uri():
    return "fake"

class MlflowClient:
    def get_experiment_by_name(self, name):
        mood()
        return types.SimpleNamespace(experiment_id=name)
    def search_runs(self, experiments, text):
        runs = [request for request in stored() if request[0] == "run"]
        if not runs:
            return []
        info = types.SimpleNamespace(run_id="1")
        return [types.SimpleNamespace(info=info, data=types.SimpleNamespace(params={}))]
    def create_run(self, experiment, tags, run_name):
        store("run", tags["jaxtrain.run"], run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
    def update_run(self, run, status):
        pass
    def log_batch(self, run, metrics=(), params=(), tags=()):
        mood()
        for key, value, when, step in metrics or ():
            store("metric", key, value, step)
        for key, value in params:
            store("param", key, value)
    def log_image(self, run, image, key, step, timestamp, synchronous):
        store("image", key, step, list(image.size))
    def log_artifact(self, run, path, folder):
        store("file", pathlib.Path(path).name)
    def set_terminated(self, run, status):
        store("end", status)
"""
ENTITIES = """
Metric = Param = RunTag = lambda *values: values
"""


MODULES = ("mlflow", "mlflow.entities", "jaxtrain.telemetry.tracker_mlflow")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a fake package ``mlflow``."""
    folder = tmp_path / "packages" / "mlflow"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE)
    (folder / "entities.py").write_text(ENTITIES)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(tracker, "STOPPED_S", 20.0)
    monkeypatch.setattr(tracker, "_RETRY_S", (0.1,))
    monkeypatch.setattr(tracker, "_POLL_S", 0.05)
    yield folder
    (folder / "mood").unlink(missing_ok=True)
    wait_for(lambda: not tracker.still_sending())
    for name in MODULES:
        sys.modules.pop(name, None)


class Run:
    """A start of a run with a log that tracks it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.lines: list[str] = []
        self.log = EventLog(Printed(self.lines))
        sinks = file_sinks(directory, 0, 1, ("mlflow",), self.log.say)
        self.log.attach(sinks, directory)
        self.log.emit(Started(0, 0, 9, None, {"name": "demo", "optim": {"b1": 0.5}}, ["--debug"]))
        self.log.emit(StepCompiled(0, COST, 1.0, 1))

    def end(self, code: int = 0) -> None:
        """Ends the run as a real one does."""
        self.log.emit(Ended(1, code, "done"))
        self.log.close()


class Printed:
    """A console that keeps its lines."""

    name, takes = "console", ()

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def handle(self, event: Any) -> None: ...

    def close(self) -> None: ...

    def show(self, text: str) -> None:
        self._lines.append(text)


def stored(fake: Path, kind: str = "metric") -> list[list[Any]]:
    path = fake / "stored.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [request[1:] for request in found if request[0] == kind]


def messages(directory: Path) -> str:
    path = directory / "log.txt"
    return path.read_text() if path.exists() else ""


def losses(*steps: int) -> Sequence[Metrics]:
    return [Metrics(step, {"train/loss": 1 / step}) for step in steps]


def test_a_run_is_sent_with_its_config_and_samples(tmp_path: Path, fake: Path) -> None:
    run = Run(tmp_path / "run")
    for event in losses(1, 2):
        run.log.emit(event)
    run.log.emit(Sample(2, "image", np.zeros((4, 6, 3), np.uint8)))
    run.log.emit(Sample(2, "text", "words"))
    run.log.emit(Sample(1, "image", np.zeros((4, 6, 3), np.uint8)))  # of no validation
    run.log.emit(Metrics(2, {"val/loss": float("inf")}))
    run.end()
    assert stored(fake) == [
        ["train/loss", 1.0, 1],
        ["train/loss", 0.5, 2],
        ["val/loss", float("inf"), 2],
    ]
    assert stored(fake, "image") == [["image", 2, [6, 4]]]
    assert stored(fake, "file") == [["text_2.txt"]]
    params = dict(stored(fake, "param"))
    assert params["optim.b1"] == "0.5"
    assert params["versions.python"]
    assert params["run.arguments"] == "--debug"
    assert stored(fake, "end") == [["FINISHED"]]
    assert "mlflow: run demo/run (1) at fake" in messages(tmp_path / "run")
    assert not run.lines, "nothing is wrong"


def test_resumes_and_rollbacks_belong_to_one_run_without_repeated_steps(
    tmp_path: Path, fake: Path
) -> None:
    run = Run(tmp_path / "run")
    for event in losses(1, 2, 3):
        run.log.emit(event)
    wait_for(lambda: len(stored(fake)) == 2)  # a validation may follow step 3
    run.log.emit(Rewound(1, 8))
    run.log.emit(Metrics(2, {"train/loss": 5.0}))
    for event in losses(3, 4):
        run.log.emit(event)
    run.end(75)
    assert [step for _, _, step in stored(fake)] == [1, 2, 3]
    again = Run(tmp_path / "run")
    again.log.emit(Rewound(4, 32, validated=False))
    again.log.emit(Metrics(4, {"val/loss": 0.5}))  # which the start before had no time for
    again.log.emit(losses(5)[0])
    again.end()
    assert stored(fake) == [
        ["train/loss", 1.0, 1],
        ["train/loss", 0.5, 2],
        ["train/loss", 1 / 3, 3],
        ["train/loss", 0.25, 4],
        ["val/loss", 0.5, 4],
        ["train/loss", 0.2, 5],
    ]
    assert stored(fake, "end") == [["KILLED"], ["FINISHED"]]
    assert len(stored(fake, "run")) == 1
    sent = json.loads((tmp_path / "run" / "trackers" / "mlflow.json").read_text())
    assert sent == {"run": stored(fake, "run")[0][0], "step": 5}


def test_what_was_not_sent_is_sent_by_the_next_start(tmp_path: Path, fake: Path) -> None:
    log = EventLog(Printed([]))
    (tmp_path / "run").mkdir()
    log.attach(file_sinks(tmp_path / "run", 0, 1), tmp_path / "run")  # without --track
    log.emit(losses(1)[0])
    log.close()
    run = Run(tmp_path / "run")
    run.log.emit(losses(2)[0])
    run.end()
    assert [step for _, _, step in stored(fake)] == [1, 2]
    (fake / "stored.jsonl").unlink()  # as of another server
    Run(tmp_path / "run").end()
    assert [step for _, _, step in stored(fake)] == [1, 2]


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "END_S", 3.0)
    (fake / "mood").write_text("hang")
    run = Run(tmp_path / "run")
    wait_for((tmp_path / "run" / "trackers" / "mlflow.json").exists)
    slowest = 0.0
    for event in losses(*range(1, 200)):
        began = time.perf_counter()
        run.log.emit(event)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 1.0
    began = time.monotonic()
    run.end()
    assert 2.5 < time.monotonic() - began < 10
    assert "mlflow has not finished in time and is abandoned" in messages(tmp_path / "run")
    assert tracker.still_sending()
    (fake / "mood").unlink()
    wait_for(lambda: not tracker.still_sending())
    Run(tmp_path / "run").end()
    assert len({step for _, _, step in stored(fake)}) == 199


# What W&B does at exit waits for its server.
BLOCKS_AT_EXIT = """
import atexit, threading, time
atexit.register(time.sleep, 1000)
"""
WITH_SHORT_WAIT = """
import sys
from jaxtrain import main
from jaxtrain.telemetry import tracker
tracker.END_S = 2.0
main.console()
"""


@pytest.mark.slow
def test_a_process_with_a_tracker_that_does_not_work_ends_in_time(
    tmp_path: Path, fake: Path
) -> None:
    """Here also in what its package does at exit."""
    program.write_corpus(tmp_path)
    (fake / "mood").write_text("hang")
    (fake / "__init__.py").write_text(BLOCKS_AT_EXIT + FAKE)
    run = tmp_path / "run"
    arguments = [*program.TINY_MLM, "--data.path", "corpus", "--loop.steps", "30"]
    arguments += ["--track", "mlflow"]
    ended = subprocess.run(
        [sys.executable, "-c", WITH_SHORT_WAIT, *arguments, "--output-dir", str(run)],
        cwd=tmp_path,
        env=program.environment(tmp_path, PYTHONPATH=f"{fake.parent}:{os.getcwd()}"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 30
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [one["code"] for one in history if one["event"] == "end"] == [0]
    assert "to send what is missing, run the same command with --resume latest" in ended.stdout


def test_a_tracker_that_fails_is_reported_once_and_retried(tmp_path: Path, fake: Path) -> None:
    said = "ConnectionError: no server at http://***@host/"
    (fake / "mood").write_text("fail")
    run = Run(tmp_path / "run")
    run.log.emit(losses(1)[0])
    wait_for(lambda: said in messages(tmp_path / "run"))
    time.sleep(0.3)  # it fails again
    (fake / "mood").unlink()
    wait_for(lambda: stored(fake, "param"))
    run.end()
    assert stored(fake) == [["train/loss", 1.0, 1]]
    written = messages(tmp_path / "run")
    assert written.count(said) == 1
    assert "training continues, and what is missing is sent later" in written


def test_only_process_zero_tracks(tmp_path: Path) -> None:
    def names(process: int) -> set[str]:
        return {one.name for one in file_sinks(tmp_path, process, 2, ("wandb", "mlflow"))}

    assert names(0) >= {"wandb", "mlflow"}
    assert not names(1) & {"wandb", "mlflow"}


def test_unknown_and_missing_trackers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where W&B has left a folder ``wandb``, which Python takes for a package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    with monkeypatch.context() as changed:
        changed.setattr(sys, "path", [str(tmp_path)])
        changed.delitem(sys.modules, "wandb", raising=False)
        assert list(tracker.problems(("wandbb", "none", "wandb"))) == [
            "--track 'wandbb': unknown tracker; did you mean wandb?",
            "--track 'none': unknown tracker; choose from wandb, trackio, mlflow",
            f"--track wandb: wandb is not installed: {versions.install('wandb')}",
        ]
    assert not list(tracker.problems(("wandb",), installed=False))
    run = jaxtrain.load_config("demo_gpt")
    with pytest.raises(InputError, match="unknown tracker"):
        preflight.refuse(run, RunFlags(track=("none",)))
    with pytest.raises(InputError, match="unknown tracker"):
        jaxtrain.train(run, track="none")
