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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import event_log
import numpy as np
import pytest
from program import TINY_MLM, command, environment, write_corpus

from jaxtrain.telemetry.events import Metrics, Sample, Started
from jaxtrain.telemetry.tracker_wandb import rows

# MLflow's own use of SQLAlchemy, in the process of the tests.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TRACKERS = ("wandb", "trackio", "mlflow")
STEPS = 60
KILLED = [
    *TINY_MLM,
    *["--data.path", "corpus", "--loop.steps", str(STEPS), "--loop.eval_every", "10"],
    *["--checkpoint.every", "10", "--track", "wandb,trackio", "--track", "mlflow"],
]
# As in tests/training/test_bad_updates.py: six rollbacks.
ROLLED_BACK = [
    *TINY_MLM,
    *["--data.path", "corpus", "--loop.steps", "None", "--loop.epochs", "4"],
    *["--checkpoint.every", "10", "--optim.peak_lr", "1e-3", "--optim.bad_norm", "0.945"],
    *["--optim.bad_in_a_row", "2", "--checkpoint.keep", "20", "--track", "wandb,trackio,mlflow"],
    *["--seed", "0"],
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

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(*arguments),
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
        numbers = []
        for number, values in rows(run / "wandb", id):
            numbers.append(number)
            for key in values:
                if key.startswith(("train/", "val/")):
                    yield json.loads(values["step"]), key, json.loads(values[key])
        # W&B drops a row whose number is not greater than that of the row before.
        assert numbers == list(range(len(numbers)))
        assert numbers, "W&B has stored the run"

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
        name: json.loads((run / f"trackers/{name}.jsonl").read_text().splitlines()[0])["run"]
        for name in TRACKERS
    }


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


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits, and returns whether the condition holds; False if the process has ended."""
    deadline = time.monotonic() + 200
    while not condition():
        if process.poll() is not None:
            return condition()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return True


def processes_of(run: Path) -> set[int]:
    """Returns the processes of the trackers of a run, and those of W&B."""
    parents, found = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if "jaxtrain.telemetry.tracker_process" in words and str(run) in words:
                found.add(int(path.name))
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def last(points: list[Point]) -> dict[tuple[int, str], float]:
    return {(point.step, point.name): point.value for point in points}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("trackers"))


@pytest.fixture(scope="module")
def killed(place: Place) -> Path:
    """A run that is killed twice: once with its trackers, as by a host that fails, once without."""
    run = place.folder / "killed"
    arguments = [*KILLED, "--output-dir", run, "--resume", "latest"]
    for count, with_trackers in ((27, True), (49, False)):
        process = place.start(*arguments)
        try:
            assert wait_for(lambda: lines(run / "metrics.jsonl") >= count, process)  # noqa: B023
            # It is stopped until the trackers have caught up: its steps take milliseconds.
            process.send_signal(signal.SIGSTOP)
            sent = min(count, lines(run / "metrics.jsonl"))
            wait_for(
                lambda: all(lines(run / f"trackers/{name}.jsonl") > sent for name in TRACKERS),  # noqa: B023
                process,
            )
            if with_trackers:
                for pid in processes_of(run):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        finally:
            process.kill()
            process.communicate()
        assert 0 < lines(run / "metrics.jsonl") < STEPS + STEPS // 10
    place.finish(*arguments)
    assert not processes_of(run)
    return run


@pytest.fixture(scope="module")
def rolled_back(place: Place) -> Path:
    """A run with rollbacks, whose trackers are never more than a few steps behind."""
    run = place.folder / "rolled_back"
    process = place.start(*ROLLED_BACK, "--output-dir", run)
    metrics = run / "metrics.jsonl"

    def sent() -> bool:
        known = metrics.read_text().splitlines()
        wanted = {(record["step"], record["time"]) for record in map(json.loads, known)}
        for name in TRACKERS:
            path = run / f"trackers/{name}.jsonl"
            if not path.exists():
                return False
            found = map(json.loads, path.read_text().splitlines()[1:])
            if wanted - {(step, when) for step, when in found}:
                return False
        return True

    seen = 0.0
    try:
        while wait_for(lambda: metrics.exists() and metrics.stat().st_mtime > seen, process):  # noqa: B023
            process.send_signal(signal.SIGSTOP)
            seen = metrics.stat().st_mtime
            wait_for(sent, process)
            process.send_signal(signal.SIGCONT)
            if process.poll() is not None:
                break
            time.sleep(0.01)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()
    assert "restoring checkpoint" in (run / "log.txt").read_text()
    return run


@pytest.mark.parametrize("name", TRACKERS)
def test_a_killed_run_is_one_run_without_gaps(place: Place, killed: Path, name: str) -> None:
    found = place.stored(killed, name)
    assert last(found) == last(recorded(killed))
    losses = [point for point in found if point.name == "train/loss"]
    assert {point.step for point in losses} == set(range(1, STEPS + 1))
    assert len(losses) > STEPS, "steps after a checkpoint were repeated"
    # A step that is repeated after a kill has the same loss.
    assert len({(point.step, point.value) for point in losses}) == STEPS
    assert {point.step for point in found if point.name == "val/loss"} == set(range(10, 61, 10))
    print(f"{name}: {len(losses)} losses of {STEPS} steps")


@pytest.mark.parametrize("name", TRACKERS)
def test_after_a_rollback_the_last_value_counts(place: Place, rolled_back: Path, name: str) -> None:
    found = place.stored(rolled_back, name)
    assert last(found) == last(recorded(rolled_back))
    losses = [point for point in found if point.name == "train/loss"]
    steps = {point.step for point in losses}
    assert steps == set(range(1, max(steps) + 1))
    values = {(point.step, point.value) for point in losses}
    assert len(values) > len(steps), "steps after a rollback have new values"
    print(f"{name}: {len(losses)} losses of {len(steps)} steps, {len(values)} of them different")


def test_samples_and_config_are_stored(place: Place) -> None:
    run = place.folder / "samples"
    run.mkdir()
    log = event_log.attached(run)
    log.emit(Started(0, 0, 1, None, {"name": "demo", "optim": {"peak_lr": 0.5}}, []))
    log.emit(Sample(1, "image", np.zeros((16, 16, 3), np.uint8)))
    log.emit(Sample(1, "clip", np.zeros((4, 16, 16, 3), np.uint8)))
    log.emit(Sample(1, "text", "some <words>"))
    log.emit(Metrics(1, {"val/loss": 0.5}))
    log.close()
    for name in TRACKERS:
        ended = subprocess.run(
            [sys.executable, "-m", "jaxtrain.telemetry.tracker_process", name, str(run)],
            cwd=place.folder,
            env=environment(place.folder, **place.variables),
            input="0",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "demo/samples" in ended.stdout or "recording offline" in ended.stdout
    ((_, row),) = rows(run / "wandb", ids(run)["wandb"])
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
        command(*KILLED[:-4], "--track", "wandb", "--output-dir", run),
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
    assert len(list(rows(run / "wandb", json.loads(first_line(run))["run"]))) == STEPS + 6


def first_line(run: Path) -> str:
    return (run / "trackers" / "wandb.jsonl").read_text().splitlines()[0]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_server_that_is_down_does_not_affect_the_run(place: Place, name: str) -> None:
    run = place.folder / f"down_{name}"
    down = "http://127.0.0.1:9"  # nothing listens there
    began = time.monotonic()
    process = subprocess.run(
        command(*KILLED[:-4], "--track", name, "--output-dir", run),
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
    assert lines(run / "metrics.jsonl") == STEPS + 6
    said = [line for line in process.stdout.splitlines() if line.startswith(f"warning: {name}")]
    assert said, process.stdout
    assert len(said) <= 2, said
    assert "--resume latest" in said[-1]
    assert "0" * 40 not in process.stdout + process.stderr
    print(f"{name}: {time.monotonic() - began:.0f} s; {said}")
