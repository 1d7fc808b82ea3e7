"""Draws labels around sample images, so that an image explains itself without the run.

The title is above the image, labels of its columns are below the title, and labels of its rows are
on the left. Small images are enlarged, since labels need space.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# An image is enlarged by the largest factor with which it stays within these sides (pixels).
_WIDE, _HIGH, _MOST_ENLARGED = 720, 1300, 8
_BACKGROUND, _TEXT, _QUIET = (22, 25, 29), (235, 238, 242), (158, 168, 179)
# Height of the text in pixels, and the width of an image per pixel of it.
_LEAST_TEXT, _WIDTH_PER_TEXT = 14, 72


class Labels(NamedTuple):
    """The texts around an image.

    Attributes:
        title: of the image.
        rows: of rows of equal height, from top to bottom.
        columns: of columns of equal width, from left to right.
    """

    title: str = ""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()


NO_LABELS = Labels()


def drawn(image: np.ndarray, labels: Labels) -> np.ndarray:
    """Returns an image or a clip with its labels; both sides are even, as H.264 requires.

    Args:
        image: uint8 [H, W, 3], or [T, H, W, 3] for a clip.
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
    from PIL import Image, ImageDraw

    size = max(_LEAST_TEXT, width // _WIDTH_PER_TEXT)
    margin = size // 2
    title, small = _font(size), _font(round(size * 0.9))
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


def _font(size: int) -> Any:
    """Returns the font that Pillow contains, which is the same on all machines."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
