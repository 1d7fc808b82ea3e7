"""A video run with all losses: it is killed, resumes, and gives the same result."""

from pathlib import Path

import numpy as np
import pytest
from data.video import sample_videos
from models.reconstruction import lpips_weights
from models.video_ae import small_autoencoder
from program import arrays, kill_and_resume, records, train

from jaxtrain.interop import weights

pytestmark = pytest.mark.long

CLIPS = (
    *("--config", "demo", "--data.path", "videos", "--data.workers", 0, "--data.windows", "fixed"),
    *("--data.batch_size", 2, "--model.frames", 8),
    *("--model.height", 32, "--model.width", 32),
    *("--model.latent_channels", 4, "--model.encoder_width", 8),
    *("--model.decoder_widths", 8, 8, 8, 8),
    # Not demo's values, so that a change of them does not change the recorded losses.
    *("--model.init", "random", "--optim.muon", "None", "--optim.peak_lr", 3e-3),
)
LOSSES = (
    *CLIPS,
    *("--model.teacher.encoder_weight", 0.1),
    *("--model.perceptual.weights", "lpips.safetensors"),
    *("--model.adversary.replay", 8, "--model.adversary.crop", 16),
    *("--optim.average.rule", "ema", "--optim.average.decay", 0.9),
    *("--loop.steps", 12, "--loop.log_every", 1, "--loop.eval_every", 12),
    *("--loop.eval_examples", 4, "--checkpoint.every", 4, "--checkpoint.keep", 9),
    *("--checkpoint.best_metric", "val/lpips"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, a teacher's latents, LPIPS weights, and an uninterrupted run."""
    directory = tmp_path_factory.mktemp("losses")
    for number in range(6):
        sample_videos.write(directory / f"videos/{number}.mp4", 20 + number)
    lpips_weights.write(directory / "lpips.safetensors")
    small_autoencoder.save(directory / "teacher.safetensors", frames=8, height=32, width=32)
    train(directory, "prepare", "latents", *CLIPS, "--teacher", "teacher.safetensors")
    train(directory, *LOSSES, "--output-dir", "straight")
    return directory


def test_the_loss_is_the_weighted_sum_of_its_terms(place: Path) -> None:
    """It includes the discriminator's loss, which affects only the discriminator's parameters."""
    weights_of = {
        "reconstruction_loss": 20.0,
        "encoder_loss": 0.1,
        "perceptual_loss": 0.1,
        "adversary_loss": 0.5,
        "discriminator_loss": 1.0,
    }
    found = records(place / "straight")
    for step in range(1, 13):
        terms = {name: found[step][f"train/{name}"] for name in weights_of}
        total = sum(weights_of[name] * term for name, term in terms.items())
        assert found[step]["train/loss"] == pytest.approx(total, rel=1e-5), step


def test_losses_begin_at_known_values_and_fall(place: Path) -> None:
    """The values of the first step are fixed, so that no term changes unnoticed."""
    found = records(place / "straight")
    recorded = {
        "reconstruction_loss": 0.022568,
        "encoder_loss": 0.29856,
        "perceptual_loss": 1.4765,
        "adversary_loss": 0.85966,
        "discriminator_loss": 1.5877,
    }
    for name, value in recorded.items():
        assert found[1][f"train/{name}"] == pytest.approx(value, rel=0.005), name
    # Clips differ between steps: compare means of three. Measured: 0.71 and 0.72.
    for name in ("reconstruction_loss", "perceptual_loss"):
        first, last = (
            sum(found[step][f"train/{name}"] for step in steps) / 3
            for steps in ((1, 2, 3), (10, 11, 12))
        )
        assert last <= 0.8 * first, name
    for name in ("val/psnr", "val/ssim", "val/lpips"):
        assert np.isfinite(found[12][name]), name


def test_a_killed_run_resumes_bit_for_bit(place: Path) -> None:
    """This includes replay, batch norms, the EMA and the discriminator's optimizer."""
    straight = kill_and_resume(place, *LOSSES)
    assert {"params", "extras", "opt"} <= {name.partition(".")[0] for name in straight}


def test_export_and_evaluate_read_its_checkpoints(place: Path) -> None:
    """The exported weights are the EMA, without the discriminator."""
    said = train(place, "export", "straight", "out.safetensors")
    found = weights.load(place / "out.safetensors")
    assert f"{sum(array.size for array in found.params.values()):,} parameters" in said
    whole = arrays(place / "straight")
    for name, array in found.params.items():
        (average,) = (whole[one] for one in whole if one.endswith(f"average.{name}"))
        np.testing.assert_array_equal(array, average, err_msg=name)
    size = ("--frames", 8, "--height", 32, "--width", 32, "--lpips", "lpips.safetensors")
    said = train(place, "evaluate", "straight", "out.safetensors", "--data", "videos", *size)
    assert "lpips" in said
