"""Crop, resize and conversion."""

import gc
import itertools
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import frames
from jaxtrain.data.video.reader import Frame, Look


def _clip(path: Path, *, height: int, width: int, **changes: Any) -> np.ndarray:
    return sample.cropped(sample.decoded(path), height=height, width=width, **changes)


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "full_range"),
    [
        ("libx264", "yuv420p", False),
        ("libx264", "yuv420p", True),
        ("libx264", "yuv420p10le", False),
        ("libvpx-vp9", "yuv420p", True),
        ("mjpeg", "yuvj420p", True),
    ],
)
def test_range_and_depth_are_converted(
    tmp_path: Path, codec: str, pix_fmt: str, full_range: bool
) -> None:
    grey = np.linspace(0, 255, 96).astype(np.uint8)
    ramp = np.broadcast_to(grey[None, :, None], (64, 96, 3)).copy()
    ending = {"libx264": "mp4", "libvpx-vp9": "webm", "mjpeg": "mov"}[codec]
    options: Any = (
        {"qscale": "1", "flags": "qscale"} if codec == "mjpeg" else {"crf": "1", "b": "0"}
    )
    path = sample.write(
        tmp_path / f"a.{ending}",
        [ramp] * 3,
        codec=codec,
        pix_fmt=pix_fmt,
        full_range=full_range,
        **options,
    )
    clip = _clip(path, height=64, width=96)
    # The wrong range would be off by up to 16 at the ends of the ramp.
    np.testing.assert_allclose(clip[1, 32, :, 1].astype(float), grey, atol=5)


def test_a_circle_stays_round(tmp_path: Path) -> None:
    y, x = np.mgrid[:120, :200]
    disc = ((np.hypot(y - 60, x - 100) < 30)[..., None] * np.full(3, 255)).astype(np.uint8)
    path = sample.write(tmp_path / "a.mp4", [disc] * 2, crf="4")
    for height, width in [(60, 60), (120, 60), (50, 160), (240, 400)]:
        white = _clip(path, height=height, width=width)[0, ..., 0] > 127
        tall, wide = white.any(axis=1).sum(), white.any(axis=0).sum()
        assert abs(int(tall) - int(wide)) <= max(2, 0.05 * tall), (height, width, tall, wide)


def test_non_square_pixels_are_widened(tmp_path: Path) -> None:
    y, x = np.mgrid[:120, :100]
    disc = (np.hypot(y - 60, (x - 50) * 2) < 40)[..., None] * np.full(3, 255)
    path = sample.write(tmp_path / "a.mp4", [disc.astype(np.uint8)] * 2, crf="4")
    (frame,) = sample.decoded(path, [0])
    wide = frame._replace(look=frame.look._replace(pixel_aspect=Fraction(2)))
    clip = sample.cropped([wide], height=100, width=100)
    white = clip[0, ..., 0] > 127
    assert abs(int(white.any(axis=1).sum()) - int(white.any(axis=0).sum())) <= 4


def test_the_crop_is_at_the_requested_place(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", [sample.corners()] * 2, crf="4")
    expected = sample.grays(sample.corners())
    for number, (down, across) in enumerate(itertools.product((0.0, 1.0), repeat=2)):
        clip = _clip(path, height=32, width=48, scale=0.5, across=across, down=down)
        assert sample.grays(clip[0]) == [expected[number]] * 4


def test_shrinking_does_not_alias(tmp_path: Path) -> None:
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::2] = 255
    path = sample.write(tmp_path / "a.mkv", [stripes] * 2, codec="ffv1", pix_fmt="yuv444p")
    clip = _clip(path, height=32, width=32)
    np.testing.assert_allclose(clip[:, :, 2:-2], 127, atol=4)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (1, 9)])
def test_tiny_frames_are_enlarged(tmp_path: Path, size: tuple[int, int]) -> None:
    picture = np.full((*size, 3), (200, 100, 50), np.uint8)
    path = sample.write(tmp_path / "a.mkv", [picture] * 2, codec="ffv1", pix_fmt="yuv444p")
    clip = _clip(path, height=32, width=48, scale=0.8)
    np.testing.assert_allclose(clip[0].reshape(-1, 3).mean(axis=0), (200, 100, 50), atol=6)


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_colors_at_half_resolution_are_interpolated(along: str) -> None:
    """Videos store color at half the resolution; repeating it would be off by 2 to 3 levels."""
    place = np.broadcast_to(np.arange(240.0), (160, 240))
    place = place if along == "rows" else np.broadcast_to(np.arange(160.0)[:, None], (160, 240))
    picture = 128 + np.stack(
        [100 * np.sin(place / 20), -50 * np.sin(place / 20), 100 * np.cos(place / 27)], -1
    )
    frame = av.VideoFrame.from_ndarray(picture.astype(np.uint8), "rgb24").reformat(
        format="yuv420p", dst_color_range="MPEG", dst_colorspace="ITU709"
    )
    frame.colorspace = 1
    clip = sample.cropped([Frame(frame, Look(240, 160, Fraction(1)), 0)], height=80, width=120)
    wanted = picture.reshape(80, 2, 120, 2, 3).mean((1, 3))
    assert np.abs(clip[0] - wanted).mean() < 1


@pytest.mark.parametrize("on_device", [False, True])
def test_a_clip_is_freed_without_garbage_collection(tmp_path: Path, on_device: bool) -> None:
    """Otherwise each clip fills memory that is not in a processor's cache, and is slower."""
    path = sample.write(tmp_path / "a.mp4", 4, full_range=True)
    (frame,) = sample.decoded(path, [2])
    size: dict[str, Any] = {"frames": 1, "height": 32, "width": 48}
    size["position"] = frames.CropPosition()
    clip = (
        frames.Planes(frame.look, **size, plane_size=(40, 60))
        if on_device
        else frames.Crop(frame.look, **size)
    )
    clip.put(0, frame.picture)
    freed = weakref.ref(clip)
    gc.disable()
    try:
        del clip
        assert freed() is None
    finally:
        gc.enable()
