"""Reads the images, clips, and texts of the validations for the page."""

import base64
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

# Total size of the samples of one page, over all its runs, and of those that only its slider shows.
# Mail and browsers can handle that.
MOST_BYTES = 16 * 2**20
MOST_EARLIER_BYTES = 6 * 2**20
_MOST_STEPS = 60  # on the slider
_KINDS = {".png": "image/png", ".mp4": "video/mp4", ".txt": "text/plain"}
_NAME = re.compile(r"(\w+)_(\d+)(\.png|\.mp4|\.txt)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A file of ``samples/``.

    Attributes:
        name: without step and extension.
        step: completed steps.
        kind: media type.
        path: of the file.
        size: of the file in bytes.
    """

    name: str
    step: int
    kind: str
    path: Path
    size: int

    def data_uri(self) -> str:
        """Returns an image or a clip as a ``data:`` URI.

        Raises:
            OSError: the file cannot be read.
        """
        return f"data:{self.kind};base64,{base64.b64encode(self.path.read_bytes()).decode()}"


def found(directory: Path) -> list[list[Sample]]:
    """Finds the files in ``samples/``; texts first, then images, then clips.

    Returns:
        A list for each name, ordered by step; none is empty.
    """
    every: dict[tuple[str, str], list[Sample]] = {}
    for path in (directory / "samples").glob("*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file():
            name, step, extension = match[1], int(match[2]), match[3]
            sample = Sample(
                name=name,
                step=step,
                kind=_KINDS[extension],
                path=path,
                size=path.stat().st_size,
            )
            every.setdefault((name, extension), []).append(sample)
    order = [".txt", ".png", ".mp4"]
    sorted_names = sorted(every, key=lambda key: (key[0] == "latents", order.index(key[1]), key))
    return [sorted(every[key], key=lambda one: one.step) for key in sorted_names]


def fitting(samples: Sequence[Sample], most: int = MOST_BYTES) -> list[Sample]:
    """Returns the samples that fit into the page, smallest first."""
    kept: list[Sample] = []
    total = 0
    for sample in sorted(samples, key=lambda one: one.size):
        total += sample.size
        if total <= most:
            kept.append(sample)
    return kept


def slider_steps(samples: Sequence[Sample], most: int) -> list[int]:
    """Returns the earlier steps whose samples fit into the page: all, or every 2nd, 4th, and so on.

    Args:
        samples: those of earlier steps.
        most: limit of their total size in bytes.
    """
    sizes: dict[int, int] = {}
    for sample in samples:
        sizes[sample.step] = sizes.get(sample.step, 0) + sample.size
    steps = sorted(sizes)
    while len(steps) > _MOST_STEPS or sum(sizes[step] for step in steps) > most:
        steps = steps[1::2]
    return steps
