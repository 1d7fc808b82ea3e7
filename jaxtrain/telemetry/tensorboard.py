"""Writes TensorBoard event files in the calling thread.

``tensorboardX.SummaryWriter`` writes in a thread that ends after a failed write; later events then
block forever. The writer below it is buffered: after a failed write, its file has half an event. So
only tensorboardX's messages and checksums are used.
"""

import json
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from jaxtrain.storage.atomic import Appended, write_whole
from jaxtrain.telemetry.events import Metrics, Rewound, Sample

# TensorBoard reads the files of a folder in the order of their names and keeps the first value of a
# tag. So this file comes first, and a resumed run replaces it.
_CONFIG = "events.out.tfevents.0000000000.config"

_STAMP = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes the config of a run for TensorBoard's "HParams" tab; replaces an older one.

    It names no metrics, so TensorBoard offers all metrics and config fields of all runs. If one run
    named some, TensorBoard would show only those, for all runs.

    Args:
        folder: ``tensorboard/`` of the run.
        values: config values by full name, such as ``"optim.peak_lr"``; JSON-able.

    Raises:
        OSError: it could not be written; an older one is kept.
    """
    hparams = {
        name: value if isinstance(value, str | bool | int | float) else json.dumps(value)
        for name, value in values.items()
    }
    _, start, _ = summary.hparams(hparams, {})
    folder.mkdir(exist_ok=True)
    write_whole(folder / _CONFIG, _version() + _framed(Event(step=0, summary=start)))


class TensorBoard:
    """Writes metrics, images, and texts of a run as TensorBoard event files; process 0 only.

    Each start of a run adds a file to the same folder, whose name comes after those before it.
    """

    name = "tensorboard"
    takes = (Metrics, Sample, Rewound)

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "tensorboard"
        name = f"{self._stamp():010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(self._folder / f"events.out.tfevents.{name}")
        self._begun = False

    def _stamp(self) -> int:
        """Returns a time that is later than those of all files, although the clock may go back."""
        names = [path.name for path in self._folder.glob("events.out.tfevents.*")]
        earlier = [int(match[1]) for name in names if (match := _STAMP.match(name))]
        return max([int(time.time()), *(stamp + 1 for stamp in earlier)])

    def handle(self, event: Metrics | Sample | Rewound) -> None:
        """Writes an event; after a rewind, TensorBoard hides the later steps of earlier events.

        Raises:
            OSError: it could not be written; it is written before the next one.
        """
        if isinstance(event, Rewound):
            if any(self._folder.glob("*tfevents*")):
                start = SessionLog(status=SessionLog.START)
                self._write(Event(step=event.step + 1, session_log=start))
            return
        if isinstance(event, Metrics):
            values = [Summary.Value(tag=tag, simple_value=v) for tag, v in event.values.items()]
            content = Summary(value=values)
        elif (image := event.image) is None:
            # As a code block, since TensorBoard renders texts as Markdown.
            lines = str(event.content).split("\n")
            content = summary.text(event.name, "".join(f"    {line}\n" for line in lines))
        else:
            encoded = Summary.Image(
                height=image.height,
                width=image.width,
                colorspace=3,
                encoded_image_string=image.preview,
            )
            content = Summary(value=[Summary.Value(tag=event.name, image=encoded)])
        self._write(Event(step=event.step, summary=content))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        head = b"" if self._begun else _version()
        self._begun = True
        self._file.append(head + _framed(event))


def _version() -> bytes:
    return _framed(Event(file_version="brain.Event:2"))


def _framed(event: Any) -> bytes:
    """Encodes an event that happens now as a TFRecord: length, checksum, message, checksum.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
    """
    event.wall_time = time.time()
    message = event.SerializeToString()
    length = struct.pack("<Q", len(message))
    checksums = [struct.pack("<I", masked_crc32c(field)) for field in (length, message)]
    return length + checksums[0] + message + checksums[1]
