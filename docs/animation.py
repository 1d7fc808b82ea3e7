"""Writes the validation clips of a run as one animated image, as in the README.

``python docs/animation.py RUN OUT.webp``: the clips in RUN/samples in the order of their steps. OUT
may also end with .gif.
"""

import itertools
import re
import sys
from pathlib import Path

import av
from PIL import Image

_WIDTH, _FRAMES, _STEPS = 560, 16, 24  # pixels; at most so many frames per clip, and clips
_FRAME_MS, _QUALITY = 160, 60
_LAST = 3  # times that the newest clip is shown


def clips(run: Path) -> list[list[Image.Image]]:
    """Returns the frames of at most 24 clips, evenly spaced over the steps."""
    paths = sorted(
        run.glob("samples/*.mp4"), key=lambda path: int(re.findall(r"\d+", path.stem)[-1])
    )
    if not paths:
        sys.exit(f"{run}/samples has no clips: validations of a video model write them")
    count = min(len(paths), _STEPS)
    chosen = [paths[(len(paths) - 1) * i // max(count - 1, 1)] for i in range(count)]
    return [_frames(path) for path in chosen + chosen[-1:] * (_LAST - 1)]


def _frames(path: Path) -> list[Image.Image]:
    with av.open(str(path)) as container:
        decoded = itertools.islice(container.decode(video=0), _FRAMES)
        frames = [frame.to_image() for frame in decoded]
    for frame in frames:
        frame.thumbnail((_WIDTH, _WIDTH))
    return frames


def main() -> None:
    """Writes the animation that the command line names."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} RUN OUT.webp")
    first, *others = (frame for clip in clips(Path(sys.argv[1])) for frame in clip)
    options = {"quality": _QUALITY} if sys.argv[2].endswith(".webp") else {}
    first.save(
        sys.argv[2], save_all=True, append_images=others, duration=_FRAME_MS, loop=0, **options
    )


if __name__ == "__main__":
    main()
