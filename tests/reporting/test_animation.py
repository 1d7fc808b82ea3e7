"""The animated image of a run."""

import io
from pathlib import Path

import numpy as np
import pytest
import written_run
from PIL import Image

from jaxtrain import main
from jaxtrain.reporting import animation
from jaxtrain.telemetry import images


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written_run.write(tmp_path / "run")


def animate(run: Path, out: Path) -> int:
    return main.main(["report", str(run), "--animation", str(out)])


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_clips_of_all_steps_follow_each_other(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "samples").mkdir()
    for step in (5, 10, 100):  # brighter with each step
        clip = np.full((2, 32, 48, 3), step * 2, np.uint8)
        clip[1, :16] = 255
        made = images.encode("c", clip)
        (run / "samples" / f"clip_{step}.mp4").write_bytes(made.file)
        (run / "samples" / f"reconstruction_{step}.png").write_bytes(made.shown)
    out = run.parent / name
    assert animate(run, out) == 0
    assert f"animation: {out} (3 steps, " in capsys.readouterr().out
    with Image.open(out) as made_image:
        assert (made_image.size, made_image.info["loop"]) == ((48, 32), 0)
        tops, bottoms = [], []
        for number in range(made_image.n_frames):
            made_image.seek(number)
            frame = np.asarray(made_image.convert("L"), int)
            tops.append(frame[:10].mean())
            bottoms.append(frame[-10:].mean())
    last = [200] * 6  # the newest step is shown three times
    np.testing.assert_allclose(bottoms, [10, 10, 20, 20, *last], atol=9)
    np.testing.assert_allclose(tops[:4], [10, 255, 20, 255], atol=9)


@pytest.mark.long
def test_images_are_used_if_there_are_no_clips(run: Path) -> None:
    written_run.add_samples(run, range(1, 100))
    for path in (run / "samples").glob("*.mp4"):
        path.unlink()
    rng = np.random.default_rng(0)
    for path in (run / "samples").glob("*.png"):
        noise = rng.integers(0, 255, (40, 1200, 3), dtype=np.uint8)
        path.write_bytes(images.encode("x", noise).file)
    assert animate(run, run / "a.gif") == 0
    with Image.open(run / "a.gif") as made:
        assert made.size == (560, 19)  # 1200x40, rounded
        assert made.n_frames >= 24
    steps = [one.step for one in animation._spread(animation.samples.found(run)[1], 24)]
    assert (len(steps), steps[0], steps[-1]) == (24, 1, 99)


@pytest.mark.long
def test_a_large_animation_becomes_smaller(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_run.add_samples(run, [5])
    noise = np.random.default_rng(0).integers(0, 255, (2, 600, 600, 3), dtype=np.uint8)
    (run / "samples" / "clip_5.mp4").write_bytes(images.encode("c", noise).file)
    for most, width in ((10**9, 560), (1_000_000, 320), (1, 240)):
        monkeypatch.setattr(animation, "_MOST_BYTES", most)
        assert animate(run, run / "a.gif") == 0
        with Image.open(run / "a.gif") as made:
            assert made.size == (width, width)
            assert (run / "a.gif").stat().st_size <= most or width == 240


def test_wrong_use_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        ([run, "--animation", "a.mp4"], "--animation a.mp4: the name must end with .gif or .webp"),
        ([run, run, "--animation", "a.gif"], "--animation a.gif: pass one RUN, not 2"),
        ([run, "--animation", "a.gif", "--out", "b"], "--animation and --out: pass one of them"),
        ([run, "--animation", run / "a.gif"], "samples has no images or clips: validations of"),
    ):
        assert main.main(["report", *map(str, arguments)]) == 2
        assert expected in capsys.readouterr().err
    written_run.add_samples(run, [5])
    (run / "samples" / "clip_5.mp4").write_bytes(b"\0\0\0\x18ftypisom" + b"\0" * 99)
    assert animate(run, run / "a.gif") == 2
    assert "samples/clip_5.mp4 cannot be read: " in capsys.readouterr().err
    assert not (run / "a.gif").exists()


def test_hostile_clips_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples").mkdir()
    clip = images.encode("c", np.zeros((1, 32, 48, 3), np.uint8)).file
    sample = run / "samples" / "clip_5.mp4"
    media = clip.index(b"mdat")
    sample.write_bytes(clip[: media + 4] + bytes(len(clip) - media - 4))  # no frame can be decoded
    assert animate(run, run / "a.gif") == 2
    assert f"{sample} cannot be read: " in capsys.readouterr().err
    assert not (run / "a.gif").exists()
    # The same video, as FFmpeg would open it by a playlist's format, is not an MP4 file.
    sample.write_bytes(b"\0\0\0\x18ftyp#EXTM3U\n/etc/passwd\n")
    assert animate(run, run / "a.gif") == 2
    assert f"{sample} cannot be read: " in capsys.readouterr().err


def test_a_damaged_image_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written_run.add_samples(run, [5])
    for clip in (run / "samples").glob("*.mp4"):
        clip.unlink()
    (sample,) = (run / "samples").glob("reconstruction_5.png")
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "png")
    content = bytearray(buffer.getvalue())
    second = content.index(b"IDAT", content.index(b"IDAT") + 4)
    content[second : second + 4] = b"\0\0\0\0"
    sample.write_bytes(content)
    assert animate(run, run / "a.gif") == 2
    assert f"{sample} cannot be read: " in capsys.readouterr().err
