"""Work on a real Ray cluster of three nodes, one of which is killed meanwhile.

Needs the extra ``ray``, so it is not part of the default suite: pass the file. The nodes are
processes on this machine.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data.video import sample_videos as sample
from launch.hosts import wait_for

from jaxtrain.interop import weights
from jaxtrain.jobs import engines, resumable
from jaxtrain.models import video_ae
from jaxtrain.training.state import ModelDefinition

# Ray's workers have niceness 15, so on a busy machine they would wait for all other processes.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
# Ray forks, and leaves sockets open.
pytestmark = pytest.mark.filterwarnings("default")
cluster_utils = pytest.importorskip("ray.cluster_utils")

SIZE = ("--height", "96", "--width", "128", "--frames", "24", "--min-frames", "8")
SIZE += ("--min-side", "16", "--keep-cuts")
VIDEOS = 30


@pytest.fixture
def cluster() -> Iterator[Any]:
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    first = sample.write(folder / "0.mp4", sample.busy(160, height=192, width=256))
    for number in range(1, VIDEOS):
        shutil.copy(first, folder / f"{number}.mp4")
    (folder / "broken.mp4").write_bytes(first.read_bytes()[:5000])
    return folder


SHORT = 40


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Different short videos, of which one is broken, and weights of a model."""
    folder = tmp_path_factory.mktemp("short")
    for number in range(SHORT):
        sample.write(folder / f"videos/{number}.mp4", sample.busy(26, number, height=32, width=32))
    (folder / "videos/broken.mp4").write_bytes(b"no video" * 99)
    tiny = video_ae.Config.tiny()
    params, _ = ModelDefinition(tiny.build).init(jax.random.key(1))
    arrays = {name: np.asarray(array) for name, array in params.items()}
    weights.save(folder / "weights.safetensors", tiny, arrays)
    return folder


def on(cluster: Any) -> tuple[str, ...]:
    return ("--engine", "ray", "--ray-address", cluster.address)


def kill_a_node(cluster: Any, finished: Callable[[], int], least: int, total: int) -> None:
    """Kills a node once some of the work is finished, and not all of it."""
    wait_for(lambda: finished() >= least, "the first files", seconds=180)
    (victim, *_) = cluster.worker_nodes
    before = finished()
    cluster.remove_node(victim, allow_graceful=False)
    assert before < total, "the node was killed too late"


def prepare(source: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    return run("prepare", "clips", source, out, *SIZE, *flags)


def run(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},  # a driver has once ended with SIGSEGV
    )


def output(process: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == code, said
    return said


def files(out: Path) -> dict[str, bytes]:
    """The outputs, and all records."""
    made = {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".jobs" not in path.parts
    }
    for path in (out / ".jobs/records").glob("*/*.json"):
        made[path.name] = path.read_bytes()
    return made


def records(out: Path) -> int:
    return len(list((out / ".jobs/records").glob("*/*.json")))


@pytest.mark.timeout(300)
def test_a_node_is_killed_and_the_files_are_those_of_one_process(
    videos: Path, tmp_path: Path, cluster: Any
) -> None:
    lone, out = tmp_path / "alone", tmp_path / "cluster"
    assert "failed: broken.mp4: " in output(prepare(videos, lone, "--workers", "1"), 1)
    process = prepare(videos, out, *on(cluster))
    tars = len(list(lone.glob("*.tar")))  # each is an item of the work
    assert tars >= 4
    kill_a_node(cluster, functools.partial(records, out), 1, tars)
    assert "failed: broken.mp4: " in output(process, 1)
    assert files(out) == files(lone)
    assert list((out / ".jobs/half").iterdir()) == []
    # The work is done: another start only reads the records.
    text = output(prepare(videos, out, *on(cluster)), 1)
    assert f"{VIDEOS} of {VIDEOS + 1} videos are already done" in text


def register_by_value() -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


def upper(worker: engines.Worker) -> resumable.Make:
    """Writes texts in upper case, and ends its worker at the file 3.txt."""

    def make(item: resumable.Item, path: Path) -> dict[str, Any]:
        if item.name == "3.txt":
            os._exit(9)
        path.write_text(item.name.upper())
        return {}

    return make


@pytest.mark.parametrize("gpus", [None, 0])
def test_an_item_that_kills_its_worker_costs_only_itself(
    gpus: float | None, tmp_path: Path, cluster: Any
) -> None:
    register_by_value()
    out = tmp_path / "out"
    items = [resumable.Item(f"{number}.txt", (), f"{number}.up") for number in range(8)]
    engine = engines.Ray(cluster.address, None if gpus is None else 2, gpus)
    outcome = resumable.run(items, upper, out, {}, engine=engine, say=print)
    assert (outcome.made, outcome.failed) == (7, {"3.txt": resumable.KILLS})
    assert {path.stem for path in out.glob("*.up")} == set("0124567")
