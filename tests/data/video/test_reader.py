"""A video is read once, in order: each frame that is intact, and none that is not."""

import re
import socket
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import pieces, reader
from jaxtrain.data.video.reader import Break, Frame, Look, Reader, Span
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.video.reading import Video

HEVC = {"codec": "libx265", "preset": "ultrafast", "x265-params": "log-level=none:keyint=12"}


def read(path: Path) -> tuple[list[int], list[Break], list[Look]]:
    """Returns the numbers of the frames, the breaks, and the looks, in order."""
    numbers, breaks, looks = [], [], list[Look]()
    for item in Reader(str(path)):
        if isinstance(item, Frame):
            numbers.append(sample.number_of(item.picture.to_ndarray(format="rgb24")))
            if item.look not in looks[-1:]:
                looks.append(item.look)
        else:
            assert isinstance(item, Break)
            breaks.append(item)
    return numbers, breaks, looks


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "ts"])
def test_leading_frames_of_an_open_group_were_never_promised(tmp_path: Path, suffix: str) -> None:
    """HEVC, cut without encoding at a keyframe that frames before it in the display refer to."""
    options = HEVC | {
        "x265-params": "log-level=none:keyint=24:min-keyint=24:bframes=4:open-gop=1:"
        "no-scenecut=1:b-adapt=0"
    }
    whole = sample.write(tmp_path / "whole.mp4", 60, **options)
    with av.open(str(whole)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        second = [number for number, packet in enumerate(packets) if packet.is_keyframe][1]
    path = tmp_path / f"cut.{suffix}"
    sample.without_packets(whole, path, range(second))
    numbers, breaks, _ = read(path)
    assert numbers == list(range(24, 60))
    assert all(not item.reason for item in breaks)


def test_fields_in_packets_of_their_own_are_frames(tmp_path: Path) -> None:
    """MPEG-2 with interlaced fields; a decoder makes a frame of two fields."""
    path = sample.write(
        tmp_path / "a.ts", 30, codec="mpeg2video", flags="+ildct+ilme", top="1", b="2M", bf="0"
    )
    numbers, breaks, _ = read(path)
    assert numbers == list(range(30))
    assert breaks == []


@pytest.mark.parametrize("suffix", ["avi", "mp4", "mkv"])
def test_frames_that_are_not_coded_are_not_missing(tmp_path: Path, suffix: str) -> None:
    """As XviD writes a frame in which nothing moves: a header, whose frame players repeat."""
    images = [sample.numbered(number - (number % 5 == 4)) for number in range(60)]
    whole = sample.write(tmp_path / "whole.avi", images, codec="mpeg4", g="1000", bf="0")

    def change(number: int, packet: av.Packet) -> list[av.Packet]:
        if number % 5 < 4:
            return [packet]
        bits = "".join(f"{byte:08b}" for byte in bytes(packet)[:12])
        at = bits.index("0", 34) + 8  # behind the seconds, a marker, 5 bits of time, and a marker
        bits = bits[:at] + "00"  # not coded
        bits += "1" * (-len(bits) % 8)
        short = av.Packet(int(bits, 2).to_bytes(len(bits) // 8, "big"))
        short.pts, short.dts, short.duration = packet.pts, packet.dts, packet.duration
        short.time_base = packet.time_base
        return [short]

    numbers, breaks, _ = read(sample.copied(whole, tmp_path / f"a.{suffix}", change))
    assert len(numbers) >= 48
    assert numbers == sorted(numbers)
    assert breaks == []


def test_the_aspect_of_pixels_may_change(tmp_path: Path) -> None:
    """A broadcast whose program is 16:9 after an advertisement in 4:3."""
    data, aspects = b"", (Fraction(8, 9), Fraction(32, 27))  # of 96x64: 4:3 and 16:9
    for place, aspect in enumerate(aspects):
        images = [sample.numbered(number) for number in range(30 * place, 30 * place + 30)]
        mpeg = {"codec": "mpeg2video", "bf": "2", "pixel_aspect": aspect}
        path = sample.write(tmp_path / f"{place}.m2v", images, **mpeg)
        data += path.read_bytes()
    path = tmp_path / "both.m2v"
    path.write_bytes(data)
    numbers, _breaks, looks = read(path)
    assert numbers == list(range(60))
    assert [look.pixel_aspect for look in looks] == list(aspects)
    settings = pieces.Settings(height=64, width=96, min_frames=8, min_side=16, split_at_cuts=False)
    (tmp_path / "out").mkdir()
    cut = pieces.cut(str(path), None, tmp_path / "out", settings)
    assert sum(cut.pieces) + cut.left_out == 60
    sizes = set()
    for piece in (tmp_path / "out").iterdir():
        with av.open(str(piece)) as container:
            sizes.add((container.streams.video[0].height, container.streams.video[0].width))
    assert sizes == {(64, 86), (64, 114)}


def test_frames_that_become_interlaced_are_deinterlaced(tmp_path: Path) -> None:
    progressive = sample.write(tmp_path / "0.ts", 10, g="10", bf="0")
    fields = [np.full((64, 96, 3), 60, np.uint8) for _ in range(20)]
    for number, image in enumerate(fields):
        for field in (0, 1):
            left = (2 * number + field) * 3 % 72
            image[field::2, left : left + 24] = 220
    parameters = {"x264-params": "tff=1:log-level=none", "bf": "0", "g": "10", "crf": "4"}
    interlaced = sample.write(tmp_path / "1.ts", fields, **parameters)
    path = tmp_path / "both.ts"
    path.write_bytes(progressive.read_bytes() + interlaced.read_bytes())
    settings = pieces.Settings(
        height=64, width=96, min_frames=4, min_side=16, split_at_cuts=False, quantizer=1
    )
    (tmp_path / "out").mkdir()
    cut = pieces.cut(str(path), None, tmp_path / "out", settings)
    assert sum(cut.pieces) == 30
    with av.open(str(sorted((tmp_path / "out").iterdir())[-1])) as container:
        last = [frame.to_ndarray(format="gray").astype(int) for frame in container.decode(video=0)]
    combs = [np.abs(image[2:-2:2] - (image[1:-3:2] + image[3:-1:2]) / 2).mean() for image in last]
    stored = [image[..., 0].astype(int) for image in fields]
    before = np.abs(stored[5][2:-2:2] - (stored[5][1:-3:2] + stored[5][3:-1:2]) / 2).mean()
    assert before > 4
    assert max(combs[-10:]) < before / 4


@pytest.mark.parametrize("first", [True, False])
def test_a_poster_is_not_the_video(tmp_path: Path, first: bool) -> None:
    """A larger image of one frame, in a stream that is not marked as a cover."""
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        streams: dict[str, Any] = {}
        for kind in ("poster", "video") if first else ("video", "poster"):
            codec = {"poster": "mjpeg", "video": "libx264"}[kind]
            streams[kind] = container.add_stream(codec, rate=25)
        poster, video = streams["poster"], streams["video"]
        poster.height, poster.width, poster.pix_fmt = 360, 640, "yuvj420p"
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        image = av.VideoFrame.from_ndarray(sample.numbered(255, 360, 640), "rgb24")
        for packet in [*poster.encode(image.reformat(format="yuvj420p")), *poster.encode()]:
            container.mux(packet)
        for number in range(30):
            picture = av.VideoFrame.from_ndarray(sample.numbered(number), "rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode())
    assert read(path)[0] == list(range(30))


def test_forty_streams_are_read(tmp_path: Path) -> None:
    """A recording of a complete multiplex, whose video is the last stream."""
    path = tmp_path / "a.ts"
    with av.open(str(path), "w", format="mpegts") as container:
        sounds: list[Any] = [container.add_stream("mp2", rate=48_000) for _ in range(39)]
        video: Any = container.add_stream("libx264", rate=25)
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        for number in range(30):
            for sound in sounds if number < 20 else ():
                samples = np.zeros((1, 2 * 1152), np.int16)
                audio = av.AudioFrame.from_ndarray(samples, "s16", "stereo")
                audio.sample_rate, audio.pts = 48_000, 1152 * number
                audio.time_base = Fraction(1, 48_000)
                container.mux(sound.encode(audio))
            picture = av.VideoFrame.from_ndarray(sample.numbered(number), "rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode())
    assert read(path)[0] == list(range(30))


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the kind and the bytes of each box of an MP4 file."""
    at = 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at : at + size]
        at += size


def test_a_segment_whose_clock_starts_late_is_complete(tmp_path: Path) -> None:
    """A later part of a live recording (DASH, HLS) behind the header of the first one."""
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    whole = sample.write(tmp_path / "whole.mp4", 48, container_options=options, g="12", bf="0")
    data = whole.read_bytes()
    scale = struct.unpack_from(">I", data, data.index(b"mdhd") + 16)[0]
    made = b""
    for kind, box in boxes(data):
        if kind == b"moof":
            at = box.index(b"tfdt") + 8
            (ticks,) = struct.unpack_from(">Q", box, at)
            box = box[:at] + struct.pack(">Q", ticks + 3600 * scale) + box[at + 8 :]
        if kind in (b"ftyp", b"moov", b"moof", b"mdat"):
            made += box
    path = tmp_path / "late.mp4"
    path.write_bytes(made)
    numbers, breaks, _ = read(path)
    assert numbers == list(range(48))
    assert breaks == []


def with_box(path: Path, entry: bytes, box: bytes) -> Path:
    """Adds a box to the description of the codec of an MP4 file, whose index is at the end."""
    data = bytearray(path.read_bytes())
    at = data.rindex(entry) - 4
    (size,) = struct.unpack_from(">I", data, at)
    data[at + size : at + size] = box
    above = {b"moov": 8, b"trak": 8, b"mdia": 8, b"minf": 8, b"stbl": 8, b"stsd": 16}

    def grow(start: int, end: int) -> None:
        while start < end:
            length, kind = struct.unpack_from(">I4s", data, start)
            if start <= at < start + length:
                struct.pack_into(">I", data, start, length + len(box))
                if kind in above:
                    grow(start + above[kind], start + length + len(box))
                return
            start += length

    grow(0, len(data))
    path.write_bytes(bytes(data))
    return path


def box_of(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + kind + content


def test_lines_that_the_container_hides_are_cut_off(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mov", 20)
    aperture = struct.pack(">8I", 96, 1, 48, 1, 0, 1, 0, 1)  # 8 of 64 lines above and below
    numbers, _, (look,) = read(with_box(path, b"avc1", box_of(b"clap", aperture)))
    assert numbers == list(range(20))
    assert (look.width, look.height) == (96, 48)


def test_colors_of_dolby_vision_alone_are_refused(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 20, pix_fmt="yuv420p10le", **HEVC)
    settings = bytes([1, 0, 5 << 1, 1 << 3 | 0b101, 0]) + bytes(19)  # profile 5, level 1
    with_box(path, b"hev1", box_of(b"dvcC", settings))
    with pytest.raises(BadExample, match="colors of Dolby Vision's profile 5"):
        read(path)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_encrypted_files_are_named(tmp_path: Path, codec: str) -> None:
    key = "76a6c65c5ea762046bd749a2e632ccbb"
    path = sample.write(
        tmp_path / "a.mp4",
        20,
        codec=codec,
        container_options={
            "encryption_scheme": "cenc-aes-ctr",
            "encryption_key": key,
            "encryption_kid": key[::-1],
        },
    )
    with pytest.raises(BadExample, match="is encrypted: decrypt it first"):
        read(path)


def test_a_second_file_behind_the_first_one_is_named(tmp_path: Path) -> None:
    first, second = (sample.write(tmp_path / f"{name}.mp4", 20) for name in "ab")
    path = tmp_path / "joined.mp4"
    path.write_bytes(first.read_bytes() + second.read_bytes())
    numbers, breaks, _ = read(path)
    assert numbers == list(range(20))
    (item,) = breaks
    assert item.reason.startswith(f"has another file behind byte {first.stat().st_size:,}")


def test_a_file_without_its_index_is_cut_off(tmp_path: Path) -> None:
    path = sample.truncate(sample.write(tmp_path / "a.mp4", 20), 0.7)
    with pytest.raises(BadExample, match=r"it is cut off or damaged, and lacks its index \(moov\)"):
        read(path)


@pytest.mark.parametrize("suffix", ["mp4", "ts"])
def test_messages_of_cameras_do_not_count_as_damage(tmp_path: Path, suffix: str) -> None:
    """An SEI message of HEVC whose declared length is one byte too long, which players ignore."""
    options = HEVC | {"x265-params": "log-level=none:keyint=12:bframes=0:repeat-headers=1"}
    whole = sample.write(tmp_path / "whole.ts", 24, **options)
    message = bytes([39 << 1, 1, 4, 40]) + b"\xb5\x00\x31GA94" + bytes([1, 2, 3, 0x80])

    def change(number: int, packet: av.Packet) -> list[av.Packet]:
        del number
        data = b"\0\0\0\1".join([b"", message, bytes(packet).removeprefix(b"\0\0\0\1")])
        made = av.Packet(data)
        made.pts, made.dts, made.duration = packet.pts, packet.dts, packet.duration
        made.time_base, made.is_keyframe = packet.time_base, packet.is_keyframe
        return [made]

    numbers, breaks, _ = read(sample.copied(whole, tmp_path / f"a.{suffix}", change))
    assert numbers == list(range(24))
    assert breaks == []


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "webp"])
def test_an_image_is_a_video_of_one_frame(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"1.{suffix}"
    PIL.Image.fromarray(sample.numbered(77)).save(path)
    numbers, breaks, (look,) = read(path)
    assert (numbers, breaks) == ([77], [])
    assert (look.height, look.width) == (sample.HEIGHT, sample.WIDTH)
    settings = pieces.Settings(height=64, width=96, frames=1, min_frames=1, min_side=16)
    (tmp_path / "out").mkdir()
    assert pieces.cut(str(path), None, tmp_path / "out", settings).pieces == (1,)


CODECS: dict[str, dict[str, str]] = {
    "h264": {"g": "12", "bf": "2", "sc_threshold": "0", "crf": "20"},
    "mpeg2": {"codec": "mpeg2video", "g": "12", "bf": "2", "b": "3M"},
    "mpeg4": {"codec": "mpeg4", "g": "12", "bf": "2", "b": "3M"},
    "hevc": HEVC,
    "av1": {"codec": "libsvtav1", "preset": "12", "g": "12"},
    "vp9": {"codec": "libvpx-vp9", "deadline": "realtime", "cpu-used": "8", "g": "12", "b": "2M"},
}


@pytest.mark.parametrize("kind", ["zeros", "hole", "cut"])
@pytest.mark.parametrize(
    ("codec", "suffix"),
    [
        *(("h264", suffix) for suffix in ("mp4", "mkv", "ts", "avi")),
        *(("hevc", suffix) for suffix in ("mkv", "ts")),
        *(("mpeg2", suffix) for suffix in ("ts", "mkv")),
        *(("mpeg4", suffix) for suffix in ("avi", "mkv")),
        ("vp9", "mkv"),
        ("av1", "mkv"),
    ],
)
def test_what_is_intact_before_and_after_damage_is_read(
    tmp_path: Path, codec: str, suffix: str, kind: str
) -> None:
    """The damage is in the third of five groups of pictures."""
    images = sample.busy(60, height=96, width=144)
    more = {"container_options": {"movflags": "faststart"}} if suffix == "mp4" else {}
    path = sample.write(tmp_path / f"a.{suffix}", images, **CODECS[codec], **more)
    intact = {
        item.pts: item.picture.to_ndarray(format="gray").astype(int)
        for item in Reader(str(path))
        if isinstance(item, Frame)
    }
    assert len(intact) == 60
    data = bytearray(path.read_bytes())
    at, size = len(data) * 45 // 100, len(data) // 25
    if kind == "zeros":
        data[at : at + size] = bytes(size)
    elif kind == "hole" and suffix != "mp4":  # whose index would be of another file
        del data[at : at + size]
    else:
        del data[at:]
    path.write_bytes(data)
    items = list(Reader(str(path)))
    got = [item for item in items if isinstance(item, Frame)]
    reasons = [item.reason for item in items if isinstance(item, Break)]
    assert any(reasons)
    ends = kind == "cut" or (kind == "hole" and suffix == "mp4")
    assert (12 if ends else 30) <= len(got) < 60
    if suffix != "avi":  # whose time stamps count chunks
        for frame in got:
            image = frame.picture.to_ndarray(format="gray").astype(int)
            error = np.square(image - intact[frame.pts]).mean()
            assert error < 6, f"frame at {frame.pts} differs"  # 40 dB
        assert [frame.pts for frame in got] == sorted({frame.pts for frame in got})


def intact_of(path: Path) -> tuple[list[int], list[str]]:
    """Returns the hashes of the frames of a file, and why others are missing."""
    items = list(Reader(str(path)))
    frames = [item.picture for item in items if isinstance(item, Frame)]
    reasons = [item.reason for item in items if isinstance(item, Break)]
    return [hash(frame.to_ndarray().tobytes()) for frame in frames], reasons


def test_what_a_reader_knows_of_an_intact_file(tmp_path: Path) -> None:
    video = Reader(str(sample.write(tmp_path / "a.mp4", 30, g="10")))
    frames = [item for item in video if isinstance(item, Frame)]
    assert (len(frames), video.frames, video.rate) == (30, 30, 25)
    assert (video.start_s, video.first_s) == (0, 0)
    assert {frame.look[:3] for frame in frames} == {(sample.WIDTH, sample.HEIGHT, 1)}
    assert video.time_base is not None
    times = [(frame.pts or 0) * video.time_base for frame in frames]
    assert times == [Fraction(number, 25) for number in range(30)]


def test_files_that_are_not_videos_are_reported(tmp_path: Path) -> None:
    empty, folder = tmp_path / "e.mp4", tmp_path / "f.mp4"
    empty.touch()
    folder.mkdir()
    texts = [tmp_path / f"t.{suffix}" for suffix in ("mp4", "mkv")]
    for path in texts:
        path.write_text("this is a shopping list\n" * 40)
    for path, reason in [
        (empty, "is empty"),
        (texts[0], "Invalid data"),
        (texts[1], "cannot be read: Invalid data"),
        (sample.without_frames(tmp_path / "w.mp4"), "has no video"),
        (folder, "is not a file"),
        (tmp_path / "gone.mp4", "No such file"),
    ]:
        with pytest.raises(BadExample, match=reason) as error:
            read(path)
        assert error.value.path == str(path)
    assert isinstance(error.value.__cause__, FileNotFoundError)  # so it is tried again
    with pytest.raises(BadExample, match="is empty"):
        list(Reader("a.tar/a.mp4", Span(str(empty), 0, 0)))


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        ("mp4", r"is cut off: it has \d\d of 40 declared frames"),
        ("mkv", r"is cut off: it has \d\.\d\d of 1\.60 declared seconds"),
    ],
)
def test_the_frames_before_the_end_of_a_truncated_file_are_read(
    tmp_path: Path, suffix: str, reason: str
) -> None:
    """An MP4 file whose index is first, or a Matroska file, which declares only its duration."""
    options = {"movflags": "faststart"} if suffix == "mp4" else {}
    path = tmp_path / f"a.{suffix}"
    sample.write(path, sample.busy(40), container_options=options, g="10", bf="0")
    whole, reasons = intact_of(path)
    assert (len(whole), reasons) == (40, [])
    frames, (found,) = intact_of(sample.truncate(path, 0.6))
    assert 15 <= len(frames) <= 26
    assert frames == whole[: len(frames)]
    assert re.search(reason, found)


def test_a_gap_in_a_matroska_file_is_found(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", sample.busy(60), codec="libvpx", g="10", crf="10")
    whole, _ = intact_of(path)
    frames, reasons = intact_of(sample.garble(path, 0.4, path.stat().st_size // 8))
    assert any("lacks frames" in reason for reason in reasons)
    numbers = [whole.index(frame) for frame in frames]
    before = next(place for place, number in enumerate(numbers) if place != number)
    assert before >= 15
    assert numbers[before] % 10 == 0  # a keyframe
    assert numbers[before:] == list(range(numbers[before], 60))


def test_an_edit_list_that_hides_frames_is_not_damage(tmp_path: Path) -> None:
    path = sample.shorten_edit(sample.write(tmp_path / "a.mp4", 60, g="10"), 0.5)
    numbers, breaks, _ = read(path)
    assert numbers == list(range(len(numbers)))
    assert 28 <= len(numbers) <= 34
    assert breaks == []


def test_metadata_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 20, title="QQQQ")
    data = path.read_bytes()
    assert data.count(b"QQQQ") == 1
    path.write_bytes(data.replace(b"QQQQ", b"\xff\xfe\xe9Q"))
    assert read(path)[0] == list(range(20))


@pytest.mark.parametrize(
    ("missing", "promised", "cut_off"),
    [(2, 10, False), (3, 10, True), (3, 151, False), (4, 150, True)],
)
def test_the_rule_for_missing_frames(missing: int, promised: int, cut_off: bool) -> None:
    assert reader._too_few(missing, promised) is cut_off


def test_the_larger_of_two_streams_is_read(tmp_path: Path) -> None:
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
    numbers, _, (look,) = read(path)
    assert numbers == list(range(20))
    assert (look.width, look.height) == (96, 64)


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
        assert len(sample.decoded(name)) == 12
        assert len(list(Video(Path(name)).images())) == 12
        tar = Path(f"tar:{name}")
        tar.write_bytes(b"x" * 100 + data + b"y" * 100)
        in_tar = Reader("tar.tar/a.mp4", Span(str(tar), 100, len(data)))
        assert sum(isinstance(item, Frame) for item in in_tar) == 12
    with pytest.raises(BadExample, match="is not a valid file name"):
        list(Reader("a\0.mp4"))


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
                read(path)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_playlist_reads_no_other_file(tmp_path: Path) -> None:
    sample.write(tmp_path / "b.mp4", 3)
    path = tmp_path / "a.mp4"
    for name in ("b.mp4", "a.mp4"):  # itself: until no more files can be opened
        path.write_text(f"ffconcat version 1.0\nfile {name}\n")
        with pytest.raises(BadExample, match="its format is damaged or not supported"):
            read(path)


def test_ffmpeg_knows_the_formats() -> None:
    assert not set(reader.FORMATS) - set(av.formats_available)


def test_a_declared_size_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sample.write(tmp_path / "a.mp4", 12)
    monkeypatch.setattr(reader, "MAX_PIXELS", 64 * 128)  # the decoder pads
    assert len(sample.decoded(path)) == 12
    monkeypatch.setattr(reader, "MAX_PIXELS", 64 * 96 - 1)
    with pytest.raises(BadExample, match="is 96x64: more than 6,143 pixels per frame"):
        read(path)


def test_frames_that_grow_beyond_the_limit_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample.growing(tmp_path / "a.ts", (64, 96), (128, 192))
    numbers, _, looks = read(path)
    assert numbers == 2 * list(range(150))
    assert [(look.height, look.width) for look in looks] == [(64, 96), (128, 192)]
    monkeypatch.setattr(reader, "MAX_PIXELS", 10_000)  # the decoder pads
    numbers, breaks, (look,) = read(path)
    assert (look.height, look.width) == (64, 96)
    assert numbers == list(range(150))
    assert any("cannot be decoded" in item.reason for item in breaks)
    with pytest.raises(InputError, match="cannot be decoded"):
        list(Video(path).images())
    (tmp_path / "out").mkdir()
    settings = pieces.Settings(height=64, width=96, split_at_cuts=False)
    cut = pieces.cut(str(path), None, tmp_path / "out", settings)
    assert cut.damage
    assert sum(cut.pieces) == 150


def test_pixels_with_an_extreme_aspect_ratio_are_rejected(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 12, pixel_aspect=Fraction(20))
    with pytest.raises(BadExample, match="has pixels 20 times as wide as high"):
        read(path)


def test_an_unsupported_codec_is_reported(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mkv", 12)
    data = path.read_bytes()
    assert data.count(b"V_MPEG4/ISO/AVC") == 1
    path.write_bytes(data.replace(b"V_MPEG4/ISO/AVC", b"V_NOBODY/ISO/AV"))
    with pytest.raises(BadExample, match="has no video stream with a supported codec"):
        read(path)


def test_hevc_that_refers_to_a_lost_frame_is_not_read(tmp_path: Path) -> None:
    options = {"x265-params": "keyint=30:bframes=0:log-level=none", "codec": "libx265"}
    path = sample.write(tmp_path / "a.mkv", sample.busy(40), **options)
    whole, _ = intact_of(path)
    frames, reasons = intact_of(sample.without_packets(path, tmp_path / "b.mkv", [15]))
    assert frames == whole[:13] + whole[30:]  # the last two before a gap may be damaged
    assert any("lacks frames" in reason for reason in reasons)
