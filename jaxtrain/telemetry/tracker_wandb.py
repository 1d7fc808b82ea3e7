"""Records a run with W&B: metrics, config, and samples.

W&B drops rows whose own step goes back, as ours does after a rollback. So W&B's step, ``_step``, is
the number of the row, and ours is the metric ``step``, the x axis of all others.
"""

import html
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as pb

from jaxtrain.errors import RUN_AGAIN
from jaxtrain.telemetry.tracker_process import PROJECT, Info, Row


class WandB:
    """A run of W&B; offline with ``WANDB_MODE=offline``, or without a login.

    Args:
        info: of the run.
    """

    def __init__(self, info: Info) -> None:
        advice = ""
        try:
            self._run = _init(info, None)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            if "API key" not in str(error):
                raise
            advice = "not logged in (set WANDB_API_KEY, or run wandb login): "
            self._run = _init(info, "offline")
        for names in ("train/*", "val/*", "samples/*"):
            self._run.define_metric(names, step_metric="step")
        folder = info.directory / "wandb"
        if self._run.offline:
            self.arrived = 1 + max((number for number, _ in rows(folder, info.id)), default=-1)
            self.where = (
                f"{advice}recording offline, as run {info.id}; upload with: "
                f"wandb sync {shlex.quote(str(folder))}/offline-run-*"
            )
        else:
            self.arrived = self._run.step
            self.where = f"run {self._run.name} at {self._run.url}"

    def record(self, first: int, rows: Sequence[Row]) -> None:
        """Sends rows, each with the samples of its step."""
        for number, row in enumerate(rows, first):
            media = {f"samples/{p.stem.rpartition('_')[0]}": _media(p) for p in row.samples}
            self._run.log({"step": row.step, **row.values, **media}, step=number, commit=True)

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run."""
        if code == RUN_AGAIN:
            self._run.mark_preempting()
        self._run.finish(exit_code=code)


def _init(info: Info, mode: Any) -> Any:
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=info.id,
        name=os.environ.get("WANDB_NAME", info.name),
        dir=info.directory,
        config=dict(info.config),
        resume="allow",
        mode=mode,
        settings=wandb.Settings(
            console="off", silent=True, save_code=False, x_stats_pid=os.getppid()
        ),
    )


def _media(path: Path) -> Any:
    match path.suffix:
        case ".png":
            return wandb.Image(str(path))
        case ".mp4":
            return wandb.Video(str(path), format="mp4")
    return wandb.Html(f"<pre>{html.escape(path.read_text())}</pre>", inject=False)


def rows(folder: Path, run: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows in W&B's files of a run: ``_step``, and values by name, as JSON.

    Args:
        folder: ``wandb/`` of the run directory.
        run: its id.
    """
    for path in sorted(folder.glob(f"*run-*-{run}/run-{run}.wandb")):
        for record in _records(path.read_bytes()):
            message = pb.Record.FromString(record)  # type: ignore[attr-defined]
            if message.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): item.value_json
                    for item in message.history.item
                }
                number = json.loads(values.get("_step", str(message.history.step.num)))
                yield number, values


def _records(content: bytes) -> Iterator[bytes]:
    """Yields the complete records of a file in LevelDB's log format.

    Blocks of 32 KiB hold pieces of records: checksum (4 bytes), length (2), kind (1: complete, 2:
    first, 3: middle, 4: last), data. See
    https://github.com/google/leveldb/blob/main/doc/log_format.md. W&B's file begins with 7 bytes.
    """
    position, parts = 7, b""
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        piece = content[position + 7 : position + 7 + length]
        position += 7 + length
        if len(piece) < length or kind not in (1, 2, 3, 4):
            return
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            yield parts
