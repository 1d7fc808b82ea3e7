"""Pictures and clips that a run keeps, as files and as TensorBoard shows them."""

import io
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

FRAMES_PER_SECOND = 8


class Encoded(NamedTuple):
    """A picture or a clip, ready to be written.

    Attributes:
        file: the content of its file.
        shown: for TensorBoard, which knows PNG and GIF.
        height, width: pixels.
    """

    file: bytes
    shown: bytes
    height: int
    width: int


def ending(picture: np.ndarray) -> str:
    """Of the file of an image [H, W, 3] or a clip [T, H, W, 3]: ``".png"`` or ``".mp4"``."""
    return ".mp4" if picture.ndim == 4 else ".png"


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


def encode(name: str, picture: np.ndarray) -> Encoded:
    """A picture as PNG; a clip as MP4, and as GIF for TensorBoard.

    Args:
        name: for the error.
        picture: uint8 [H, W, 3], or [T, H, W, 3] for a clip.

    Raises:
        ValueError: it has another form.
    """
    check(name, picture)
    height, width = picture.shape[-3:-1]
    if picture.ndim == 3:
        png = _png(picture)
        return Encoded(png, png, height, width)
    return Encoded(_mp4(picture), _gif(picture), height, width)


def _png(picture_HW3: np.ndarray) -> bytes:
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(picture_HW3).save(held, format="PNG")
    return held.getvalue()


def _gif(clip_THW3: np.ndarray) -> bytes:
    from PIL import Image

    held = io.BytesIO()
    first, *others = [Image.fromarray(frame) for frame in clip_THW3]
    duration_ms = 1000 // FRAMES_PER_SECOND
    first.save(
        held, format="GIF", save_all=True, append_images=others, duration=duration_ms, loop=0
    )
    return held.getvalue()


def _mp4(clip_THW3: np.ndarray) -> bytes:
    """H.264, which wants even sides: an odd one loses its last row or column."""
    import av

    even = clip_THW3[:, : clip_THW3.shape[1] // 2 * 2, : clip_THW3.shape[2] // 2 * 2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
            stream.height, stream.width = even.shape[1:3]
            stream.pix_fmt, stream.options = "yuv420p", {"crf": "16"}
            for frame in even:
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        return path.read_bytes()
