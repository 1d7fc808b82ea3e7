"""Encoding images and clips, and reading them back."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from jaxtrain.telemetry import images


def moving(frames: int, height: int, width: int) -> np.ndarray:
    """A gray ramp that gets brighter with each frame."""
    ramp = (
        np.linspace(0, 150, width)[None, None, :, None]
        + 20 * np.arange(frames)[:, None, None, None]
    )
    return np.broadcast_to(ramp, (frames, height, width, 3)).astype(np.uint8)


def test_an_image_is_a_lossless_png() -> None:
    image = np.random.default_rng(0).integers(0, 256, (6, 10, 3)).astype(np.uint8)
    made = images.encode(image)
    assert (images.extension(image), made.height, made.width) == (".png", 6, 10)
    assert made.preview == made.file
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(made.file))), image)


def test_a_clip_is_an_mp4_and_a_gif(tmp_path: Path) -> None:
    clip = moving(5, 33, 48)
    made = images.encode(clip)
    assert (images.extension(clip), made.height, made.width) == (".mp4", 33, 48)
    (tmp_path / "x.mp4").write_bytes(made.file)
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == images.FRAMES_PER_SECOND
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.stack(frames).shape == (5, 32, 48, 3)  # an odd side loses its last row
    assert np.abs(np.stack(frames).astype(float) - clip[:, :32]).mean() < 4
    gif = Image.open(io.BytesIO(made.preview))
    assert (gif.n_frames, gif.size, gif.info["duration"]) == (5, (48, 33), 120)
    gif.seek(4)
    assert np.abs(np.asarray(gif.convert("RGB"), float) - clip[4]).mean() < 8


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2, 2, 3)])
def test_other_shapes_and_types_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"image x is uint8 .* or, for a clip"):
        images.check("x", np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="float32"):
        images.check("x", np.zeros((2, 2, 3), np.float32))
