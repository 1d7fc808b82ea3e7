"""The short version: a few faults, aimed, each followed by a comparison of every digit."""

import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both runs find the one that nothing disturbs."""
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
    """Two devices sum two numbers: in one process or in two, every digit is the same."""
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
