"""Reads TensorBoard event files back, checking lengths and checksums."""

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


def events(directory: Path) -> list[Any]:
    """All events of a run's TensorBoard folder; checks lengths and checksums."""
    found = []
    for path in sorted((directory / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            body = data[12 : 12 + length]
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(body)
            event = Event()
            event.ParseFromString(body)
            found.append(event)
            data = data[16 + length :]
    return found


def scalars(directory: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(directory)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
