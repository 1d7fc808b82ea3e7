"""Writes ``samples/``: the images, clips, and texts that validations produce."""

import contextlib
import re
from pathlib import Path

from jaxtrain.storage.atomic import write_whole
from jaxtrain.telemetry.events import Rewound, Sample

FOLDER = "samples"

_FILE = re.compile(r"[a-z0-9_]+_([1-9][0-9]*)\.(png|mp4|txt)")  # exactly what Sample.file makes
# Samples that a full disk does not take wait in memory, up to this size.
_MAX_WAITING_BYTES = 2**26


class SampleFiles:
    """Writes each sample as a file: ``.png``, ``.mp4`` or ``.txt``.

    Samples that cannot be written are retried with the next one and at the end of the run. After a
    rollback, the samples of abandoned steps are removed.
    """

    name = FOLDER
    takes = (Sample, Rewound)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: dict[Path, bytes] = {}
        self._last: int | None = None  # files of later steps must still be removed

    def handle(self, event: Sample | Rewound) -> None:
        """Writes a sample, or removes the samples of abandoned steps.

        Raises:
            OSError: some samples could not be written or removed; the next call retries them.
        """
        if isinstance(event, Rewound):
            last = event.step if event.validated else event.step - 1
            self._last = last if self._last is None else min(last, self._last)
            self._waiting = {p: c for p, c in self._waiting.items() if (step_of(p) or 0) <= last}
        else:
            content = event.image.file if event.image else str(event.content).encode()
            self._waiting[self._directory / event.file] = content
        self._settle()

    def close(self) -> None:
        """Retries pending writes once."""
        with contextlib.suppress(OSError):  # the event log has reported it
            self._settle()

    def _settle(self) -> None:
        if self._last is not None:  # first, or it would remove what is written after it
            _remove_after(self._directory / FOLDER, self._last)
            self._last = None
        failure: OSError | None = None
        for path, data in list(self._waiting.items()):
            try:
                path.parent.mkdir(exist_ok=True)
                write_whole(path, data)
            except OSError as error:
                failure = error
            else:
                del self._waiting[path]
        while sum(map(len, self._waiting.values())) > _MAX_WAITING_BYTES:
            del self._waiting[next(iter(self._waiting))]
        if failure is not None:
            raise failure


def _remove_after(folder: Path, last: int) -> None:
    """Removes the samples of later steps, and no file that may be another's: nothing by a link."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None and step > last and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def step_of(path: Path) -> int | None:
    """Returns the step of a sample file; None for any other file."""
    match = _FILE.fullmatch(path.name)
    return None if match is None else int(match[1])
