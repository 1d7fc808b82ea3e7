"""A SLURM array of four tasks prepares data in parts; one is killed, and submitted again."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import sample_videos as sample
from launch.hosts import wait_for
from program import SMALL_GROUPS, TINY_VIDEO

from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.training.state import ModelDefinition

VIDEOS, PARTS = 24, 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, texts, a config, and weights of its model."""
    folder = tmp_path_factory.mktemp("inputs")
    for number in range(VIDEOS):
        images = sample.busy(40, number, height=64, width=64)
        sample.write(folder / f"videos/{number}.mp4", images)
    (folder / "texts").mkdir()
    for number in range(12):
        words = " ".join(f"word{number * 7 + n % (50 + number)}" for n in range(20_000))
        (folder / f"texts/{number}.txt").write_text(words)
    (folder / "tiny.py").write_text(TINY_VIDEO)
    tiny = video_ae.Config.tiny()
    params, _ = ModelDefinition(tiny.build).init(jax.random.key(1))
    arrays = {name: np.asarray(array) for name, array in params.items()}
    weights.save(folder / "weights.safetensors", tiny, arrays)
    return folder


def clips(inputs: Path, out: Path) -> list[object]:
    size = ("--height", 48, "--width", 48, "--frames", 24, "--min-frames", 8)
    size += ("--min-side", 16, "--keep-cuts")
    return ["prepare", "clips", inputs / "videos", out, *size, "--workers", 1]


def latents(inputs: Path, out: Path) -> list[object]:
    data = ("--config", inputs / "tiny.py", "--data.path", inputs / "videos")
    teacher = ("--teacher", inputs / "weights.safetensors", "--batch", 2)
    return ["prepare", "latents", *data, "--data.cache_dir", out, *teacher]


def tokens(inputs: Path, out: Path) -> list[object]:
    data = ("--data.path", inputs / "texts", "--data.cache_dir", out, "--model.vocab_size", 400)
    return ["prepare", "tokens", "--config", "demo_mlm", *data, "--workers", 1]


def encode(inputs: Path, out: Path) -> list[object]:
    return ["encode", inputs / "weights.safetensors", inputs / "videos", out, "--workers", 1]


Command = Callable[[Path, Path], list[object]]


def start(command: list[object], index: int | None = None) -> subprocess.Popen[str]:
    array = {} if index is None else {"SLURM_ARRAY_TASK_ID": str(index + 1)}
    if array:
        array |= {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": str(PARTS)}
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_GROUPS, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | array,
    )


def output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    return text


def made(out: Path) -> dict[str, bytes]:
    """The outputs, and the records of their inputs."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and (".jobs" not in path.parts or "records" in path.parts)
    }


@pytest.mark.long
@pytest.mark.parametrize("command", [clips, latents, tokens, encode])
def test_an_array_of_tasks_makes_what_one_process_makes(
    command: Command, inputs: Path, tmp_path: Path
) -> None:
    output(start(command(inputs, tmp_path / "alone")))
    out = tmp_path / "parts"
    victim = start(command(inputs, out), 2)
    wait_for(lambda: len(list(out.rglob("records/*/*.json"))) >= 2, "the first files", seconds=120)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    tasks = [start(command(inputs, out), index) for index in (0, 1, 3)]
    assert all("SLURM: doing part " in output(task) for task in tasks)
    assert made(out) != made(tmp_path / "alone"), "the task was killed too late"
    output(start(command(inputs, out), 2))
    assert made(out) == made(tmp_path / "alone")
