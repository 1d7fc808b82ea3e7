"""Encodes the images and clips of a run, with labels, for its files and for TensorBoard.

An image explains itself without the run: its title is above it, labels of its columns are below the
title, and labels of its rows are on the left. Small images are enlarged, since labels need space.
"""

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

FRAMES_PER_SECOND = 8
# An image is enlarged by the largest factor with which it stays within these sides (pixels).
_WIDE, _HIGH, _MOST_ENLARGED = 720, 1300, 8
_BACKGROUND, _TEXT, _QUIET = (22, 25, 29), (235, 238, 242), (158, 168, 179)
# Height of the text in pixels, and the width of an image per pixel of it.
_LEAST_TEXT, _WIDTH_PER_TEXT = 14, 72


class Labels(NamedTuple):
    """The texts around an image."""

    title: str = ""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()


NO_LABELS = Labels()


class Encoded(NamedTuple):
    """An encoded image or clip.

    Attributes:
        file: contents of its file, PNG or MP4.
        preview: contents for TensorBoard, which supports PNG and GIF.
        height, width: pixels.
    """

    file: bytes
    preview: bytes
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


def encode(image: np.ndarray, labels: Labels = NO_LABELS) -> Encoded:
    """Encodes an image as PNG, and a clip as MP4 and as GIF for TensorBoard.

    Args:
        image: uint8 [H, W, 3], or [T, H, W, 3] for a clip.
    """
    image = drawn(image, labels)
    height, width = image.shape[-3:-1]
    if image.ndim == 3:
        png = _png(image)
        return Encoded(png, png, height, width)
    return Encoded(_mp4(image), _gif(image), height, width)


def drawn(image: np.ndarray, labels: Labels) -> np.ndarray:
    """Returns an image or a clip with its labels; both sides are even, as H.264 requires.

    Args:
        labels: if all are empty, the image is returned unchanged.
    """
    if not any(labels):
        return image
    times = min(_WIDE // image.shape[-2], _HIGH // image.shape[-3], _MOST_ENLARGED)
    if times > 1:
        image = image.repeat(times, axis=-3).repeat(times, axis=-2)
    height, width = image.shape[-3:-1]
    frame, top, left = _frame(height, width, labels)
    result = np.broadcast_to(frame, (*image.shape[:-3], *frame.shape)).copy()
    result[..., top : top + height, left : left + width, :] = image
    return result


def _frame(height: int, width: int, labels: Labels) -> tuple[np.ndarray, int, int]:
    """Returns an image of the labels alone, and the top left corner of what they surround."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(_LEAST_TEXT, width // _WIDTH_PER_TEXT)
    margin = size // 2
    # The font that Pillow contains is the same on all machines.
    title, small = ImageFont.load_default(size), ImageFont.load_default(round(size * 0.9))
    line = size + margin
    top = margin + line * bool(labels.title) + line * bool(labels.columns)
    left = margin + int(max([0, *(small.getlength(row) + margin for row in labels.rows)]))
    right = max(left + width, int(margin + title.getlength(labels.title))) + margin
    bottom = top + height + margin
    frame = Image.new("RGB", (right + right % 2, bottom + bottom % 2), _BACKGROUND)
    draw = ImageDraw.Draw(frame)
    draw.text((margin, margin), labels.title, fill=_TEXT, font=title)
    for number, row in enumerate(labels.rows):
        middle = top + height * (2 * number + 1) // (2 * len(labels.rows))
        draw.text((left - margin, middle), row, fill=_QUIET, font=small, anchor="rm")
    for number, column in enumerate(labels.columns):
        middle = left + width * (2 * number + 1) // (2 * len(labels.columns))
        draw.text((middle, top - margin), column, fill=_QUIET, font=small, anchor="mb")
    return np.asarray(frame), top, left


def heading(width: int, columns: Sequence[str]) -> np.ndarray:
    """Returns a bar with the labels of columns of equal width, to be put above them.

    Args:
        width: of the bar, in pixels.
        columns: the labels; their text is smaller if they are wider than a column.

    Returns:
        uint8 [H, width, 3], with an even height.
    """
    from PIL import Image, ImageDraw, ImageFont

    size = max(_LEAST_TEXT, width // _WIDTH_PER_TEXT)
    label_width = width // len(columns) - size // 2
    widest = max(ImageFont.load_default(size).getlength(column) for column in columns)
    font = ImageFont.load_default(max(1, int(size * min(1, label_width / widest))))
    height = (size + size // 2) // 2 * 2
    bar = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(bar)
    for number, column in enumerate(columns):
        middle = width * (2 * number + 1) // (2 * len(columns))
        draw.text((middle, height // 2), column, fill=_TEXT, font=font, anchor="mm")
    return np.asarray(bar)


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
