"""W&B, Trackio and MLflow themselves, without a server: real runs, killed and rolled back.

Afterwards each tracker's own storage is read. Needs the extras ``wandb``, ``trackio`` and
``mlflow``, so it is not part of the default suite: pass the file.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from program import (
    OFTEN_BAD,
    TINY_MLM,
    command,
    environment,
    wait_for,
    write_corpus,
    write_often_bad,
)

# MLflow's own use of SQLAlchemy, in the process of the tests.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TRACKERS = ("wandb", "trackio", "mlflow")
STEPS = 240
RUN = [*TINY_MLM, "--data.path", "corpus", "--loop.eval_every", "10"]
KILLED = [
    *RUN,
    *["--loop.steps", str(STEPS), "--checkpoint.every", "10"],
    *["--track", "wandb,trackio", "--track", "mlflow"],
]
# A kill must meet steps that are being sent, while the trackers take seconds to open.
SLOW = """
import time
from jaxtrain import main
from jaxtrain.telemetry import line_files

handle = line_files.RecordFile.handle

def slow(self, event):
    time.sleep(0.15 if self.name == line_files.METRICS else 0)
    handle(self, event)

line_files.RecordFile.handle = slow
main.console()
"""
# Each tracker fails once, after 20 rows, and is opened again in the same process.
FAILING = """
from jaxtrain import main
from jaxtrain.telemetry import tracker

open_recorder = tracker.open_recorder
failed = set()

def open_failing(name, info):
    recorder = open_recorder(name, info)
    record = recorder.record
    def fail_once(row):
        if row.step == 21 and name not in failed:
            failed.add(name)
            raise OSError("connection lost")
        record(row)
    recorder.record = fail_once
    return recorder

tracker.open_recorder = open_failing
tracker._RETRY_S = (0.5,)
main.console()
"""
SHORT = [*RUN, "--loop.steps", "60"]
# As in tests/training/test_bad_updates.py: six rollbacks.
ROLLED_BACK = [
    *OFTEN_BAD,
    *["--data.path", "corpus", "--loop.steps", "None", "--loop.epochs", "4", "--seed", "0"],
    *["--checkpoint.every", "10", "--checkpoint.keep", "20", "--track", "wandb,trackio,mlflow"],
]


class Point(NamedTuple):
    """A value that a tracker has stored."""

    step: int
    name: str
    value: float


class Place:
    """A folder with a corpus, the storage of the trackers, and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.variables = {
            "WANDB_MODE": "offline",
            "TRACKIO_DIR": str(folder / "trackio"),
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HOME": str(folder),
        }
        write_corpus(folder)
        write_often_bad(folder)

    def start(self, *arguments: object, program: str = "") -> subprocess.Popen[str]:
        own = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.Popen(
            own if program else command(*arguments),
            cwd=self.folder,
            env=environment(self.folder, **self.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *arguments: object) -> str:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def stored(self, run: Path, name: str) -> list[Point]:
        """Returns what the storage of a tracker has of a run, in the order of its records."""
        found = getattr(self, f"_{name}")(run, ids(run)[name])
        return [Point(int(step), key, float(value)) for step, key, value in found]

    def _wandb(self, run: Path, id: str) -> Iterator[tuple[int, str, float]]:
        for folder in sorted((run / "wandb").glob(f"*run-*-{id}")):
            for values in rows(folder / f"run-{id}.wandb"):
                for key in values:
                    if key.startswith(("train/", "val/")):
                        yield json.loads(values["_step"]), key, json.loads(values[key])

    def _trackio(self, run: Path, id: str) -> Iterator[tuple[int, str, float]]:
        sql = "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        found = subprocess.run(
            [
                *(sys.executable, "-m", "trackio.cli", "query", "project"),
                *("--project", "jaxtrain", "--sql", sql, "--json"),
            ],
            env=environment(self.folder, **self.variables),
            capture_output=True,
            text=True,
            check=True,
        )
        answer = json.loads(found.stdout)
        for row in answer["rows"] if isinstance(answer, dict) else answer:
            if row["run_name"].endswith(id):
                metrics = row["metrics"]
                metrics = json.loads(metrics) if isinstance(metrics, str) else metrics
                for key, value in metrics.items():
                    if isinstance(value, int | float):
                        yield row["step"], key, value

    def _mlflow(self, run: Path, id: str) -> Iterator[tuple[int, str, float]]:
        import mlflow

        client = mlflow.MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("jaxtrain")
        assert experiment is not None
        (found,) = client.search_runs([experiment.experiment_id], f"tags.`jaxtrain.run` = '{id}'")
        assert found.info.status == "FINISHED"
        points = [
            point
            for key in found.data.metrics
            for point in client.get_metric_history(found.info.run_id, key)
        ]
        for point in sorted(points, key=lambda point: point.timestamp):
            yield point.step, point.key, point.value


