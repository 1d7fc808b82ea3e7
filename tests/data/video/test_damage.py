"""A damaged frame never reaches a batch: each clip equals that of the intact file or is refused."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import packets
from jaxtrain.errors import BadExample

CLIP = 6
FRAMES = 60
Damage = Callable[[bytes, int], bytes]
"""Damages the bytes of a file from an offset on."""


def _noise(length: int) -> Damage:
    noise = np.random.default_rng(0).bytes(length)
    return lambda data, start: data[:start] + noise + data[start + length :]


def _zeros(length: int) -> Damage:
    return lambda data, start: data[:start] + bytes(length) + data[start + length :]


def _flipped(count: int) -> Damage:
    """Inverts every tenth byte."""

    def damage(data: bytes, start: int) -> bytes:
        changed = bytearray(data)
        for place in range(start, start + 10 * count, 10):
            changed[place] ^= 0xFF
        return bytes(changed)

    return damage


def _truncated(data: bytes, start: int) -> bytes:
    return data[:start]


def _offset(path: Path, packet: int) -> int:
    """Returns where a packet begins in a file."""
    with av.open(str(path)) as container:
        return [one.pos for one in container.demux(video=0) if one.size][packet] or 0


def clips(path: str) -> list[list[str] | None]:
    """Returns digests of the frames of each clip; None for one that is refused."""
    try:
        info = packets.scan(path)
    except BadExample:
        return []
    made: list[list[str] | None] = []
    for start in range(info.frames - CLIP + 1):
        try:
            frames = sample.decoded(path, info, range(start, start + CLIP))
        except BadExample:
            made.append(None)
            continue
        made.append([hashlib.sha256(one.to_ndarray().tobytes()).hexdigest() for one in frames])
    return made


H264: dict[str, Any] = {"codec": "libx264", "g": "20"}
HEVC: dict[str, Any] = {"codec": "libx265", "x265-params": "keyint=20:hash=1:log-level=none"}
MPEG4: dict[str, Any] = {"codec": "mpeg4", "g": "12", "bf": "2"}


@pytest.mark.parametrize(
    ("name", "options", "damage"),
    [
        ("noise.mp4", H264, _noise(2000)),
        ("zeros.mkv", H264 | {"g": "30"}, _zeros(1000)),
        ("zeros.ts", H264, _zeros(4096)),
        ("truncated.mkv", H264, _truncated),
        ("flipped.mp4", HEVC, _flipped(20)),
        ("noise.mkv", HEVC, _noise(200)),
        ("noise.mp4", MPEG4, _noise(600)),
        ("flipped.avi", MPEG4 | {"bf": "0"}, _flipped(50)),
        ("zeros.mpg", MPEG4 | {"codec": "mpeg2video"}, _zeros(4096)),
    ],
)
def test_a_clip_of_a_damaged_file_is_intact_or_refused(
    tmp_path: Path, name: str, options: dict[str, Any], damage: Damage
) -> None:
    path = sample.write(tmp_path / name, sample.busy(FRAMES), **options)
    intact = clips(str(path))
    assert None not in intact
    path.write_bytes(damage(path.read_bytes(), _offset(path, 33) + 4))
    made = clips(str(path))
    assert None in made or not made, "the damage is not noticed"
    frames = [clip[0] for clip in intact if clip] + (intact[-1] or [])[1:]
    for number, clip in enumerate(made):
        if clip is not None:  # frames of packets that are lost are not counted
            first = frames.index(clip[0])
            assert clip == frames[first : first + CLIP], f"clip {number} is damaged"
