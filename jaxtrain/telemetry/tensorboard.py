"""Writes TensorBoard event files in the calling thread.

``tensorboardX.SummaryWriter`` writes in a thread that ends after a failed write; later events then
block forever. So only tensorboardX's messages and checksums are used.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionStartInfo
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.record_writer import masked_crc32c

from jaxtrain.storage.atomic import Appended, write_whole
from jaxtrain.telemetry.events import Metrics, Rewound, Sample
from jaxtrain.telemetry.images import Encoded

_VERSION = "brain.Event:2"

# TensorBoard reads the files of a folder in the order of their names and keeps the first value of a
# tag. So this file comes first, and a resumed run replaces it.
_CONFIG = "events.out.tfevents.0000000000.config"


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
    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        field = start.hparams[name]
        if isinstance(value, bool):
            field.bool_value = value
        elif isinstance(value, int | float):
            field.number_value = value
        else:
            field.string_value = value if isinstance(value, str) else json.dumps(value)
    content = HParamsPluginData(session_start_info=start, version=0).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    metadata = SummaryMetadata(plugin_data=plugin)
    tag = "_hparams_/session_start_info"
    summary = Summary(value=[Summary.Value(tag=tag, metadata=metadata)])
    events = (
        Event(wall_time=time.time(), file_version=_VERSION),
        Event(wall_time=time.time(), step=0, summary=summary),
    )
    folder.mkdir(exist_ok=True)
    write_whole(folder / _CONFIG, b"".join(_framed(one.SerializeToString()) for one in events))


class TensorBoard:
    """Writes metrics, images, and texts of a run as TensorBoard event files; process 0 only.

    Each start of a run adds a file to the same folder.
    """

    name = "tensorboard"
    takes = (Metrics, Sample, Rewound)

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "tensorboard"
        self._file: Appended | None = None
        self._head: list[Event] = []
        self._purge_step: int | None = None

    def handle(self, event: Metrics | Sample | Rewound) -> None:
        """Appends an event; after a rewind, to a new file that hides later steps of older files."""
        if isinstance(event, Rewound):
            if any(self._folder.glob("*tfevents*")):
                self._purge_step = event.step + 1
                self.close()
                self._file = None
        elif isinstance(event, Metrics):
            self._append(
                event.step,
                [Summary.Value(tag=tag, simple_value=one) for tag, one in event.values.items()],
            )
        elif event.image is None:
            self._append(event.step, [_text(event.name, str(event.content))])
        else:
            self._append(event.step, [_image(event.name, event.image)])

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, step: int, values: list[Any]) -> None:
        if self._file is None:
            self._file = self._new_file()
        while self._head:
            self._file.append(_framed(self._head[0].SerializeToString()))
            self._head.pop(0)
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_framed(event.SerializeToString()))

    def _new_file(self) -> Appended:
        self._head = [Event(wall_time=time.time(), file_version=_VERSION)]
        if self._purge_step is not None:
            # TensorBoard hides this step and later ones of earlier files.
            start = SessionLog(status=SessionLog.START)
            self._head.append(
                Event(wall_time=time.time(), step=self._purge_step, session_log=start)
            )
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        return Appended(self._folder / name)


def _image(name: str, image: Encoded) -> Any:
    shown = Summary.Image(
        height=image.height, width=image.width, colorspace=3, encoded_image_string=image.shown
    )
    return Summary.Value(tag=name, image=shown)


def _text(name: str, text: str) -> Any:
    """Encodes a text as a code block, since TensorBoard renders texts as Markdown."""
    as_code = "".join(f"    {line}\n" for line in text.split("\n"))
    one = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[as_code.encode()], tensor_shape=one)
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _framed(message: bytes) -> bytes:
    """Encodes a TFRecord: length, its checksum, message, its checksum.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
    """
    length = struct.pack("<Q", len(message))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + checksums[0] + message + checksums[1]
