"""Records a run with Trackio: metrics, config, and samples.

Trackio keeps all rows; a repeated step is in a later row.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from jaxtrain import config
from jaxtrain.telemetry.tracker_process import PROJECT, Info, Row

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """A run of Trackio, found by its name.

    Args:
        info: of the run.
    """

    def __init__(self, info: Info) -> None:
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # The id, because Trackio identifies a run by its name.
        name = f"{info.name}-{info.id}"
        self._run = trackio.init(
            project, name, resume="allow", config=config.flat(info.config), embed=False
        )
        if any(map(os.environ.get, _REMOTE)):
            # What it could not send, Trackio stores here, and sends it when it is opened again.
            self.arrived = info.sent
            self.where = f"run {name} of project {project}, sent to a server"
        else:
            self.arrived = len(SQLiteStorage.get_logs(project, name, run_id=self._run.id))
            self.where = f"run {name}; show it with: trackio show --project {project}"

    def record(self, first: int, rows: Sequence[Row]) -> None:
        """Sends rows, each with the samples of its step."""
        for row in rows:
            media = {f"samples/{p.stem.rpartition('_')[0]}": _media(p) for p in row.samples}
            self._run.log(row.values | media, step=row.step)

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run."""
        trackio.finish()


def _media(path: Path) -> Any:
    if path.suffix == ".txt":
        return trackio.Markdown("".join(f"    {line}\n" for line in path.read_text().split("\n")))
    return (trackio.Image if path.suffix == ".png" else trackio.Video)(path)
