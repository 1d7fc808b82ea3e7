"""Scanning packets: intact files are accepted, truncated ones are reported."""

import socket
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import decode, packets, pieces, reader
from jaxtrain.data.video.reading import Video
from jaxtrain.errors import BadExample, InputError


def test_the_result_of_a_scan(tmp_path: Path) -> None:
    scan = packets.scan(str(sample.write(tmp_path / "a.mp4", 30, g="10", sc_threshold="0")))
    assert (scan.frames, scan.width, scan.height, scan.fps) == (30, sample.WIDTH, sample.HEIGHT, 25)
    assert [key.frame for key in scan.keyframes] == [0, 10, 20]
    assert (scan.rotation, scan.pixel_aspect) == (0, 1.0)


def test_files_that_are_not_videos_are_reported(tmp_path: Path) -> None:
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
            packets.scan(str(path))
        assert error.value.path == str(path)
    assert isinstance(error.value.__cause__, FileNotFoundError)  # so it is tried again


def test_truncated_mp4_with_its_index_first_is_broken(tmp_path: Path) -> None:
    path = sample.write(
        tmp_path / "a.mp4", sample.busy(40), container_options={"movflags": "faststart"}, g="10"
    )
    assert packets.scan(str(path)).frames == 40
    with pytest.raises(BadExample, match=r"is truncated: it has \d\d of 40 declared frames"):
        packets.scan(str(sample.truncate(path, 0.6)))


