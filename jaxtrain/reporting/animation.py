"""Writes an animated image of a run's samples over the steps, such as for a README."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import InputError, first_line
from jaxtrain.reporting import samples
from jaxtrain.reporting.samples import Sample
from jaxtrain.storage import atomic

FORMATS = (".gif", ".webp")
_MOST_STEPS, _MOST_FRAMES = 24, 16  # frames of a clip
# Widths in pixels: the first with which the file stays within the size, or else the last.
_WIDTHS, _MOST_BYTES = (560, 420, 320, 240), 10**6
_FRAME_MS, _IMAGE_MS = 160, 600  # of a clip's frame; of an image
_LAST = 3  # times that the newest step is shown
_QUALITY = 60  # of WebP


def check(out: Path) -> None:
    """Checks the name of the file.

    Raises:
        InputError: its extension is not .gif or .webp.
    """
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"--animation {out}: the name must end with {' or '.join(FORMATS)}")


def write(directory: Path, out: Path) -> tuple[int, int]:
    """Writes the animation, from the first kind of clip or else of image in ``samples/``.

    Args:
        directory: the run directory.
        out: the file, .gif or .webp, which is replaced atomically.

    Returns:
        The number of steps that it shows, and its size in bytes.

    Raises:
        InputError: the run has no images or clips, or one cannot be read.
        OSError: the file cannot be written.
    """
    groups = samples.found(directory)
    moving = next((group for group in groups if group[0].kind == "video/mp4"), None)
    every = moving or next((group for group in groups if group[0].kind == "image/png"), None)
    if every is None:
        raise InputError(
            f"{directory}/samples has no images or clips: validations of a video model write them "
            "(loop.eval_every)"
        )
    chosen = _spread(every, _MOST_STEPS)
    clips = [list(_frames(sample)) for sample in chosen]
    clips += clips[-1:] * (_LAST - 1)
    width, height = clips[-1][0].size
    for most in _WIDTHS:
        size = (min(width, most), max(1, height * min(width, most) // width))
        frames = [frame.resize(size) for clip in clips for frame in clip]
        content = _encoded(frames, out, _FRAME_MS if moving else _IMAGE_MS)
        if len(content) <= _MOST_BYTES:
            break
    atomic.write_whole(out, content)
    return len(chosen), len(content)


def _encoded(frames: Sequence[Any], out: Path, duration_ms: int) -> bytes:
    """Encodes frames in the format of the file's extension; they repeat forever."""
    first, *others = frames
    buffer = io.BytesIO()
    first.save(
        buffer,
        format=out.suffix[1:].upper(),
        save_all=True,
        append_images=others,
        duration=duration_ms,
        loop=0,
        **({"quality": _QUALITY, "method": 2} if out.suffix.lower() == ".webp" else {}),
    )
    return buffer.getvalue()


def _spread(every: Sequence[Sample], most: int) -> list[Sample]:
    """Returns at most so many samples, evenly spaced, with the first and the newest."""
    count = min(len(every), most)
    return [every[(len(every) - 1) * i // max(count - 1, 1)] for i in range(count)]


def _frames(sample: Sample) -> Iterator[Any]:
    """Yields the frames of a clip, or an image, as Pillow images.

    Raises:
        InputError: the file cannot be read.
    """
    import av
    from PIL import Image

    from jaxtrain.data.video.packets import OPTIONS

    def shrunk(image: Any) -> Any:
        image.thumbnail((_WIDTHS[0], _WIDTHS[0]))  # at once: frames of a foreign file may be large
        return image

    try:
        content = sample.content()
        if sample.kind == "image/png":
            yield shrunk(Image.open(io.BytesIO(content)).convert("RGB"))
            return
        options = OPTIONS | {"max_pixels": str(samples.MOST_PIXELS)}
        with av.open(io.BytesIO(content), "r", format="mp4", options=options) as container:
            number = -1
            for number, frame in enumerate(container.decode(video=0)):
                if number == _MOST_FRAMES:
                    return
                yield shrunk(Image.fromarray(np.asarray(frame.to_ndarray(format="rgb24"))))
            if number < 0:
                raise ValueError("it has no frame")
    # Pillow raises SyntaxError for a damaged PNG.
    except (OSError, SyntaxError, ValueError, IndexError, av.FFmpegError) as error:
        raise InputError(f"{sample.path} cannot be read: {first_line(error)}") from error
