"""``jaxtrain reconstruct``: correct frames, times and audio for many inputs, and its errors."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos
from models.video_ae import small_autoencoder

from jaxtrain import main
from jaxtrain.cli import command_line
from jaxtrain.data.video import reader
from jaxtrain.errors import InputError
from jaxtrain.inference.video import autoencoder, writing
from jaxtrain.inference.video import reading as video_reading
from jaxtrain.models.reconstruction import timing


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_autoencoder.save(tmp_path_factory.mktemp("weights") / "small.safetensors")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 frames of 36x50, which are not multiples of 8."""
    images = sample_videos.busy(30, height=36, width=50)
    return sample_videos.write(tmp_path_factory.mktemp("clip") / "clip.mp4", images, crf="1")


def run(*arguments: Any) -> int:
    return main.main(["reconstruct", *map(str, arguments)])


def blocks(video_THW3: np.ndarray) -> np.ndarray:
    """Returns the mean gray of 4x4 squares, which chroma subsampling and H.264 preserve."""
    t, h, w, _ = video_THW3.shape
    cut = video_THW3[:, : h // 4 * 4, : w // 4 * 4].mean(3)
    return cut.reshape(t, h // 4, 4, w // 4, 4).mean((2, 4))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that each frame is closer to the frame with its number than to any other."""
    assert found.shape == expected.shape
    distance = np.abs(blocks(found)[:, None] - blocks(expected)[None]).mean((2, 3))
    assert np.diag(distance).max() < 4.0
    assert (distance.argmin(1) == np.arange(len(found))).all()
    others = distance + np.where(np.eye(len(found)), np.inf, 0)
    assert others.min() > np.diag(distance).max()


def test_every_frame_keeps_its_time(
    weights: Path, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.mp4"
    assert run(weights, clip, out, "--crf", 1) == 0
    original = np.stack([one.pixels for one in video_reading.Video(clip).images()])
    assert_same(small_autoencoder.read(out), small_autoencoder.reconstructed(weights, original))
    with av.open(str(out)) as after, av.open(str(clip)) as before:
        streams = after.streams.video[0], before.streams.video[0]
        assert streams[0].average_rate == streams[1].average_rate == 25
        times = [
            [frame.pts * frame.time_base for frame in container.decode(video=0)]
            for container in (after, before)
        ]
    assert times[0] == times[1]
    assert f"of 50x36 to {out}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]


@pytest.mark.parametrize("factor", [8, 4, 2, 1])
@pytest.mark.parametrize("rule", ["always", "odd_latents"])
def test_no_frame_is_lost_and_no_latent_wasted(rule: Any, factor: int) -> None:
    rules = timing.Timing(factor, rule)
    for frames in range(1, 60):
        needed = rules.needed(frames)
        assert rules.decoded(needed) >= frames
        assert needed >= rules.latent_frames(frames)
        assert needed <= rules.latent_frames(frames) + 1
        if needed > rules.latent_frames(frames):
            assert rules.decoded(needed - 1) < frames
    assert timing.Timing(4, rule).needed(13) == 4


def test_odd_sizes_are_padded_and_reported(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sample_videos.busy(3, height=33, width=47)
    clip = sample_videos.write(tmp_path / "clip.mkv", images, codec="ffv1", pix_fmt="bgr0")
    assert run(weights, clip, tmp_path / "out.mp4", "--crf", 1) == 0
    found = small_autoencoder.read(tmp_path / "out.mp4")
    assert found.shape == (3, 34, 48, 3)
    assert "padded 47x33 to 48x34 by repeating the edges" in capsys.readouterr().out
    expected = small_autoencoder.reconstructed(weights, np.stack(images))
    assert np.abs(blocks(found[:, :32, :44]) - blocks(expected[:, :32, :44])).mean() < 2.0


def test_rotation_is_honored(weights: Path, clip: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(clip.read_bytes())
    sample_videos.rotate_quarter(turned)
    assert run(weights, turned, tmp_path / "out.mp4", "--side-by-side", "--crf", 1) == 0
    found = small_autoencoder.read(tmp_path / "out.mp4")
    bar = found.shape[1] - 50  # the labels
    assert found.shape == (30, 50 + bar, 72, 3)
    assert bar > 0
    assert bar % 2 == 0
    assert found[:, :bar, :36].std() > 5
    assert found[:, :bar, 36:].std() > 5
    upright = np.rot90(small_autoencoder.read(clip), -1, axes=(1, 2))  # clockwise
    assert_same(found[:, bar:, :36], upright)
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert next(container.decode(video=0)).rotation == 0


def test_the_audio_is_copied(weights: Path, tmp_path: Path) -> None:
    images = sample_videos.busy(30, height=16, width=16)
    clip = small_autoencoder.with_sound(tmp_path / "clip.mp4", images, seconds=2.0)
    assert run(weights, clip, tmp_path / "out.mp4") == 0
    before = small_autoencoder.sound_of(clip)
    assert len(before) > 30
    assert small_autoencoder.sound_of(tmp_path / "out.mp4") == before
    assert len(small_autoencoder.read(tmp_path / "out.mp4")) == 30
    assert run(weights, clip, tmp_path / "mute.mp4", "--no-audio") == 0
    assert not small_autoencoder.sound_of(tmp_path / "mute.mp4")


def test_a_variable_frame_rate_is_kept(weights: Path, tmp_path: Path) -> None:
    clip, out = tmp_path / "clip.mkv", tmp_path / "out.mkv"
    stamps = [0, 40, 50, 200, 1000, 1010]
    sample_videos.write_at(clip, sample_videos.busy(6, height=16, width=16), stamps)
    assert run(weights, clip, out) == 0
    with av.open(str(out)) as container:
        found = [round(1000 * frame.time) for frame in container.decode(video=0)]
    assert found == stamps


@pytest.mark.parametrize(("height", "width"), [(36, 50), (578, 32)])
def test_colors_are_not_shifted(
    weights: Path, height: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small frames are BT.601 and large ones BT.709, when written and when read."""
    color = np.array([200, 40, 90], np.uint8)
    clip = sample_videos.write(
        tmp_path / "clip.mkv",
        [np.full((height, width, 3), color)] * 3,
        codec="ffv1",
        pix_fmt="bgr0",
    )

    def same(self: Any, frames: Any, **_: Any) -> Any:
        for frame in frames:
            yield np.asarray(frame)

    monkeypatch.setattr(autoencoder.Autoencoder, "encoded", same)
    monkeypatch.setattr(autoencoder.Autoencoder, "decoded", same)
    assert run(weights, clip, tmp_path / "out.mp4", "--crf", 1) == 0
    again = [one.pixels for one in video_reading.Video(tmp_path / "out.mp4").images()]
    assert np.abs(again[0].mean((0, 1)) - color).max() < 6  # the other matrix is off by 20
    with av.open(str(tmp_path / "out.mp4")) as container:
        shown = next(container.decode(video=0))
        assert shown.colorspace == (1 if height > 576 else 6)


def cut_short(place: Path) -> Path:
    path = sample_videos.write(place / "cut.mkv", sample_videos.busy(60))
    return sample_videos.truncate(path, 0.5)


def scratched(place: Path) -> Path:
    """Damages a frame so that only a flag marks it as corrupt: decoding does not fail."""
    path = sample_videos.write(place / "s.mp4", sample_videos.busy(30), g="5")
    intact = path.read_bytes()
    for at in np.arange(0.3, 0.9, 0.03):  # the effect depends on the position
        path.write_bytes(intact)
        sample_videos.garble(path, at, length=20)
        breaks = [item for item in reader.Reader(str(path)) if isinstance(item, reader.Break)]
        if {item.reason for item in breaks if item.reason} == {"has damaged frames"}:
            return path
    raise AssertionError("noise was not flagged anywhere")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place: place, "is not a file"),
        (cut_short, r"cut\.mkv: is cut off: it has"),
        (scratched, r"s\.mp4: has .*damaged frames"),
    ],
)
def test_inputs_that_are_not_intact_videos_are_refused(
    weights: Path, make: Any, message: str, tmp_path: Path
) -> None:
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    with pytest.raises(InputError, match=message):
        command_line.run("reconstruct", [str(weights), str(make(inputs)), str(outputs / "out.mp4")])
    assert not list(outputs.iterdir())  # no partial file is left


def test_wrong_use(weights: Path, clip: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    for arguments, message in (
        ([weights, clip, tmp_path / "out.gif"], r"must be one of \.mp4"),
        ([weights, clip, tmp_path / "no" / "out.mp4"], "does not exist: create it"),
        ([weights, clip, clip], "is the same file as the input"),
        ([weights, clip, out, "--crf", 99], "--crf 99: use at most 51"),
        ([clip, clip, out], "the name of a weights file must end with"),
    ):
        with pytest.raises(InputError, match=message):
            command_line.run("reconstruct", [str(one) for one in arguments])
        assert not out.exists()
    assert run() == 0  # help


def test_only_a_few_frames_are_in_memory(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of frames read but not yet written does not grow with the video."""
    clip = sample_videos.write(tmp_path / "clip.mp4", 120)
    held, most = 0, 0
    reading, adding = video_reading.Video.items, writing.Writer.add

    def items(self: Any, *, sound: bool) -> Any:
        nonlocal held, most
        for item in reading(self, sound=sound):
            held += 1
            most = max(most, held)
            yield item

    def add(self: Any, image: Any) -> None:
        nonlocal held
        held -= 1
        adding(self, image)

    monkeypatch.setattr(video_reading.Video, "items", items)
    monkeypatch.setattr(writing.Writer, "add", add)
    assert run(weights, clip, tmp_path / "out.mp4") == 0
    assert held == 0
    assert most <= 20
