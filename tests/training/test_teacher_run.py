"""A video run with Wan's autoencoder as a teacher inside the step, on random clips; it resumes."""

from pathlib import Path

import numpy as np
import pytest
import sample_videos
import wan_weights
from program import arrays, losses, records, run, train

pytestmark = [pytest.mark.slow, pytest.mark.long]

RUN = (
    *("--config", "demo", "--data.path", "videos", "--data.workers", 0, "--data.batch_size", 2),
    *("--model.frames", 12, "--model.height", 32, "--model.width", 32),
    *("--model.latent_channels", 4, "--model.encoder_width", 8),
    *("--model.decoder_widths", 8, 8, 8, 8, "--model.teacher.network", "wan2.1"),
    *("--model.teacher.width", 8, "--model.teacher.decode", True),
    *("--loop.log_every", 1, "--loop.eval_every", 4, "--loop.eval_examples", 2),
    *("--checkpoint.every", 2, "--checkpoint.keep", 9),
)
TAUGHT = (*RUN, "--model.teacher.weights", "vae")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, two teachers, and an uninterrupted run of four steps."""
    directory = tmp_path_factory.mktemp("taught")
    for number in range(4):
        sample_videos.write(directory / f"videos/{number}.mp4", sample_videos.busy(30, number))
    wan_weights.write(directory / "vae", wan_weights.NARROW["wan2.1"])
    wan_weights.write(directory / "other", wan_weights.NARROW["wan2.1"], seed=1)
    train(directory, *TAUGHT, "--loop.steps", 4, "--output-dir", "straight")
    return directory


def test_it_teaches_random_clips_and_is_not_trained(place: Path) -> None:
    found = records(place / "straight")
    assert found[4]["train/encoder_loss"] > 0
    assert np.isfinite(found[4]["val/encoder_loss"])
    saved = arrays(place / "straight")
    assert not [name for name in saved if "teacher_network" in name]
    text = train(place, "export", "straight", "out.safetensors")
    assert f"{sum(array.size for n, array in saved.items() if n[:7] == 'params.'):,} param" in text
    size = ("--frames", 12, "--height", 32, "--width", 32)
    assert "psnr" in train(place, "evaluate", "straight", "--data", "videos", *size)


def test_a_resumed_run_requires_the_same_teacher(place: Path) -> None:
    more = ("--loop.steps", 4, "--resume", "straight/checkpoints/2", "--output-dir", "resumed")
    other = run(place, *RUN, "--model.teacher.weights", "other", *more)
    assert other.returncode == 2
    assert "was trained with other values of teacher_network (" in other.stderr + other.stdout
    gone = run(place, *RUN, *more)
    assert gone.returncode == 2
    assert "model.teacher.weights is not set" in gone.stderr + gone.stdout
    train(place, *TAUGHT, *more)
    straight = losses(place / "straight")
    assert losses(place / "resumed") == {step: straight[step] for step in (3, 4)}
    two = ("--simulate-devices", 2, "--mesh.fsdp", 2, "--mesh.shard", "params")
    train(place, *TAUGHT, *more[:-1], "two", *two)
    assert losses(place / "two") == pytest.approx(losses(place / "resumed"), rel=1e-5)
