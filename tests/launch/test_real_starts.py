"""Where a real run starts, when it is killed at every moment and its launcher starts it again.

The table of jaxtrain/checkpoint/start.py; tests/checkpoint/test_start.py has all of its cells,
without training. Here, each *cell* is a kill -9 of a real process at one moment of a start.
"""

import dataclasses
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch.stub import LAUNCH
from program import (
    TINY_MLM,
    environment,
    execute,
    losses,
    run,
    train,
    write_corpus,
)

pytestmark = pytest.mark.long

KILLS = Path(__file__).parent / "kills"

# Functions that a start calls, in this order; see kills/sitecustomize.py.
MOMENTS = {
    "rendezvous": "jaxtrain.distributed.process_group:connect",
    "opening data": "jaxtrain.training.setup:open_sources",
    "restore": "jaxtrain.training.setup:open_state",
    "compilation": "jaxtrain.training.setup:compile_in_all_processes",
    "before a save": "jaxtrain.checkpoint.saver:CheckpointSaver.save",
    "in a save": "jaxtrain.checkpoint.saver:CheckpointSaver._commit",
}
FLAGS = [
    *TINY_MLM,
    *("--data.path", "corpus", "--mesh.data", "2", "--mesh.shard", "none"),
    *("--simulate-devices", "2", "--checkpoint.every", "1", "--checkpoint.keep", "9"),
]
END = 6
OUTPUT = ("--loop.steps", str(END), "--output-dir", "run")


@dataclasses.dataclass(frozen=True)
class Kill:
    """A cell: the ``count``-th time that process ``index`` comes to a moment.

    SIGSTOP is a process that hangs.
    """

    moment: str
    index: int = 0
    count: int = 1
    number: signal.Signals = signal.SIGKILL

    def line(self) -> str:
        return f"{MOMENTS[self.moment]} {self.index} {self.count} {self.number.name}\n"


