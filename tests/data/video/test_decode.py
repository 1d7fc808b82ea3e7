"""Decoding distinguishes broken from intact files; single frames equal those of a full decoding."""

import itertools
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import decode, packets
from jaxtrain.errors import BadExample


def test_the_packets_between_a_keyframe_and_a_clip_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(sample.write(tmp_path / "a.mp4", sample.busy(80), g="40"))
    scan = packets.scan(path)
    assert [key.frame for key in scan.keyframes] == [0, 40]
    with av.open(path) as container:
        sizes = [packet.size for packet in container.demux(video=0) if packet.size]
    limit = sum(sizes[:20]) + 20 * decode._PACKET_BYTES
    monkeypatch.setattr(decode, "_MAX_HELD_BYTES", limit)
    monkeypatch.setattr(decode, "_LOOKAHEAD", 2)
    assert len(sample.decoded(path, scan, [2, 3])) == 2
    with pytest.raises(BadExample) as refused:
        sample.decoded(path, scan, [30, 31])
    assert str(refused.value) == (
        f"{path}: the packets between its keyframe at frame 0 and frame 31 take more than "
        f"{limit:,} bytes: encode it with a keyframe every few seconds"
    )


def test_a_garbled_frame_is_not_returned(tmp_path: Path) -> None:
    """The effect of noise depends on its position in the stream, which depends on the processor."""
    path = sample.write(tmp_path / "a.mp4", sample.busy(40), g="40")
    whole = path.read_bytes()
    reasons = []
    for at, length in itertools.product(np.arange(0.3, 0.9, 0.03), (20, 400)):
        path.write_bytes(whole)
        garbled = str(sample.garble(path, at, length))
        try:
            scan = packets.scan(garbled)
        except BadExample:  # opening a file decodes part of it
            continue
        broken = decode.verify(garbled, scan).broken
        if broken is not None:
            reasons.append(broken)
            with pytest.raises(BadExample, match=r"frame \d+ of 40 cannot be decoded"):
                sample.decoded(garbled, scan, list(range(40)))
    assert any("is corrupt" in reason for reason in reasons), reasons
    assert any("decoding fails" in reason for reason in reasons), reasons


def test_hevc_that_references_a_lost_frame_is_broken(tmp_path: Path) -> None:
    options: Any = {"x265-params": "keyint=40:bframes=0:log-level=none"}
    path = sample.write(tmp_path / "a.mkv", sample.busy(40), codec="libx265", **options)
    dropped = str(sample.drop_packet(path, 15))
    broken = decode.verify(dropped, packets.scan(dropped)).broken
    assert broken is not None
    assert broken.startswith("decoding fails after 15 of 39 frames")


def test_many_missing_frames_make_a_file_broken_and_a_few_do_not(tmp_path: Path) -> None:
    path = str(sample.write(tmp_path / "a.avi", 30))
    scan = packets.scan(path)._replace(keyframes=())
    assert decode.verify(path, scan._replace(frames=32)).missing == (30, 31)
    broken = decode.verify(path, scan._replace(frames=34)).broken
    assert broken == "only 30 of 34 frames can be decoded"
