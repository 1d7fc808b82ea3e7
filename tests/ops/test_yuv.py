"""Resizing and converting on the device equals libswscale's result on the host."""

import functools
from fractions import Fraction

import av
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video.reader import Look
from jaxtrain.ops import yuv
from jaxtrain.sharding import batch_sharding

HEIGHT, WIDTH = 64, 96
ROOM = (80, 120)
CONVERT = jax.jit(functools.partial(yuv.to_rgb, height=HEIGHT, width=WIDTH))


def noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Returns a plane with detail of all sizes, whose values fill the range."""
    frequency = np.hypot(
        *np.meshgrid(np.fft.fftfreq(height), np.fft.rfftfreq(width), indexing="ij")
    )
    frequency[0, 0] = 1
    wave = (rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)) / frequency
    plane = np.fft.irfft2(wave, (height, width))
    return np.clip(np.round(126 + 45 * plane / plane.std()), 16, 235).astype(np.uint8)


def frame_of(planes: list[np.ndarray]) -> av.VideoFrame:
    high, wide = planes[0].shape
    frame = av.VideoFrame(wide, high, "yuv420p")
    frame.colorspace, frame.color_range = 1, 1
    for plane, values in zip(frame.planes, planes, strict=True):
        rows = np.zeros((values.shape[0], plane.line_size), np.uint8)
        rows[:, : values.shape[1]] = values
        plane.update(rows.tobytes())
    return frame


def on_host_and_device(
    height: int, width: int, position: video_frames.CropPosition
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a frame of this size, cropped: converted by the host, and by the device."""
    rng = np.random.default_rng(height)
    planes = [noise(rng, height // part, width // part) for part in (1, 2, 2)]
    look = Look(width, height, Fraction(1))
    size = {"frames": 1, "height": HEIGHT, "width": WIDTH, "position": position}
    host = video_frames.Crop(look, **size)
    device = video_frames.Planes(look, **size, plane_size=ROOM)
    for one in (host, device):
        one.put(0, frame_of(planes))
    sent = [jnp.asarray(device.arrays()[name])[None] for name in ("luma", "chroma", "crop")]
    found = CONVERT(*sent)
    assert (found.shape, found.dtype) == ((1, 1, HEIGHT, WIDTH, 3), np.uint8)
    return host.out_THWC[0].astype(int), np.asarray(found)[0, 0].astype(int)


def close(host: np.ndarray, device: np.ndarray) -> None:
    """Checks that few values differ, by one level, or at the border by at most two."""
    difference = np.abs(host - device)
    assert (difference > 0).mean() < 0.03
    assert difference.max() <= 2
    assert difference[1:-1, 1:-1].max() <= 1


# The largest crop; a smaller one; the size itself; smaller ones, which are enlarged.
SIZES = [(80, 120), (74, 110), (64, 96), (50, 76), (22, 34)]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_libswscale_to_one_level(size: tuple[int, int], mirror: bool) -> None:
    close(*on_host_and_device(*size, video_frames.CropPosition(mirror=mirror)))


@pytest.mark.parametrize("corner", [0.0, 1.0])
def test_pixels_outside_of_the_crop_have_no_effect(corner: float) -> None:
    position = video_frames.CropPosition(scale=0.8, across=corner, down=corner)
    close(*on_host_and_device(100, 150, position))


def test_a_blank_example_has_numbers() -> None:
    luma, chroma = jnp.zeros((1, 1, *ROOM), jnp.uint8), jnp.zeros((1, 1, 2, 40, 60), jnp.uint8)
    found = CONVERT(luma, chroma, jnp.zeros((1, 3), jnp.int32))
    # No brightness and the least color differences are a dark green; a NaN would become 0.
    assert np.asarray(found)[..., 1].min() == 77


def test_devices_do_not_communicate() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    rng = np.random.default_rng(0)
    sent = (
        rng.integers(0, 256, (8, 1, *ROOM), np.uint8),
        rng.integers(0, 256, (8, 1, 2, 40, 60), np.uint8),
        np.array([[80 - 2 * i, 120 - 4 * i, i % 2] for i in range(8)], np.int32),
    )
    split = batch_sharding(mesh)
    jitted = jax.jit(CONVERT, in_shardings=split, out_shardings=split)
    text = jitted.lower(*sent).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    found = np.asarray(jitted(*sent)).astype(int)
    for i in range(8):
        alone = np.asarray(CONVERT(*(jnp.asarray(part[i : i + 1]) for part in sent)))[0]
        assert np.abs(found[i] - alone).max() <= 1  # matmuls of other sizes round differently