def test_truncated_mkv_without_declared_count_is_broken(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", sample.busy(40), g="10")
    assert packets.scan(str(path)).frames == 40
    with pytest.raises(BadExample, match=r"is truncated: it has .* of 1\.60 declared seconds"):
        packets.scan(str(sample.truncate(path, 0.6)))


def test_a_gap_in_an_mkv_is_found(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", sample.busy(60), codec="libvpx", g="10", crf="10")
    size = path.stat().st_size
    with pytest.raises(BadExample, match="has gaps"):
        packets.scan(str(sample.garble(path, 0.4, size // 8)))


def test_an_edit_list_that_hides_frames_is_not_damage(tmp_path: Path) -> None:
    path = sample.shorten_edit(sample.write(tmp_path / "a.mp4", 60, g="10"), 0.5)
    assert 28 <= packets.scan(str(path)).frames <= 34


def test_metadata_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 20, title="QQQQ")
    data = path.read_bytes()
    assert data.count(b"QQQQ") == 1
    path.write_bytes(data.replace(b"QQQQ", b"\xff\xfe\xe9Q"))
    assert packets.scan(str(path)).frames == 20


@pytest.mark.parametrize(
    ("missing", "promised", "broken"),
    [(2, 10, False), (3, 10, True), (3, 151, False), (4, 150, True)],
)
def test_the_rule_for_missing_frames(missing: int, promised: int, broken: bool) -> None:
    assert packets.too_few(missing, promised) is broken


def test_the_larger_of_two_streams_is_used(tmp_path: Path) -> None:
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
    scan = packets.scan(str(path))
    assert (scan.stream, scan.width, scan.height) == (1, 96, 64)


@pytest.mark.parametrize(
    ("codec", "data", "shown"),
    [
        ("h264", b"1", True),
        ("vp8", b"\x10", True),
        ("vp8", b"\x01", False),
        ("vp9", b"\x82\x00", True),  # a keyframe of profile 0
        ("vp9", b"\x86\x00", True),  # a predicted frame
        ("vp9", b"\x84\x00", False),  # a hidden one, in a packet of its own
        ("vp9", b"\x88\x00", True),  # one that was decoded before
        ("vp9", b"\xb3\x00", True),  # profile 3
        ("vp9", b"\xb2\x00", False),
        ("vp9", b"\x84\x00" + b"\xc1\x01\x01\xc1", True),  # a superframe of two
        ("vp9", b"\x84\x00" + b"\x00\x01\x01\xc1", False),  # ends like one
    ],
)
def test_hidden_packets_show_no_frame(codec: str, data: bytes, shown: bool) -> None:
    stream: Any = types.SimpleNamespace(codec_context=types.SimpleNamespace(name=codec))
    assert packets.shows_frame(av.Packet(data), stream) is shown


def test_a_path_is_never_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = sample.write(tmp_path / "a.mp4", 12).read_bytes()
    names = [
        "12:30.mp4",
        "concat:a.mp4|a.mp4",
        "subfile,,start,1,end,2,,:a.mp4",
        "data:x",
        "pipe:0",
    ]
    for name in names:
        Path(name).write_bytes(data)
        assert packets.scan(name).frames == 12
        assert len(list(Video(Path(name)).images())) == 12
        tar = Path(f"tar:{name}")
        tar.write_bytes(b"x" * 100 + data + b"y" * 100)
        span = packets.Span(str(tar), 100, len(data))
        assert packets.scan("tar.tar/a.mp4", span).frames == 12
    with pytest.raises(BadExample, match="is not a valid file name"):
        packets.scan("a\0.mp4")


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{}'\n",
    ],
)
def test_a_playlist_opens_no_connection(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.mp4"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        for scheme in ("http", "tcp", "async:http"):
            path.write_text(text.format(f"{scheme}://127.0.0.1:{server.getsockname()[1]}/a.ts"))
            with pytest.raises(BadExample):
                packets.scan(str(path))
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_playlist_reads_no_other_file(tmp_path: Path) -> None:
    sample.write(tmp_path / "b.mp4", 3)
    path = tmp_path / "a.mp4"
    for name in ("b.mp4", "a.mp4"):  # itself: until no more files can be opened
        path.write_text(f"ffconcat version 1.0\nfile {name}\n")
        with pytest.raises(BadExample, match="its format is damaged or not supported"):
            packets.scan(str(path))


def test_ffmpeg_knows_the_formats() -> None:
    assert not set(reader.FORMATS) - set(av.formats_available)


def test_a_declared_size_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(sample.write(tmp_path / "a.mp4", 12))
    for module in (packets, reader):
        monkeypatch.setattr(module, "MAX_PIXELS", 64 * 128)  # the decoder pads
    assert packets.scan(path).frames == 12
    monkeypatch.setattr(reader, "MAX_PIXELS", 64 * 96 - 1)
    with pytest.raises(BadExample, match="is 96x64: more than 6,143 pixels per frame"):
        packets.scan(path)


@pytest.mark.long
def test_frames_that_grow_beyond_the_limit_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample.growing(tmp_path / "a.ts", (64, 96), (640, 960))
    info = packets.scan(str(path))
    assert decode.verify(str(path), info).broken is None
    for module in (packets, reader):
        monkeypatch.setattr(module, "MAX_PIXELS", 10_000)  # the decoder pads
    assert decode.verify(str(path), info).broken
    sample.decoded(str(path), info, [3, 4])
    with pytest.raises(BadExample, match="cannot be decoded"):
        sample.decoded(str(path), info, [3, 180])
    with pytest.raises(InputError, match=r"more than 10,000 pixels|cannot be decoded"):
        list(Video(path).images())
    (tmp_path / "out").mkdir()
    settings = pieces.Settings(split_at_cuts=False)
    cut = pieces.cut(str(path), None, tmp_path / "out", settings)
    assert cut.damage
    assert sum(cut.pieces) < info.frames


def test_pixels_with_an_extreme_aspect_ratio_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(20, 1)
        for number in range(12):
            picture = av.VideoFrame.from_ndarray(sample.numbered(number), "rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    with pytest.raises(BadExample, match="has pixels 20 times as wide as high"):
        packets.scan(str(path))


def test_an_unsupported_codec_is_reported(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", 12)
    data = path.read_bytes()
    assert data.count(b"V_MPEG4/ISO/AVC") == 1
    path.write_bytes(data.replace(b"V_MPEG4/ISO/AVC", b"V_NOBODY/ISO/AV"))
    with pytest.raises(BadExample, match="has no video stream with a supported codec"):
        packets.scan(str(path))
