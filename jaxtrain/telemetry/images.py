"""Encodes the images and clips of a run, for its files and for TensorBoard."""

import io
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.telemetry import labels
from jaxtrain.telemetry.labels import NO_LABELS, Labels

FRAMES_PER_SECOND = 8


class Encoded(NamedTuple):
    """An encoded image or clip.

    Attributes:
        file: contents of its file, PNG or MP4.
        shown: contents for TensorBoard, which supports PNG and GIF.
        height, width: pixels.
    """

    file: bytes
    shown: bytes
    height: int
    width: int


def extension(image: np.ndarray) -> str:
    """Returns ``".png"`` for an image [H, W, 3] and ``".mp4"`` for a clip [T, H, W, 3]."""
    return ".mp4" if image.ndim == 4 else ".png"


def check(name: str, image: np.ndarray) -> None:
    """Checks that an array is an image or a clip.

    Raises:
        ValueError: it is neither uint8 [H, W, 3] nor uint8 [T, H, W, 3].
    """
    if image.dtype != np.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
        raise ValueError(
            f"image {name} is {image.dtype} {list(image.shape)}, not uint8 [H, W, 3] or, for a "
            "clip, [T, H, W, 3]"
        )


def encode(name: str, image: np.ndarray, around: Labels = NO_LABELS) -> Encoded:
    """Encodes an image as PNG, and a clip as MP4 and as GIF for TensorBoard.

    Args:
        name: for the error message.
        image: uint8 [H, W, 3], or [T, H, W, 3] for a clip.
        around: labels that are drawn around it.

    Raises:
        ValueError: it is neither an image nor a clip.
    """
    check(name, image)
    image = labels.drawn(image, around)
    height, width = image.shape[-3:-1]
    if image.ndim == 3:
        png = _png(image)
        return Encoded(png, png, height, width)
    return Encoded(_mp4(image), _gif(image), height, width)


def _png(image_HW3: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image_HW3).save(buffer, format="PNG")
    return buffer.getvalue()


def _gif(clip_THW3: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    first, *others = [Image.fromarray(frame) for frame in clip_THW3]
    duration_ms = 1000 // FRAMES_PER_SECOND
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=duration_ms, loop=0
    )
    return buffer.getvalue()


def _mp4(clip_THW3: np.ndarray) -> bytes:
    """Encodes H.264, which requires even sides: an odd side loses its last row or column."""
    import av

    even = clip_THW3[:, : clip_THW3.shape[1] // 2 * 2, : clip_THW3.shape[2] // 2 * 2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
            stream.height, stream.width = even.shape[1:3]
            stream.pix_fmt, stream.options = "yuv420p", {"crf": "16"}
            for frame in even:
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(image))
            container.mux(stream.encode())
        return path.read_bytes()
