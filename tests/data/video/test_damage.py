"""A damaged frame never reaches a piece: each frame of a damaged file's pieces is an intact one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import pieces

FRAMES = 60
SETTINGS = pieces.Settings(
    height=sample.HEIGHT,
    width=sample.WIDTH,
    min_crop_scale=1,
    frames=16,
    min_frames=4,
    min_side=16,
    split_at_cuts=False,
)
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


def luma(frame: av.VideoFrame) -> np.ndarray:
    return frame.to_ndarray()[: frame.height].astype(float)


def intact_frames(path: Path) -> np.ndarray:
    """Returns the brightness of the frames as an encoder of pieces receives it."""
    frames = sample.decoded(path)
    shrink = pieces.shrinking(frames[0].look, SETTINGS)
    return np.stack([luma(shrink(frame.picture)) for frame in frames])


def numbers_of(frames: np.ndarray, intact: np.ndarray) -> list[int]:
    """Returns which intact frame each frame is, of which all are noise."""
    numbers = []
    for place, frame in enumerate(frames):
        errors = np.square(intact - frame).mean((1, 2))
        number = int(errors.argmin())
        psnr = 10 * np.log10(255**2 / errors[number])
        assert psnr > 35, f"frame {place} of the pieces is damaged: {psnr:.1f} dB to {number}"
        numbers.append(number)
    return numbers


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
def test_the_pieces_of_a_damaged_file_are_intact(
    tmp_path: Path, name: str, options: dict[str, Any], damage: Damage
) -> None:
    path = sample.write(tmp_path / name, sample.busy(FRAMES), **options)
    intact = intact_frames(path)
    assert len(intact) == FRAMES
    path.write_bytes(damage(path.read_bytes(), _offset(path, 33) + 4))
    (tmp_path / "cut").mkdir()
    cut = pieces.cut(str(path), None, tmp_path / "cut", SETTINGS)
    made = list[int]()
    for number, frames in enumerate(cut.pieces):
        with av.open(str(tmp_path / f"cut/{number:05}.mp4")) as container:
            numbers = numbers_of(np.stack([*map(luma, container.decode(video=0))]), intact)
        assert len(numbers) == frames
        # Noise may turn a B frame into a P frame, which is shown, and dropped, after the next one.
        most = 2 if options is MPEG4 else 1
        assert 1 <= np.diff(numbers).min() <= np.diff(numbers).max() <= most, "a frame is missing"
        made += numbers
    assert cut.damage, "the damage is not noticed"
    assert made == sorted(set(made))
    assert made[:16] == list(range(16))
