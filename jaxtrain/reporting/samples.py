"""Pictures, clips and texts of the newest validation, inside the page."""

import base64
import dataclasses
import re
from pathlib import Path

# What a page holds of them, over all its runs: mail and browsers bear that.
MOST_BYTES = 16 * 2**20
_KINDS = {".png": "image/png", ".mp4": "video/mp4", ".txt": "text/plain"}
_NAME = re.compile(r"(\w+)_(\d+)(\.png|\.mp4|\.txt)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A file of ``samples/``.

    Attributes:
        name: without step and ending.
        step: completed updates.
        kind: media type.
        path: of the file.
        bytes: of the file.
        earlier: files of the same name of earlier steps.
    """

    name: str
    step: int
    kind: str
    path: Path
    bytes: int
    earlier: int

    def data_uri(self) -> str:
        """The file as an address that holds it.

        Raises:
            OSError: it cannot be read.
        """
        return f"data:{self.kind};base64,{base64.b64encode(self.path.read_bytes()).decode()}"


def newest(directory: Path) -> list[Sample]:
    """The newest file of each name in ``samples/``; texts first, then pictures, then clips."""
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for path in (directory / "samples").glob("*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault((match[1], match[3]), []).append((int(match[2]), path))
    order = [".txt", ".png", ".mp4"]
    samples = []
    for (name, ending), files in sorted(
        found.items(), key=lambda item: (order.index(item[0][1]), item[0][0] == "latents", item[0])
    ):
        step, path = max(files)
        samples.append(
            Sample(
                name=name,
                step=step,
                kind=_KINDS[ending],
                path=path,
                bytes=path.stat().st_size,
                earlier=len(files) - 1,
            )
        )
    return samples


def fitting(samples: list[Sample], most: int = MOST_BYTES) -> tuple[list[Sample], list[Sample]]:
    """Those that go into the page, the smallest first; and those that are left out."""
    kept: set[Path] = set()
    total = 0
    for sample in sorted(samples, key=lambda one: one.bytes):
        total += sample.bytes
        if total <= most:
            kept.add(sample.path)
    return (
        [one for one in samples if one.path in kept],
        [one for one in samples if one.path not in kept],
    )
