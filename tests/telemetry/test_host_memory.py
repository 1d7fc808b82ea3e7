"""Memory of a process and its workers."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.telemetry import host_memory

MIB = 2**20

HOLD = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
    own = bytearray(int(sys.argv[2]))
    own[::4096] = b"x" * len(own[::4096])
    sum(shared[::4096])
    print(flush=True)
    sys.stdin.read()
"""


def added_by_a_worker(file: Path, own: int) -> int:
    """Bytes that a worker adds which holds ``own`` bytes, and a file that this process holds."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as shared:
        sum(shared[::4096])
        before = host_memory.proportional_bytes()
        command = [sys.executable, "-S", "-c", HOLD, str(file), str(own)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            assert worker.pid in list(host_memory.family(os.getpid()))
            held = host_memory.proportional_bytes()
            worker.communicate()
    assert before is not None
    assert held is not None
    return held - before


def said_by(folder: Path, pid: int, pss: int, children: str = "") -> None:
    (folder / f"{pid}/task/{pid}").mkdir(parents=True)
    (folder / f"{pid}/task/{pid}/children").write_text(children)
    (folder / f"{pid}/smaps_rollup").write_text(f"Rss: 900 kB\nPss: {pss} kB\nPss_Dirty: 7 kB\n")


@pytest.mark.parametrize(("shared", "own"), [(1, 40), (100, 1)])
def test_a_worker_counts_and_what_it_shares_counts_once(
    tmp_path: Path, shared: int, own: int
) -> None:
    file = tmp_path / "shared"
    file.write_bytes(b"x" * shared * MIB)
    added = added_by_a_worker(file, own * MIB)
    assert own * MIB < added < (own + 30) * MIB  # an interpreter takes about ten


def test_all_descendants_are_added_up_and_those_that_ended_are_not(tmp_path: Path) -> None:
    said_by(tmp_path, 1, 100, "2 3")
    said_by(tmp_path, 2, 20, "4")
    said_by(tmp_path, 4, 3)
    assert host_memory.proportional_bytes(1, tmp_path) == 123 * 1024


@pytest.mark.parametrize("missing", ["smaps_rollup", "task/1/children"])
def test_a_kernel_that_does_not_tell_gives_no_value(tmp_path: Path, missing: str) -> None:
    said_by(tmp_path, 1, 100)
    (tmp_path / "1" / missing).unlink()
    assert host_memory.proportional_bytes(1, tmp_path) is None
    assert host_memory.proportional_bytes(1, tmp_path / "nowhere") is None


def test_shared_memory_is_what_the_file_system_says(tmp_path: Path) -> None:
    found = host_memory.shared(tmp_path)
    assert found is not None
    assert 0 < found.used < found.size
    assert host_memory.shared(tmp_path / "nowhere") is None
