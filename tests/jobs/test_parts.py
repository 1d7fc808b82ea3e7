"""A SLURM array of four tasks prepares clips in parts; one is killed, and submitted again."""

import signal
import subprocess
from pathlib import Path

import pytest
from data.video import sample_videos as sample
from launch.hosts import wait_for
from program import started

VIDEOS, PARTS = 24, 4


def start(videos: Path, out: Path, index: int | None = None) -> subprocess.Popen[str]:
    size = ("--height", 48, "--width", 48, "--frames", 24, "--min-frames", 8, "--min-side", 16)
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": str(PARTS)}
    task = {} if index is None else array | {"SLURM_ARRAY_TASK_ID": str(index + 1)}
    words = ("prepare", "clips", videos, out, *size, "--keep-cuts", "--workers", 1)
    return started(out.parent, *words, **task)


def output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    return text


def outputs_of(out: Path) -> dict[str, bytes]:
    """The outputs, and the records of their inputs."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and (".jobs" not in path.parts or "records" in path.parts)
    }


@pytest.mark.long
def test_an_array_of_tasks_makes_what_one_process_makes(tmp_path: Path) -> None:
    videos, alone, out = tmp_path / "videos", tmp_path / "alone", tmp_path / "parts"
    for number in range(VIDEOS):
        frames = sample.busy(44, number, height=128, width=128)  # large: each has its own tar
        sample.write(videos / f"{number}.mkv", frames, codec="ffv1", pix_fmt="bgr0")
    output(start(videos, alone))
    victim = start(videos, out, 2)
    wait_for(lambda: len(list(out.rglob("records/*/*.json"))) >= 2, "the first files", seconds=120)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    tasks = [start(videos, out, index) for index in (0, 1, 3)]
    assert all("SLURM: doing part " in output(task) for task in tasks)
    assert outputs_of(out) != outputs_of(alone), "the task was killed too late"
    output(start(videos, out, 2))
    assert outputs_of(out) == outputs_of(alone)
