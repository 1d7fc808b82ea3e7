"""``jaxtrain evaluate`` on videos: correct metrics, and all models on the same clips."""

import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from data.video import sample_videos
from models.reconstruction import lpips_weights
from models.video_ae import small_autoencoder
from PIL import Image

from jaxtrain import main
from jaxtrain.cli import command_line, evaluate
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.evaluation import evaluation_clips, i3d, protocols
from jaxtrain.interop import weights
from jaxtrain.models.reconstruction import quality

METRICS = ("psnr", "ssim", "temporal_consistency", "flicker_ratio")
SIZE = ["--frames", "8", "--height", "16", "--width", "24"]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three weights files and four videos."""
    folder = tmp_path_factory.mktemp("place")
    for number in range(2):
        small_autoencoder.save(folder / f"{number}.safetensors", seed=number)
    small_autoencoder.save(folder / "2.safetensors", trim="odd_latents")
    for number, frames in enumerate((8, 12, 20, 30)):
        images = sample_videos.busy(frames, seed=number, height=20, width=30)
        sample_videos.write(folder / "videos" / f"{number}.mp4", images)
    return folder


def run(*arguments: Any) -> int:
    return main.main(["evaluate", *map(str, arguments)])


def by_hand(video_THW3: np.ndarray, other_THW3: np.ndarray) -> dict[str, float]:
    """Computes the formulas again, frame by frame, in float64."""
    video, other = video_THW3.astype(np.float64), other_THW3.astype(np.float64)
    psnr = [10 * np.log10(1 / np.mean((a - b) ** 2)) for a, b in zip(video, other, strict=True)]
    changes = [
        np.array([np.mean(np.abs(x[t + 1] - x[t])) for t in range(len(x) - 1)])
        for x in (video, other)
    ]
    return {
        "psnr": float(np.mean(psnr)),
        "temporal_consistency": float(1 - np.mean(np.abs(changes[0] - changes[1]))),
        "flicker_ratio": float(np.std(changes[1]) / np.std(changes[0])),
    }


def test_metrics_match_their_formulas(place: Path, tmp_path: Path) -> None:
    sources = [place / "0.safetensors", place / "1.safetensors"]
    report = tmp_path / "report.json"
    assert run(*sources, "--data", place / "videos", *SIZE, "--json", report) == 0
    found = json.loads(report.read_text())
    assert found["compared_frames"] == 5  # 8 frames, 2 latents, 8 decoded, 3 of them dropped
    assert [one["video"] for one in found["clips"]] == ["0.mp4", "1.mp4", "2.mp4", "3.mp4"]
    assert set(found["metrics"]) == set(METRICS)
    path = str(place / "videos" / "3.mp4")
    video = sample_videos.cropped(
        sample_videos.decoded(path, range(11, 19)),  # the middle 8 of 30
        height=16,
        width=24,
        scale=1.0,
        across=0.5,
        down=0.5,
        mirror=False,
    )
    for source, values in zip(sources, found["clips"][3]["values"], strict=True):
        module = small_autoencoder.module(source)
        decoded = small_autoencoder.through(module, jnp.asarray(video[None], jnp.float32) / 255)
        other = np.clip(np.asarray(decoded)[0], 0, 1)
        expected = by_hand(video[:5] / 255, other)
        for name, value in expected.items():
            assert values[name] == pytest.approx(value, rel=2e-4), name
        ssim = quality.ssim(jnp.asarray(video[None, :5] / 255, jnp.float32), other[None])
        assert values["ssim"] == pytest.approx(float(ssim.mean()), rel=1e-4)
    for name in METRICS:
        table = np.array([[one[name] for one in clip["values"]] for clip in found["clips"]])
        for column, estimate in zip(table.T, found["metrics"][name]["estimates"], strict=True):
            assert estimate["mean"] == pytest.approx(column.mean())
        gap = found["metrics"][name]["differences"]["B - A"]
        assert gap["mean"] == pytest.approx((table[:, 1] - table[:, 0]).mean())


def test_the_worst_clips_are_drawn(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [place / "0.safetensors", place / "1.safetensors"]
    report, worst = tmp_path / "report.json", tmp_path / "new/worst"
    arguments = [*sources, "--data", place / "videos", *SIZE]
    assert run(*arguments, "--json", report, "--worst", worst) == 0
    clips = json.loads(report.read_text())["clips"]
    psnr = {clip["video"]: np.mean([one["psnr"] for one in clip["values"]]) for clip in clips}
    ranked = sorted(psnr, key=lambda name: psnr[name])[:3]
    names = [f"{n}-{Path(video).stem}.png" for n, video in enumerate(ranked, start=1)]
    assert sorted(path.name for path in worst.iterdir()) == names
    printed = capsys.readouterr().out
    assert all(f"wrote {worst / name}" in printed for name in names)
    image = np.asarray(Image.open(worst / names[0]))
    assert min(image.shape[0] / 16, image.shape[1] / 24) > 5 * 6  # 5x5 frames, enlarged 6 times
    assert image[: image.shape[0] // 3, : image.shape[1] // 3].std() > 10
    for folder, message in (
        (report, "is a file: pass a folder"),
        (report / "worst", ": Not a directory: use another folder"),
        (worst, f"already has files, such as {names[0]}: use a new or an empty folder"),
    ):
        assert run(*arguments, "--worst", folder) == 2
        printed = capsys.readouterr()
        assert f"--worst {folder}" in printed.err
        assert message in printed.err
        assert "measured" not in printed.out


def test_a_student_and_its_teacher(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, teacher = place / "0.safetensors", place / "1.safetensors"
    result, page, worst = (tmp_path / name for name in ("result.json", "page.html", "worst"))
    common = ["--data", place / "videos", "--height", "32", "--width", "24", "--teacher", teacher]
    files = ["--json", result, "--report", page, "--worst", worst]
    assert run(student, *common, "--clips", "2", *files) == 0
    printed = capsys.readouterr().out
    found = json.loads(result.read_text())
    assert found["frames"] == 16
    psnr = [one["mean"] for one in found["metrics"]["psnr"]["estimates"]]
    kept = f"{psnr[3] / psnr[0]:.1%} of the teacher's PSNR ({psnr[3]:.2f} of {psnr[0]:.2f} dB)"
    assert kept in printed
    assert kept.replace("'", "&#x27;") in page.read_text()
    assert page.read_text().count("data:image/png;base64,") == 2
    assert len(list(worst.iterdir())) == 2
    for name in ("psnr, frame 2 of 4 (dB)", "noise 0.1: ssim to teacher", "latents: cosine"):
        assert name in printed, name
    assert len(found["latents"]["slope"]) == 4
    assert len(found["clips"][0]["alone"]) == 2
    for arguments, message in (
        ([student, teacher, *common], "2 models given; pass one student"),
        ([student, *common, "--i3d", "i3d.pt"], "--i3d i3d.pt does not work with --teacher"),
        ([student, *common[:-2], "--report", page], "requires --teacher"),
        ([student, *common[:-1], tmp_path / "gone"], "gone: no such file or folder; pass a"),
        ([place / "2.safetensors", *common, "--frames", 8], "use --frames 9"),
    ):
        with pytest.raises(InputError, match=message):
            command_line.run("evaluate", [str(one) for one in arguments])


def test_measurements_are_written_before_images(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate, "_drawn", full)
    report = tmp_path / "report.json"
    arguments = [place / "0.safetensors", "--data", place / "videos", *SIZE]
    assert run(*arguments, "--json", report, "--worst", tmp_path / "worst") != 0
    assert json.loads(report.read_text())["clips"]


def test_broken_and_short_videos_are_skipped_and_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    sample_videos.write(folder / "a.mp4", sample_videos.busy(12))
    sample_videos.write(folder / "short.mp4", 3)
    sample_videos.garble(sample_videos.write(folder / "garbled.mp4", sample_videos.busy(30)))
    (folder / "text.mp4").write_text("no video")
    assert run(place / "0.safetensors", "--data", folder, *SIZE) == 0
    lines = capsys.readouterr().out.splitlines()
    skipped = " ".join(line for line in lines if line.startswith("skipped"))
    assert "short.mp4: is too short: it has 3 frames in a row, a clip needs 8" in skipped
    assert "garbled.mp4" in skipped
    assert "text.mp4: cannot be read" in skipped
    assert any(line.startswith("measured on 1 video (1 clip of") for line in lines)
    (folder / "a.mp4").unlink()
    with pytest.raises(InputError, match="none of 3 videos can be used"):
        command_line.run("evaluate", [str(place / "0.safetensors"), "--data", str(folder), *SIZE])


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (np.nan, (": decoder.22.bias contains NaN or Inf (1 of 3 numbers)",)),
        (np.float32(1e30), (" reconstructs ", "with NaN/Inf")),  # its sums overflow
    ],
)
def test_broken_weights_are_named(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    words: tuple[str, ...],
) -> None:
    """They are an error, not a reason to drop clips."""
    model = small_autoencoder.config()
    params = small_autoencoder.params(model)
    if np.isnan(factor):
        params["decoder.tail.bias"][0] = factor
    else:
        params = {name: array * factor for name, array in params.items()}
    broken = tmp_path / "broken.safetensors"
    weights.save(broken, model, params)
    assert run(place / "0.safetensors", broken, "--data", place / "videos", *SIZE) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in (str(broken), *words))


def test_wrong_use(place: Path, tmp_path: Path) -> None:
    source, data = place / "0.safetensors", ["--data", place / "videos"]
    for arguments, message in (
        ([source], "missing --data PATH"),
        ([*[source] * 4, *data], "evaluate: 4 sources given; use at most 3"),
        ([source, "--data", tmp_path / "gone"], "gone: no such file or folder"),
        ([tmp_path / "gone", *data, *SIZE], "gone does not exist"),
        # Before the model is read.
        ([tmp_path / "a", "--data", tmp_path / "b"], "--data .*/b: no such file or folder; pass a"),
        ([source, *data, *SIZE, "--width", 20], "must be multiples of 8, for"),
        ([source, *data, *SIZE, "--height", 8], "use at least 16 for each"),
        ([source, *data, "--frames", 0], "--frames 0: use at least 1"),
        ([source, *data, *SIZE, "--frames", 99], "none of 4 videos can be used"),
    ):
        with pytest.raises(InputError, match=message):
            command_line.run("evaluate", [str(one) for one in arguments])
    assert run("--help") == 0


def test_lpips_that_cannot_be_measured_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = lpips_weights.write(tmp_path / "lpips.safetensors")
    arguments = [place / "0.safetensors", "--data", place / "videos", *SIZE, "--lpips", weights]
    assert run(*arguments) == 2
    assert "LPIPS needs 32 pixels" in capsys.readouterr().err
    assert run(*arguments[:-1], tmp_path / "gone.safetensors") == 2
    assert "gone.safetensors does not exist" in capsys.readouterr().err


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_videos.films(tmp_path_factory.mktemp("films"))


@pytest.mark.slow
def test_a_protocol_prints_the_published_results_and_rfvd(
    films: Path,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = dataclasses.replace(protocols.PROTOCOLS["mcl-jcv"], height=32, width=32)
    monkeypatch.setitem(protocols.PROTOCOLS, "mcl-jcv", small)
    # The network itself is compared with PyTorch elsewhere.
    mixing = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    monkeypatch.setattr(i3d, "measure", lambda path: lambda video: video.mean((1, 2, 3)) @ mixing)
    report = tmp_path / "report.json"
    arguments = [place / "0.safetensors", "--data", films, "--protocol", "mcl-jcv"]
    assert run(*arguments, "--i3d", tmp_path / "i3d.pt", "--json", report) == 0
    said = capsys.readouterr().out
    assert "measured on 3 videos (5 clips of 17 frames, 17 of them compared, 32x32" in said
    assert "VidTok 4x8x8, 16 channels" in said
    assert re.search(r"35\.04 +0\.942 +0\.047 +78\.9", said)
    assert "lpips/vgg" in said
    assert "source: https://github.com/microsoft/VidTok" in said
    found = json.loads(report.read_text())
    assert f"rfvd                  A  {found['rfvd'][0]:.2f}" in re.sub(r"A +", "A  ", said)
    assert found["rfvd"][0] > 0
    assert found["protocol"]["fps"] == 30


def test_without_a_readable_clip_there_is_no_result(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(clip: evaluation_clips.Clip) -> np.ndarray:
        raise BadExample(clip.frame_range.path, "No such file or directory")

    monkeypatch.setattr(evaluation_clips.Clip, "read", gone)
    assert run(place / "0.safetensors", "--data", place / "videos", *SIZE) == 2
    printed = capsys.readouterr()
    assert f"skipped: {place}/videos/0.mp4: No such file or directory" in printed.out
    assert "none of the clips can be read; see the messages above" in printed.err


def test_a_wrong_source_or_text_is_one_line(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is the eve of the day.\nDo you know?\n" * 100)
    assert run(tmp_path / "nothing", "--data", text) == 2
    assert "nothing does not exist; pass a checkpoint" in capsys.readouterr().err
    assert run(place / "0.safetensors", "--data", text) == 2
    printed = capsys.readouterr().err
    assert "is not a list of videos: none of its 200 lines" in printed
    assert printed.count("\n") == 1


def test_the_image_of_a_video_with_the_longest_name_is_written(tmp_path: Path) -> None:
    clip = mock.Mock(video=f"{'é' * 125}.mp4", place=0.5, image=np.zeros((8, 8, 3), np.uint8))
    clip.rows = ["original"]
    (path,) = evaluate._write(evaluate._drawn([clip]), tmp_path)
    assert path.name.startswith("1-éé")
    assert path.is_file()


def test_what_trained_is_not_measured_as_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other videos validate, all of ``data.path`` trained, of whatever names."""
    data = {"path": str(tmp_path), "val_path": "val"}
    monkeypatch.setattr(weights, "run_meta", lambda source: {"config": {"data": data}})
    assert evaluate._held_out([Path("run")], str(tmp_path / "others")) is None
    with pytest.raises(InputError, match="validates on other videos: pass --data val, or"):
        evaluate._held_out([Path("run")], str(tmp_path))