class Place:
    """A folder in which a run is started.

    Args:
        folder: with the corpus, and ``straight``, an undisturbed run with all its checkpoints.
        kills: of its starts, in this order.
    """

    def __init__(self, folder: Path, kills: Sequence[Kill] = ()) -> None:
        self.folder = folder
        self.kills = folder / "kills"
        self.kills.write_text("".join(kill.line() for kill in kills))
        self.variables = {
            "PYTHONPATH": f"{KILLS}:{environment(folder)['PYTHONPATH']}",
            "KILLS": str(self.kills),
            "PYTHON": sys.executable,
            "MAX_RESTARTS": "9",
            "RESTART_DELAY_S": "0",
            "GRACE_S": "1",
            "KILL_S": "2",
        }

    def launch(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a launcher; its standard error is in its output."""
        command = [str(LAUNCH / script), *arguments]
        return execute(
            self.folder, "sh", "-c", '"$@" 2>&1', "sh", *command, **(self.variables | more)
        )

    def local(self, processes: int, *arguments: str, **more: str) -> str:
        """Runs ``local.sh`` to the end of the run; returns its output."""
        found = self.launch("local.sh", str(processes), *FLAGS, *OUTPUT, *arguments, **more)
        assert found.returncode == 0, found.stdout
        assert self.kills.read_text() == "", found.stdout
        return found.stdout

    def kill(self, *arguments: str, **more: str) -> str:
        """Starts the run by hand, which is killed; returns its output."""
        found = run(self.folder, *FLAGS, *OUTPUT, *arguments, **(self.variables | more))
        assert found.returncode == -9, f"{found.stdout}\n{found.stderr}"
        return found.stdout

    def by_hand(self, *arguments: str) -> str:
        """Starts the run by hand, which trains to its end; returns its output."""
        return train(self.folder, *FLAGS, *OUTPUT, *arguments)


def check(folder: Path, first: int, reference: str = "straight") -> None:
    """Compares the losses of all steps after ``first`` with those of an undisturbed run."""
    expected = losses(folder / reference)
    steps = range(first + 1, END + 1)
    assert losses(folder / "run") == {step: expected[step] for step in steps}


def aside(folder: Path) -> list[Path]:
    return list((folder / "run/aside").glob("*.json"))


def resumed_from(output: str) -> list[str]:
    """Returns what the starts of a run have resumed from, relative to the folder."""
    return re.findall(r"^resumed from \S*?((?:run|straight)/\S+): step", output, re.MULTILINE)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    write_corpus(folder)
    train(folder, *FLAGS, "--loop.steps", END, "--output-dir", "straight")
    return folder


@pytest.fixture
def folder(straight: Path, tmp_path: Path) -> Path:
    """The same folder, for a test."""
    for path in ("corpus", "straight", "cache"):
        shutil.copytree(straight / path, tmp_path / path)
    return tmp_path


def kills(*moments: str) -> list[Kill]:
    return [Kill(moment) for moment in moments]


PATH = "straight/checkpoints/3"
SPENT = Kill("in a save", count=2)
"""A kill after the first save is complete."""


def test_under_a_launcher_a_checkpoint_of_another_run(folder: Path) -> None:
    output = Place(folder, [*kills(*MOMENTS), SPENT]).local(1, "--resume", PATH)
    assert resumed_from(output) == [PATH] * 4 + ["run/checkpoints/4"]
    check(folder, 3)


def test_under_a_launcher_a_step(folder: Path) -> None:
    shutil.copytree(folder / "straight", folder / "run")
    output = Place(folder, [*kills(*MOMENTS), SPENT]).local(1, "--resume", "2")
    assert resumed_from(output) == ["run/checkpoints/2"] * 4 + ["run/checkpoints/3"]
    assert sorted(path.name.partition("-")[0] for path in aside(folder)) == ["3", "4", "5", "6"]
    check(folder, 0)


def test_under_a_launcher_a_new_run(folder: Path) -> None:
    output = Place(folder, [*kills("opening data", "in a save"), SPENT]).local(1)
    assert resumed_from(output) == ["run/checkpoints/1"]
    check(folder, 0)


def test_under_a_launcher_weights(folder: Path) -> None:
    weights = ("--model.init_from", PATH)
    train(folder, *FLAGS, *weights, "--loop.steps", END, "--output-dir", "from_weights")
    output = Place(folder, kills("opening data", "in a save")).local(1, *weights)
    assert resumed_from(output) == []
    assert losses(folder / "from_weights")[1] < losses(folder / "straight")[1]
    check(folder, 0, "from_weights")


def test_two_processes_with_a_checkpoint_of_another_run(folder: Path) -> None:
    cells = [Kill("rendezvous", 1), Kill("opening data", 0), Kill("in a save", 0)]
    output = Place(folder, cells).local(2, "--resume", PATH)
    assert "process 1 ended with 137 (SIGKILL)" in output
    assert resumed_from(output) == [PATH] * 2
    check(folder, 3)


def test_two_processes_with_a_step(folder: Path) -> None:
    shutil.copytree(folder / "straight", folder / "run")
    output = Place(folder, [Kill("rendezvous", 1), Kill("compilation", 1)]).local(
        2, "--resume", "2"
    )
    assert resumed_from(output) == ["run/checkpoints/2"] * 2
    check(folder, 0)


def test_the_other_runs_checkpoint_is_gone_when_the_run_has_its_own(folder: Path) -> None:
    """The other run continues meanwhile, and keeps only its newest."""
    place = Place(folder, [SPENT])
    place.kill("--resume", PATH)
    (folder / f"{PATH}.json").unlink()
    output = place.local(1, "--resume", PATH, "--again")
    assert resumed_from(output) == ["run/checkpoints/4"]
    check(folder, 3)


def test_by_hand_a_checkpoint_of_another_run(folder: Path) -> None:
    place = Place(folder, kills("opening data"))
    place.kill("--resume", PATH)
    for flags in ((), ("--resume", "straight/checkpoints/2")):
        refused = run(folder, *FLAGS, *OUTPUT, *flags)
        assert refused.returncode == 2, refused.stdout
        assert "continue" in refused.stderr
    assert resumed_from(place.by_hand("--resume", "latest")) == [PATH]
    check(folder, 3)


def test_by_hand_the_same_path_again(folder: Path) -> None:
    place = Place(folder, [Kill("compilation"), SPENT])
    for _ in range(2):
        place.kill("--resume", PATH)
    output = place.by_hand("--resume", PATH)
    assert f"--resume {PATH}: {folder}/run continues with its own checkpoints" in output
    assert resumed_from(output) == ["run/checkpoints/4"]
    check(folder, 3)


def test_by_hand_a_step(folder: Path) -> None:
    shutil.copytree(folder / "straight", folder / "run")
    place = Place(folder, [Kill("compilation"), SPENT])
    for resume in ("2", "latest"):
        assert resumed_from(place.kill("--resume", resume)) == ["run/checkpoints/2"]
    output = place.by_hand("--resume", "2")
    assert "--resume 2: going back to step 2 again" in output
    assert resumed_from(output) == ["run/checkpoints/2"]
    check(folder, 0)


def test_by_hand_a_new_run(folder: Path) -> None:
    place = Place(folder, kills("before a save"))
    place.kill()
    assert resumed_from(place.by_hand()) == []
    check(folder, 0)


def test_a_process_that_is_late(folder: Path) -> None:
    """The first start ends with 75, and has recorded nothing."""
    place = Place(folder, [Kill("rendezvous", 1, number=signal.SIGSTOP)])
    output = place.local(2, "--resume", PATH, JAXTRAIN_CONNECT_S="12", SAVE_S="1")
    assert "ended with 75: restart 1 of at most 9 without a new checkpoint (newest: none)" in output
    assert resumed_from(output) == [PATH]
    check(folder, 3)


def test_a_pod_that_is_created_again(folder: Path) -> None:
    """Kubernetes tells it nothing, but the name of the JobSet."""
    shutil.copytree(folder / "straight", folder / "run")
    place = Place(folder, [Kill("compilation"), SPENT])
    outputs = []
    for _ in range(3):
        found = place.launch("pod.sh", *FLAGS, *OUTPUT, "--resume", "2", JOBSET_UID="12-ab")
        outputs += resumed_from(found.stdout)
    assert found.returncode == 0, found.stdout
    assert outputs == ["run/checkpoints/2"] * 2 + ["run/checkpoints/3"]
    check(folder, 0)


def test_a_jobset_restarts_its_pods(folder: Path) -> None:
    shutil.copytree(folder / "straight", folder / "run")
    place = Place(folder, kills("rendezvous", "restore"))
    for number in range(3):
        found = place.launch(
            *("pod.sh", *FLAGS, *OUTPUT, "--resume", "2"),
            JOBSET_UID="12-ab",
            RESTARTS=str(number),
        )
    assert found.returncode == 0, found.stdout
    assert resumed_from(found.stdout) == ["run/checkpoints/2"]
    check(folder, 0)
