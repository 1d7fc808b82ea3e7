"""Indexing by packets: good files are good, shortened ones are named."""

import types
from pathlib import Path
from typing import Any

import av
import pytest
import sample_videos as sample

from jaxtrain.data import video_packets
from jaxtrain.errors import BadExample


def test_what_a_scan_tells(tmp_path: Path) -> None:
    scan = video_packets.scan(str(sample.write(tmp_path / "a.mp4", 30, g="10", sc_threshold="0")))
    assert (scan.frames, scan.width, scan.height, scan.fps) == (30, sample.WIDTH, sample.HEIGHT, 25)
    assert [key.frame for key in scan.keyframes] == [0, 10, 20]
    assert (scan.rotation, scan.pixel_aspect) == (0, 1.0)


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "webm", "avi", "ts", "flv"])
def test_good_files_of_every_container_are_good(tmp_path: Path, ending: str) -> None:
    codec = "libvpx-vp9" if ending == "webm" else "libx264"
    path = sample.write(tmp_path / f"a.{ending}", 30, codec=codec, g="12")
    assert video_packets.scan(str(path)).frames == 30


def test_files_that_are_no_videos_are_named(tmp_path: Path) -> None:
    empty, text, folder = tmp_path / "e.mp4", tmp_path / "t.mp4", tmp_path / "f.mp4"
    empty.touch()
    text.write_text("this is a shopping list\n" * 40)
    folder.mkdir()
    for path, reason in [
        (empty, "is empty"),
        (text, "Invalid data"),
        (folder, "is not a file"),
        (tmp_path / "gone.mp4", "No such file"),
    ]:
        with pytest.raises(BadExample, match=reason) as error:
            video_packets.scan(str(path))
        assert error.value.path == str(path)


def test_truncated_mp4_with_its_index_first_is_broken(tmp_path: Path) -> None:
    path = sample.write(
        tmp_path / "a.mp4", sample.busy(40), container_options={"movflags": "faststart"}, g="10"
    )
    assert video_packets.scan(str(path)).frames == 40
    with pytest.raises(BadExample, match=r"cut short: it holds \d\d of 40 promised frames"):
        video_packets.scan(str(sample.truncate(path, 0.6)))


def test_truncated_mkv_without_declared_count_is_broken(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", sample.busy(40), g="10")
    assert video_packets.scan(str(path)).frames == 40
    with pytest.raises(BadExample, match=r"cut short: it holds .* of 1\.60 promised seconds"):
        video_packets.scan(str(sample.truncate(path, 0.6)))


def test_a_hole_in_an_mkv_is_found(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", sample.busy(60), codec="libvpx", g="10", crf="10")
    size = path.stat().st_size
    with pytest.raises(BadExample, match="has holes"):
        video_packets.scan(str(sample.garble(path, 0.4, size // 8)))


def test_an_edit_list_that_shows_less_is_no_damage(tmp_path: Path) -> None:
    path = sample.shorten_edit(sample.write(tmp_path / "a.mp4", 60, g="10"), 0.5)
    assert 28 <= video_packets.scan(str(path)).frames <= 34


def test_tags_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 20, title="QQQQ")
    data = path.read_bytes()
    assert data.count(b"QQQQ") == 1
    path.write_bytes(data.replace(b"QQQQ", b"\xff\xfe\xe9Q"))
    assert video_packets.scan(str(path)).frames == 20


@pytest.mark.parametrize(
    ("missing", "promised", "broken"),
    [(2, 10, False), (3, 10, True), (2, 149, False), (3, 151, False), (4, 150, True)],
)
def test_the_rule_for_missing_frames(missing: int, promised: int, broken: bool) -> None:
    assert video_packets.too_few(missing, promised) is broken


def test_the_best_of_two_streams_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "two.mp4"
    sizes = [(32, 48), (64, 96)]
    with av.open(str(path), "w") as container:
        streams: list[Any] = []
        for height, width in sizes:
            stream: Any = container.add_stream("libx264", rate=25)
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            streams.append(stream)
        for number in range(20):
            for stream, size in zip(streams, sizes, strict=True):
                picture = av.VideoFrame.from_ndarray(sample.numbered(number, *size), "rgb24")
                container.mux(stream.encode(picture))
        for stream in streams:
            container.mux(stream.encode())
    scan = video_packets.scan(str(path))
    assert (scan.stream, scan.width, scan.height) == (1, 96, 64)


class _Packet(types.SimpleNamespace):
    def __bytes__(self) -> bytes:
        return bytes(self.data)


@pytest.mark.parametrize(
    ("codec", "first_byte", "discard", "shown"),
    [
        ("vp8", 0x10, False, True),
        ("vp8", 0x01, False, False),
        ("h264", 0x01, False, True),
        ("h264", 0x01, True, False),
    ],
)
def test_hidden_packets_show_no_frame(
    codec: str, first_byte: int, discard: bool, shown: bool
) -> None:
    packet: Any = _Packet(is_discard=discard, data=[first_byte, 0])
    stream: Any = types.SimpleNamespace(codec_context=types.SimpleNamespace(name=codec))
    assert video_packets.shows_frame(packet, stream) is shown