def ids(run: Path) -> dict[str, str]:
    return {
        name: json.loads((run / f"trackers/{name}.json").read_text())["run"] for name in TRACKERS
    }


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows in a file of W&B: values by name, as JSON."""
    from wandb.proto import wandb_internal_pb2 as pb

    for record in records(path.read_bytes()):
        message = pb.Record.FromString(record)
        if message.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): item.value_json
                for item in message.history.item
            }


def records(content: bytes) -> Iterator[bytes]:
    """Yields the complete records of a file in LevelDB's log format.

    Blocks of 32 KiB hold pieces of records: checksum (4 bytes), length (2), kind (1: complete, 2:
    first, 3: middle, 4: last), data. See
    https://github.com/google/leveldb/blob/main/doc/log_format.md. W&B's file begins with 7 bytes.
    """
    position, parts = 7, b""
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        piece = content[position + 7 : position + 7 + length]
        position += 7 + length
        if len(piece) < length or kind not in (1, 2, 3, 4):
            return
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            yield parts


def recorded(run: Path) -> list[Point]:
    """Returns the content of metrics.jsonl."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        del record["time"]
        found += [Point(step, key, value) for key, value in record.items()]
    return found


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def children_of(process: int) -> set[int]:
    """Returns the processes that a process has started, such as W&B's, and theirs."""
    parents, found = {}, {process}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("trackers"))


@pytest.fixture(scope="module")
def killed(place: Place) -> Path:
    """A run that is killed twice while it sends: once alone, once with W&B's own processes."""
    run = place.folder / "killed"
    arguments = [*KILLED, "--output-dir", run, "--resume", "latest"]

    def sent(step: int) -> bool:
        """Whether all trackers are open, and one that reports so has rows up to a step."""
        paths = [run / f"trackers/{name}.json" for name in TRACKERS]
        if not all(path.exists() for path in paths) or not list((run / "wandb").glob("*run-*")):
            return False
        return all(json.loads(path.read_text())["step"] >= step for path in paths[1:])

    for step, with_others in ((25, False), (125, True)):
        process = place.start(*arguments, program=SLOW)
        try:
            wait_for(lambda: sent(step), process)  # noqa: B023
            others = children_of(process.pid) if with_others else set()
            process.kill()
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            process.kill()
            process.communicate()
        assert 0 < lines(run / "metrics.jsonl") < STEPS
    place.finish(*arguments)
    assert "resumed" in (run / "log.txt").read_text()
    return run


@pytest.fixture(scope="module")
def rolled_back(place: Place) -> Path:
    """A run with rollbacks."""
    run = place.folder / "rolled_back"
    place.finish(*ROLLED_BACK, "--output-dir", run)
    assert "restoring checkpoint" in (run / "log.txt").read_text()
    return run


@pytest.mark.parametrize("name", TRACKERS)
def test_a_killed_run_is_one_run_with_each_step_once(place: Place, killed: Path, name: str) -> None:
    found = place.stored(killed, name)
    values = {(point.step, point.name): point.value for point in found}
    assert len(values) == len(found), "no value is there twice"
    expected = {(point.step, point.name): point.value for point in recorded(killed)}
    assert values.keys() == expected.keys()
    losses = {key: value for key, value in values.items() if key[1].endswith("/loss")}
    # A step that is repeated after a kill has the same loss.
    assert losses == {key: expected[key] for key in losses}
    assert {step for step, name in losses if name == "train/loss"} == set(range(1, STEPS + 1))
    assert {step for step, name in losses if name == "val/loss"} == set(range(10, STEPS + 1, 10))


@pytest.mark.parametrize("name", TRACKERS)
def test_after_rollbacks_each_step_is_there_once(
    place: Place, rolled_back: Path, name: str
) -> None:
    found = [point for point in place.stored(rolled_back, name) if point.name == "train/loss"]
    steps = [point.step for point in recorded(rolled_back) if point.name == "train/loss"]
    assert sorted(point.step for point in found) == steps


@pytest.fixture(scope="module")
def failed(place: Place) -> Path:
    """A run whose trackers fail once."""
    run = place.folder / "failed"
    arguments = [*SHORT, "--track", ",".join(TRACKERS), "--output-dir", run]
    process = place.start(*arguments, program=FAILING)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.count("connection lost") == len(TRACKERS)
    assert output.count("warning: ") == len(TRACKERS), output
    return run


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_failed_receives_each_step_once(
    place: Place, failed: Path, name: str
) -> None:
    found = [point.step for point in place.stored(failed, name) if point.name == "train/loss"]
    assert sorted(found) == list(range(1, 61))


