"""``samples/``: the images, clips and texts that validations produce."""

from pathlib import Path

from jaxtrain.storage.atomic import write_whole
from jaxtrain.telemetry.events import Sample


class SampleFiles:
    """Writes each sample as a file: ``.png``, ``.mp4`` or ``.txt``."""

    name = "samples"
    takes = (Sample,)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def handle(self, event: Sample) -> None:
        """Writes a sample."""
        path = self._directory / event.file
        path.parent.mkdir(exist_ok=True)
        if isinstance(event.content, str):
            write_whole(path, event.content)
        elif event.image is not None:
            write_whole(path, event.image.file)

    def close(self) -> None:
        """Does nothing: each file is complete."""
