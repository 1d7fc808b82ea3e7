"""Records a run with W&B: metrics, config, and samples.

An offline run is a folder for each start, which is complete only when the start has ended: W&B
writes it in blocks of 32 KiB, and a kill loses the last one. So the next start removes the folder
of a start that was killed, and sends its rows again.
"""

import html
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import wandb

from jaxtrain.errors import RUN_AGAIN
from jaxtrain.telemetry.recorder import PROJECT, Info, Row

_COMPLETE = "complete"  # an empty file in the folder of an offline run


class WandB:
    """A run of W&B; offline with ``WANDB_MODE=offline``, or without a login."""

    keeps = False

    def __init__(self, info: Info) -> None:
        advice = ""
        wandb.setup(wandb.Settings(silent=True))  # prompts for no login
        if wandb.run is not None:  # it has failed, and wandb.init would return it again
            wandb.run.finish(exit_code=1)
        for folder in (info.directory / "wandb").glob(f"offline-run-*-{info.id}"):
            of_this_run = re.fullmatch(rf"offline-run-\d{{8}}_\d{{6}}-{info.id}", folder.name)
            if of_this_run and not folder.is_symlink() and not (folder / _COMPLETE).exists():
                shutil.rmtree(folder)
        try:
            self._run = _init(info, None)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            if "API key" not in str(error):
                raise
            advice = "not logged in (set WANDB_API_KEY, or run wandb login): "
            self._run = _init(info, "offline")
        if self._run.offline:
            self.last = info.sent
            self.destination = (
                f"{advice}recording offline, as run {info.id}; upload with: "
                f"wandb sync {shlex.quote(str(info.directory / 'wandb'))}/offline-run-*"
            )
        else:
            self.last = self._run.starting_step - 1  # the server knows it
            self.destination = f"run {self._run.name} at {self._run.url}"

    def record(self, row: Row) -> None:
        """Sends a row."""
        media = {f"samples/{name}": _media(path) for name, path in row.samples.items()}
        self._run.log(row.values | media, step=row.step, commit=True)

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run."""
        if code == RUN_AGAIN:
            self._run.mark_preempting()
        self._run.finish(exit_code=code)
        if self._run.offline:
            (Path(self._run.dir).parent / _COMPLETE).touch()


def _init(info: Info, mode: Any) -> Any:
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=info.id,
        name=os.environ.get("WANDB_NAME", info.name),
        dir=info.directory,
        config=dict(info.config),
        resume="allow",
        mode=mode,
        settings=wandb.Settings(console="off", silent=True, save_code=False),
    )


def _media(path: Path) -> Any:
    match path.suffix:
        case ".png":
            return wandb.Image(str(path))
        case ".mp4":
            return wandb.Video(str(path), format="mp4")
    return wandb.Html(f"<pre>{html.escape(path.read_text())}</pre>", inject=False)
