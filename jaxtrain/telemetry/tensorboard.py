"""TensorBoard event files, written by the caller's own thread.

``tensorboardX.SummaryWriter`` hands events to a thread; after a failed write that thread is gone,
and the next events block the program for ever. So only tensorboardX's messages and checksums are
used.
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

_VERSION = "brain.Event:2"

# TensorBoard reads the files of a folder in the order of their names, and keeps of a tag what the
# first of them says. So this one comes first, and a run that goes on replaces it by its own.
_CONFIG = "events.out.tfevents.0000000000.config"


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes the config of a run for TensorBoard's tab "HParams", in place of an older one.

    Says nothing of the metrics: TensorBoard then offers all that the runs below its folder have,
    and the fields of all their configs. Where one run names them, it shows only those, of all runs.

    Args:
        folder: ``tensorboard/`` of the run.
        values: by full name, as ``"optim.peak_lr"``; JSON-able.

    Raises:
        OSError: an older one stays.
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


class Events:
    """One event file of a run; a resumed run adds another to the same folder.

    Args:
        folder: ``tensorboard/`` of the run.
        purge_step: TensorBoard hides what earlier files say about this step and later ones; None
            hides nothing.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(folder / name)
        self._head = [Event(wall_time=time.time(), file_version=_VERSION)]
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._head.append(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers, each under its own name.

        Raises:
            OSError: they are not in the file.
        """
        self._add(step, [Summary.Value(tag=tag, simple_value=one) for tag, one in values.items()])

    def image(self, step: int, name: str, png: bytes, height: int, width: int) -> None:
        """Adds a colour picture.

        Raises:
            OSError: it is not in the file.
        """
        picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._add(step, [Summary.Value(tag=name, image=picture)])

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text, shown as it is: TensorBoard takes texts for Markdown.

        Raises:
            OSError: it is not in the file.
        """
        as_code = "".join(f"    {line}\n" for line in text.split("\n"))
        one = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[as_code.encode()], tensor_shape=one)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        metadata = SummaryMetadata(plugin_data=plugin)
        self._add(step, [Summary.Value(tag=name, metadata=metadata, tensor=tensor)])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, step: int, values: list[Any]) -> None:
        while self._head:
            self._file.append(_framed(self._head[0].SerializeToString()))
            self._head.pop(0)
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_framed(event.SerializeToString()))


def _framed(message: bytes) -> bytes:
    """A record of the TFRecord format: length, its checksum, message, its checksum.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
    """
    length = struct.pack("<Q", len(message))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + checksums[0] + message + checksums[1]
