"""The chapter of benchmarks/gpu that compares with PyTorch, at tiny sizes on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAPTER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "b_beside_torch.py"


@pytest.mark.timeout(1200)
def test_the_chapter_compares_three_steps(tmp_path: Path) -> None:
    folders = ("--folder", str(tmp_path / "made"), "--work", str(tmp_path / "work"))
    command = [sys.executable, str(CHAPTER), "--tiny", "--minutes", "15", *folders]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # PyTorch's wait for each other where busy
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, _, *rows = (tmp_path / "made" / "rows.md").read_text().splitlines()
    assert [row.split(" | ")[3].split()[0] for row in rows] == ["gpt", "mlm", "video_ae"]
    assert all("the losses differ by at most" in row for row in rows)
