"""A video run whose losses begin later: it is killed before, resumes, and gives the same result."""

from pathlib import Path

import pytest
from data.video import sample_videos
from models.reconstruction import lpips_weights
from program import kill_and_resume, losses, records, train

pytestmark = pytest.mark.long

STAGES = (
    *("--config", "demo", "--data.path", "videos", "--data.workers", 0, "--data.batch_size", 2),
    *("--model.frames", 4, "--model.height", 48, "--model.width", 48, "--model.init", "random"),
    *("--model.latent_channels", 4, "--model.encoder_width", 8, "--model.decoder_widths"),
    *(8, 8, 8, 8, "--optim.muon", "None", "--optim.peak_lr", 1e-3, "--optim.warmup_steps", 1),
    *("--optim.warmup_fraction", "None", "--optim.schedule", "trapezoid"),
    *("--optim.warmdown_shape", "step", "--optim.warmdown_fraction", 0.3),
    *("--optim.warmdown_to", 0.1, "--optim.accumulate", 2),
    *("--model.perceptual.weights", "lpips.safetensors", "--model.perceptual.start_step", 3),
    *("--model.perceptual.ramp_steps", 4, "--model.adversary.start_step", 5),
    *("--model.adversary.replay", 4, "--model.adversary.crop", 16, "--data.crop", 32, 32),
    *("--loop.steps", 10, "--loop.log_every", 1, "--loop.eval_every", "None"),
    *("--checkpoint.every", 4, "--checkpoint.keep", 9, "--checkpoint.best_metric", "None"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, LPIPS weights, and an uninterrupted run."""
    directory = tmp_path_factory.mktemp("stages")
    for number in range(6):
        sample_videos.write(directory / f"videos/{number}.mp4", 20 + number)
    lpips_weights.write(directory / "lpips.safetensors")
    text = train(directory, *STAGES, "--output-dir", "straight")
    assert "model.perceptual begins in step 4, with all of its weight in 7" in text
    assert "model.adversary begins in step 6, with all of its weight in 6" in text
    return directory


def test_losses_begin_at_their_steps(place: Path) -> None:
    found = records(place / "straight")
    for step in range(1, 11):
        values = {name.removeprefix("train/"): value for name, value in found[step].items()}
        assert (values["perceptual_loss"] > 0) == (step > 3), step
        judged = [values[name] > 0 for name in ("adversary_loss", "discriminator_loss")]
        assert judged == [step > 5] * 2, step
        factors = {"reconstruction_loss": 20.0, "discriminator_loss": 1.0, "adversary_loss": 0.5}
        factors["perceptual_loss"] = 0.1 * min(max(0, (step - 3) / 4), 1)
        total = sum(factor * values[name] for name, factor in factors.items())
        assert values["loss"] == pytest.approx(total, rel=1e-5), step
        assert values["learning_rate"] == pytest.approx(1e-3 if step < 8 else 1e-4, rel=1e-5), step


def test_a_run_that_is_killed_before_resumes_bit_for_bit(place: Path) -> None:
    kill_and_resume(place, *STAGES)


def test_a_resumed_run_ends_with_larger_crops(place: Path) -> None:
    larger = ("--data.crop", 48, 48, "--loop.steps", 12, "--output-dir", "straight")
    text = train(place, *STAGES, *larger, "--resume", "latest")
    assert "differs from the checkpoint: data.crop" in text
    assert len(losses(place / "straight")) == 12