SAMPLES = """
import sys
from pathlib import Path
import numpy as np
from jaxtrain.telemetry.events import Ended, EventLog, Metrics, Sample, Started
from jaxtrain.telemetry.sinks import file_sinks

class Printed:
    name, takes = "console", ()
    def handle(self, event): ...
    def close(self): ...
    def show(self, text): print(text)

run = Path(sys.argv[1])
log = EventLog(Printed())
log.attach(file_sinks(run, 0, 1, ("wandb", "trackio", "mlflow"), print), run)
log.emit(Started(0, 0, 1, None, {"name": "demo", "optim": {"peak_lr": 0.5}}, []))
log.emit(Sample(1, "image", np.zeros((16, 16, 3), np.uint8)))
log.emit(Sample(1, "clip", np.zeros((4, 16, 16, 3), np.uint8)))
log.emit(Sample(1, "text", "some <words>"))
log.emit(Metrics(1, {"val/loss": 0.5}))
log.emit(Ended(1, 0, "done"))
log.close()
"""


def test_samples_and_config_are_stored(place: Place) -> None:
    run = place.folder / "samples"
    run.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", SAMPLES, str(run)],
        cwd=place.folder,
        env=environment(place.folder, **place.variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = ended.stdout.splitlines()
    assert len(said) == len(TRACKERS), "the packages themselves print nothing"
    assert sum("run demo/samples" in line for line in said) == 2, said
    assert sum("recording offline" in line for line in said) == 1, said
    id = ids(run)["wandb"]
    (folder,) = (run / "wandb").glob(f"offline-run-*-{id}")
    (row,) = rows(folder / f"run-{id}.wandb")
    kinds = {key: value for key, value in row.items() if "_type" in key or key.count("/") == 2}
    assert {json.loads(one) for one in kinds.values() if one.startswith('"')} >= {
        *("image-file", "video-file", "html-file"),
    }, row
    media = {path.suffix for path in (run / "wandb").rglob("media/**/*") if path.is_file()}
    assert media == {".png", ".mp4", ".html"}
    stored = {path.suffix for path in (place.folder / "trackio/media").rglob("*") if path.is_file()}
    assert stored == {".png", ".mp4"}
    import mlflow

    client = mlflow.MlflowClient(place.uri)
    experiment = client.get_experiment_by_name("jaxtrain")
    assert experiment is not None
    tag = f"tags.`jaxtrain.run` = '{ids(run)['mlflow']}'"
    (found,) = client.search_runs([experiment.experiment_id], tag)
    assert found.data.params["optim.peak_lr"] == "0.5"
    files = {one.path for one in client.list_artifacts(found.info.run_id, "samples")}
    assert files == {"samples/clip_1.mp4", "samples/text_1.txt"}
    images = [one.path for one in client.list_artifacts(found.info.run_id, "images")]
    assert any(one.startswith("images/image") and one.endswith(".png") for one in images), images


def test_wandb_without_a_login_records_offline(place: Place) -> None:
    """It neither prompts nor hangs, and says how to log in."""
    run = place.folder / "anonymous"
    process = subprocess.run(
        command(*SHORT, "--track", "wandb", "--output-dir", run),
        cwd=place.folder,
        env=environment(place.folder, HOME=str(place.folder), NETRC=str(place.folder / "none")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (said,) = [line for line in process.stdout.splitlines() if line.startswith("wandb: ")]
    assert "not logged in (set WANDB_API_KEY, or run wandb login)" in said
    assert "upload with: wandb sync" in said
    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    assert len(list(rows(path))) == 60


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_server_that_is_down_does_not_affect_the_run(place: Place, name: str) -> None:
    run = place.folder / f"down_{name}"
    down = "http://127.0.0.1:9"  # nothing listens there
    began = time.monotonic()
    process = subprocess.run(
        command(*SHORT, "--track", name, "--output-dir", run),
        cwd=place.folder,
        env=environment(
            place.folder,
            MLFLOW_TRACKING_URI=down,
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="1",
            WANDB_BASE_URL=down,
            WANDB_API_KEY="0" * 40,
            WANDB_INIT_TIMEOUT="5",
            HOME=str(place.folder),
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert lines(run / "metrics.jsonl") == 60 + 6
    said = [line for line in process.stdout.splitlines() if line.startswith(f"warning: {name}")]
    assert said, process.stdout
    assert len(said) <= 2, said
    assert "--resume latest" in said[-1]
    assert "0" * 40 not in process.stdout + process.stderr
    print(f"{name}: {time.monotonic() - began:.0f} s; {said}")
