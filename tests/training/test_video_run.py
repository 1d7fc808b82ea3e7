"""A complete video run, from clips to the run directory."""

import json
import re
from pathlib import Path

import av
import numpy as np
import program
import pytest
from data.video import sample_videos
from PIL import Image
from program import records, train
from telemetry.tensorboard_events import scalars

pytestmark = pytest.mark.slow

SMALL = (
    *("--config", "demo", "--model.frames", 4, "--model.height", 16, "--model.width", 16),
    *("--model.encoder_width", 8, "--model.decoder_widths", 16, 8, 8, 8),
    *("--model.init", "random", "--optim.muon", "None", "--optim.peak_lr", 3e-3),
    *("--loop.steps", 60, "--loop.log_every", 20, "--loop.eval_every", 30),
    *("--checkpoint.every", 30, "--checkpoint.keep", 1),
    *("--data.path", "videos", "--data.max_bad_share", 0.5, "--data.batch_size", 4),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run on six good videos, one that is not a video, and one with noise in it."""
    directory = tmp_path_factory.mktemp("video")
    for number in range(6):
        bright = [
            sample_videos.numbered(n) + np.uint8(90 - 12 * number) for n in range(20 + number)
        ]
        sample_videos.write(directory / f"videos/good{number}.mp4", bright)
    (directory / "videos/none.mp4").write_text("no video")
    noisy = sample_videos.write(directory / "videos/noisy.mp4", sample_videos.busy(30), g="30")
    sample_videos.garble(noisy)
    said = train(directory, *SMALL, "--output-dir", "run")
    (directory / "said.txt").write_text(said)
    return directory


def test_the_console_reports_the_run_and_the_next_commands(place: Path) -> None:
    said = (place / "said.txt").read_text()
    for part in (
        "8 videos (7 good)",
        "step 60/60 | loss",
        "step 60/60 | validation",
        "val/psnr ",
        "run directory: ",
        f"reconstruct run {place / 'videos'}/",
        "--output-dir",
        "--resume latest --loop.steps 120",
    ):
        assert part in said
    log = (place / "run/log.txt").read_text()
    assert "step 60/60 | loss" in log


def test_the_run_directory_has_its_files_and_metrics(place: Path) -> None:
    run = place / "run"
    assert json.loads((run / "config.json").read_text())["model"]["frames"] == 4
    assert [path.name for path in (run / "checkpoints").glob("*.json")] == ["60.json"]
    assert len(list((run / "best").iterdir())) == 1
    found = records(run)
    assert sorted(found) == [1, 20, 30, 40, 60]
    for name in ("train/loss", "train/psnr", "train/learning_rate", "train/grad_norm"):
        assert np.isfinite(found[60][name])
    last = found[60]
    batch = json.loads((run / "config.json").read_text())["data"]["batch_size"]
    assert last["train/samples_per_second"] == pytest.approx(batch * last["train/steps_per_second"])
    assert 0 <= last["train/data_wait_fraction"] < 1
    for name in ("val/loss", "val/psnr", "val/psnr_std", "val/ssim", "val/ssim_std"):
        assert np.isfinite(found[60][name])


def test_the_loss_falls(place: Path) -> None:
    """The first loss is fixed: another initialization, other data or a missing term changes it."""
    found = records(place / "run")
    assert found[1]["train/loss"] == pytest.approx(0.4400, rel=0.005)
    # A training loss is of four clips, whose brightness differs more than three steps change.
    logged = [found[step]["train/loss"] for step in (20, 40, 60)]
    assert np.mean(logged) <= 0.75 * found[1]["train/loss"]
    assert found[60]["val/loss"] <= 0.6 * found[1]["train/loss"]
    assert found[60]["val/loss"] < found[30]["val/loss"]


def test_the_sample_image_has_three_labeled_rows(place: Path) -> None:
    """They are the original, the reconstruction and its error; none has only one color."""
    image = np.asarray(Image.open(place / "run/samples/reconstruction_60.png"), np.float64)
    row, margin = 16 * 8, 7  # frames of 16x16 pixels are enlarged
    bottom = len(image) - margin - (len(image) - margin) % 2
    top = bottom - (bottom // row) * row
    assert 20 < top < 60  # the title
    for number, least in enumerate((10, 1, 1)):
        part = image[top + row * number : top + row * (number + 1)]
        assert part[8:-8, -100:-20].std() > least
        assert part[:, :90].max() > 150  # the label
    with av.open(str(place / "run/samples/clip_60.mp4")) as clip:
        (height,) = {frame.height for frame in clip.decode(video=0)}
    assert height > 3 * row


def test_tensorboard_has_the_same_values(place: Path) -> None:
    found = {(step, tag): value for step, tag, value in scalars(place / "run")}
    for step, record in records(place / "run").items():
        for name, value in record.items():
            if "/" in name:
                assert found[step, name] == pytest.approx(value, rel=1e-6), name


def test_broken_videos_are_reported_and_intact_parts_are_used(place: Path) -> None:
    lines = [json.loads(line) for line in (place / "run/quarantine.jsonl").read_text().splitlines()]
    bad = {Path(line["path"]).name: line for line in lines}
    assert set(bad) == {"none.mp4"}
    assert bad["none.mp4"]["found"] == "index"
    assert bad["none.mp4"]["reason"]
    said = (place / "said.txt").read_text()
    assert re.search(r"noisy\.mp4 .*: [1-9]\d* frames are lost, [1-9]\d* are used", said)


def test_evaluate_measures_only_what_the_run_has_not_trained_on(place: Path) -> None:
    """By default, if its data are the run's own."""
    flags = ("--data", "videos", "--frames", 9, "--height", 16, "--width", 16)
    said = program.run(place, "evaluate", "run", *flags, "--json", "val.json")
    assert said.returncode == 0, said.stderr
    assert "measuring only what it validates on" in said.stdout
    val = {clip["video"] for clip in json.loads((place / "val.json").read_text())["clips"]}
    validates = re.search(r"validate, by the hashes [^:]*: (.*)", (place / "said.txt").read_text())
    assert validates
    assert val == set(validates[1].split(", "))
