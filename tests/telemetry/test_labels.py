"""Labels around sample images."""

import io

import numpy as np
from PIL import Image

from jaxtrain.telemetry import images
from jaxtrain.telemetry.events import Sample
from jaxtrain.telemetry.images import Labels

ROWS = Labels("reconstruction   step 40   val/psnr 21.65 dB", ["original", "error"] * 2, ["a"])


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_an_image_is_inside_its_labels_pixel_by_pixel() -> None:
    image = noise(128, 900, 3)
    made = images.drawn(image, ROWS)
    height, width = made.shape[:2]
    assert (height % 2, width % 2) == (0, 0)
    inside = [
        (top, left)
        for top in range(height - 127)
        for left in range(width - 899)
        if (made[top, left] == image[0, 0]).all()
        and (made[top : top + 128, left : left + 900] == image).all()
    ]
    ((top, left),) = inside
    assert top > 30
    assert left > 50
    around = made.astype(int).sum(-1)
    assert around[: top // 2].max() > 600  # the title
    for number in range(4):  # each row has its own label, beside its middle
        rows = around[top + 32 * number : top + 32 * (number + 1), :left]
        assert rows[8:24].max() > 300
        assert rows[:3].max() == rows[-3:].max() == around[-1, 0]


def test_files_and_tensorboard_get_the_labels() -> None:
    image = noise(64, 90, 3)
    sample = Sample(40, "reconstruction", image, ROWS)
    encoded = sample.image
    assert encoded is not None
    shown = np.asarray(Image.open(io.BytesIO(encoded.file)))
    np.testing.assert_array_equal(shown, images.drawn(image, ROWS))
    assert encoded.preview == encoded.file
    assert (encoded.height, encoded.width) == shown.shape[:2]
    clip = images.encode(noise(3, 64, 90, 3), ROWS)
    gif = Image.open(io.BytesIO(clip.preview))
    assert gif.size == (clip.width, clip.height)
    assert gif.size[1] > 64
