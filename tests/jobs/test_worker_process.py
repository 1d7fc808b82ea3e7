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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("terminated unexpectedly with exit code -9. Search", "(SIGKILL): if memory was short"),
        ("terminated unexpectedly with exit code -7. Search", "(SIGBUS): give /dev/shm more space"),
        ("terminated unexpectedly with exit code -35. Search", "(signal 35): "),
        ("terminated unexpectedly with exit code 1. Search", ""),  # its traceback is printed
        ("a bug of the data set", ""),
    ],
)
def test_a_signal_that_killed_a_worker_is_named(text: str, words: str) -> None:
    why = worker_process.why_lost(RuntimeError(text), 4)
    assert bool(why) == bool(words)
    assert words in why
