"""The short version: a few selected faults, and an exact comparison."""

import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the undisturbed run, which both tests share."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(
    ("processes", "faults"),
    [
        (1, ["kill-all@save", "damage-rest@evaluation", "full@steps"]),
        (2, ["kill-one@evaluation:1"]),
    ],
    ids=["one process", "two processes"],
)
def test_nothing_is_lost(processes: int, faults: list[str], work: Path) -> None:
    """With two devices, one and two processes compute the same bits: sums have two terms."""
    flags = [word for fault in faults for word in ("--fault", fault)]
    flags += ["--processes", str(processes), "--against", "1"]
    found = subprocess.run(
        [sys.executable, str(HARNESS), "--work", str(work), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    assert f"{len(faults)} faults in 1 runs: 0 examples lost, 0 repeated, 0 manual" in found.stdout
