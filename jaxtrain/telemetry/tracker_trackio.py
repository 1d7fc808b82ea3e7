"""Records a run with Trackio: metrics, config, and samples."""

import os
from pathlib import Path
from typing import Any

import trackio
import trackio.run
import trackio.utils

from jaxtrain import config
from jaxtrain.telemetry.recorder import PROJECT, Info, Row

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """A run of Trackio, found by its name."""

    keeps = True  # at the latest half a second later; and Trackio knows its last step

    def __init__(self, info: Info) -> None:
        for module in (trackio, trackio.run, trackio.utils):
            # They would print between the lines of the run.
            vars(module)["print"] = lambda *_, **__: None
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # The id, because Trackio identifies a run by its name.
        name = f"{info.name}-{info.id}"
        self._run = trackio.init(
            project,
            name,
            resume="allow",
            config=config.flat(info.config),
            embed=False,
            auto_log_gpu=False,  # the run's own metrics have them
            auto_log_cpu=False,
        )
        self.last = self._run._next_step - 1
        remote = any(map(os.environ.get, _REMOTE))
        then = "sent to a server" if remote else f"show it with: trackio show --project {project}"
        self.destination = f"run {name} of project {project}, {then}"

    def record(self, row: Row) -> None:
        """Sends a row."""
        media = {f"samples/{name}": _media(path) for name, path in row.samples.items()}
        self._run.log(row.values | media, step=row.step)

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run."""
        self._run.finish()


def _media(path: Path) -> Any:
    if path.suffix == ".txt":
        return trackio.Markdown("".join(f"    {line}\n" for line in path.read_text().split("\n")))
    return (trackio.Image if path.suffix == ".png" else trackio.Video)(path)
