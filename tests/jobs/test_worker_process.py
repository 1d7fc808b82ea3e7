import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from program import environment

from jaxtrain.jobs import worker_process

PROGRAM = """
import multiprocessing
import sys

from jaxtrain.main import console


def look(_):
    import grain

    own = [(name, sys.modules.get(name) is not None) for name in ("jax", "orbax")]
    return own, grain.MapDataset.source([3, 4]).batch(2)[0].tolist()


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(look, [0])[0])
    import jax
"""


def test_workers_start_without_jax_and_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "([('jax', False), ('orbax', False)], [3, 4])\n"


def test_shared_memory_of_other_runs_stays() -> None:
    """Of another pipeline in this process, and of a run in a container with this process's id."""
    own, other = (
        SharedMemory(f"{worker_process.shared_prefix()[1:]}0", create=True, size=1)
        for _ in range(2)
    )
    try:
        worker_process.free_shared_memory(f"/{own.name[:-1]}")
        assert not Path("/dev/shm", own.name).exists()
        assert Path("/dev/shm", other.name).exists()
    finally:
        own.close()
        other.close()
        other.unlink()


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (7, "SIGBUS"), (40, "signal 40")])
def test_why_a_worker_was_lost(number: int, name: str) -> None:
    """Also by a real-time signal that Python has no name for."""
    error = RuntimeError(f"Process 1 was terminated unexpectedly with exit code -{number}")
    why = worker_process.why_lost(error, 2)
    assert why.startswith(f"one of 2 processes that load examples was killed ({name}): ")
    assert ("/dev/shm" in why) == (name == "SIGBUS")
    assert not worker_process.why_lost(RuntimeError("terminated unexpectedly with exit code 1"), 2)
