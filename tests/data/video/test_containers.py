"""Of every kind of file, the reader yields the frames that FFmpeg's own decoding yields, in order.

The files are those of public bug reports about other programs: frames without time stamps, or with
those of decoding, clocks that jump back, false keyframes, pauses, and mirrors.
"""

import hashlib
import os
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from av.video.frame import VideoFrame
from data.video import sample_videos as sample

from jaxtrain.data.video import pieces, sets
from jaxtrain.data.video.reader import Break, Frame, Reader
from jaxtrain.errors import BadExample
from jaxtrain.inference.video import reading

FRAMES = 48

H264 = {"codec": "libx264", "g": "12", "crf": "20"}
B_FRAMES: dict[str, dict[str, str]] = {
    "h264": H264 | {"bf": "2"},
    "h264, no B": H264 | {"bf": "0"},
    "h264, open GOP": H264 | {"bf": "3", "x264-params": "open-gop=1"},
    "mpeg2": {"codec": "mpeg2video", "g": "12", "bf": "2", "b": "4M"},
    "mpeg4": {"codec": "mpeg4", "g": "12", "bf": "2", "b": "4M"},
}
REFRESH = {"h264, no keyframes": H264 | {"x264-params": "intra-refresh=1:bframes=2"}}
AV1 = {
    "av1": {"codec": "libsvtav1", "preset": "12", "g": "12", "svtav1-params": "enable-tf=0"},
}
HEVC = {"hevc": {"codec": "libx265", "x265-params": "keyint=12:bframes=3:log-level=none"}}
VP = {
    "vp8": {"codec": "libvpx", "g": "12", "b": "2M"},
    "vp9": {"codec": "libvpx-vp9", "g": "12", "b": "2M", "cpu-used": "8"},
}
MJPEG = {"mjpeg": {"codec": "mjpeg", "pix_fmt": "yuvj420p"}}
KINDS: dict[str, dict[str, dict[str, str]]] = {
    "mp4": B_FRAMES | REFRESH | HEVC | AV1,
    "mov": B_FRAMES | HEVC | MJPEG,
    "mkv": B_FRAMES | HEVC | VP | MJPEG,
    "webm": VP | AV1,
    "avi": B_FRAMES | MJPEG,
    "ts": B_FRAMES | HEVC,
    "mpg": {name: B_FRAMES[name] for name in ("mpeg2", "h264", "h264, no B")},
    "flv": {name: B_FRAMES[name] for name in ("h264", "h264, no B")},
    "wmv": B_FRAMES,
    "mxf": {"mpeg2": B_FRAMES["mpeg2"]},
    "gif": {"gif": {"codec": "gif", "pix_fmt": "rgb8"}},
}
CELLS = [(suffix, codec) for suffix, codecs in KINDS.items() for codec in codecs]


def digest(frame: VideoFrame) -> str:
    return hashlib.sha256(frame.to_ndarray(format="rgb24").tobytes()).hexdigest()


def in_order(path: Path) -> list[str]:
    """Returns the frames of a file in the order in which a decoder outputs them."""
    with av.open(str(path)) as container:
        return [digest(frame) for frame in container.decode(video=0)]


def check(path: Path) -> tuple[int, int]:
    """Compares all frames of an intact file; returns their number, and that of the breaks."""
    items = list(Reader(str(path)))
    reasons = [item.reason for item in items if isinstance(item, Break) and item.reason]
    assert reasons == []
    read = [digest(item.picture) for item in items if isinstance(item, Frame)]
    assert read == in_order(path)
    return len(read), len(items) - len(read)


@pytest.mark.parametrize(("suffix", "codec"), CELLS)
def test_the_frames_are_those_of_ffmpeg(tmp_path: Path, suffix: str, codec: str) -> None:
    options: dict[str, Any] = KINDS[suffix][codec]
    path = sample.write(tmp_path / f"a.{suffix}", sample.busy(FRAMES), **options)
    # As root, the AV1 encoder makes its caller a real-time process, and all other tests starve.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert check(path) == (FRAMES, 0)
    assert reading.Video(path).rate == pytest.approx(25, rel=1e-3)


def write_numbered(path: Path, numbers: range, clock: int, *, b_frames: int) -> Path:
    """Writes numbered frames at 25 fps, whose clock starts at a number of ticks of 1/90,000 s."""
    images = [sample.numbered(number) for number in numbers]
    stamps = [clock + 3600 * place for place in range(len(images))]
    options = {"g": "10", "bf": str(b_frames), "sc_threshold": "0"}
    return sample.write_at(path, images, stamps, per_s=90_000, **options)


def numbers_in(path: Path) -> list[int]:
    return [sample.number_of(image.pixels) for image in reading.Video(path).images()]


@pytest.mark.parametrize(
    ("clock", "b_frames"), [(-3600 * 20, 2), (1800, 0), (3600 * 15, 2), (3600 * 500, 2)]
)
def test_two_recordings_in_one_file_follow_each_other(
    tmp_path: Path, clock: int, b_frames: int
) -> None:
    """The second clock jumps back by more or less than the length of the first one, or ahead."""
    first = write_numbered(tmp_path / "1.ts", range(30), 3600 * 30, b_frames=b_frames)
    second = write_numbered(tmp_path / "2.ts", range(30, 60), 3600 * 30 + clock, b_frames=b_frames)
    path = tmp_path / "joined.ts"
    path.write_bytes(first.read_bytes() + second.read_bytes())
    assert check(path) == (60, 1)
    assert numbers_in(path) == list(range(60))
    stamps = [image.pts for image in reading.Video(path).images()]
    assert stamps[0] == 0
    assert np.diff(stamps).min() > 1000  # of 3600


def without_index(path: Path) -> Path:
    """Removes the list of keyframes of an MP4, so that all its frames count as keyframes."""
    data = path.read_bytes()
    assert data.count(b"stss") == 1
    path.write_bytes(data.replace(b"stss", b"free"))
    return path


@pytest.mark.parametrize("codec", ["mpeg4", "hevc", "h264"])
def test_frames_marked_as_keyframes_need_not_be(tmp_path: Path, codec: str) -> None:
    options: dict[str, Any] = (B_FRAMES | HEVC)[codec]
    path = without_index(sample.write(tmp_path / "a.mp4", sample.busy(FRAMES), **options))
    assert check(path) == (FRAMES, 0)


def test_every_frame_of_h263_in_avi_is_marked_as_a_keyframe(tmp_path: Path) -> None:
    images = sample.busy(FRAMES, height=144, width=176)
    path = sample.write(tmp_path / "a.avi", images, codec="h263", g="12", b="4M")
    assert check(path) == (FRAMES, 0)


@pytest.mark.parametrize("suffix", ["mkv", "flv"])
@pytest.mark.parametrize("keyframe", [False, True], ids=["predicted", "keyframe"])
def test_a_pause_of_the_recorder_is_not_damage(tmp_path: Path, suffix: str, keyframe: bool) -> None:
    """The first frame after the pause of 5 s is a keyframe, or is not."""
    times = [40 * number + (5000 if number >= 24 else 0) for number in range(FRAMES)]
    options = {"bf": "0", "g": "12" if keyframe else "20", "sc_threshold": "0"}
    path = sample.write_at(tmp_path / f"a.{suffix}", sample.busy(FRAMES), times, **options)
    assert check(path) == (FRAMES, 1)


@pytest.mark.parametrize("until", [20, 24])
def test_frames_that_the_decoder_does_not_miss_are_missed(tmp_path: Path, until: int) -> None:
    """VP8 after a gap before a predicted frame, or before a keyframe."""
    whole = sample.write(tmp_path / "w.webm", sample.busy(FRAMES), codec="libvpx", g="12", b="2M")
    path = sample.without_packets(whole, tmp_path / "a.webm", range(14, until))
    items, expected = list(Reader(str(path))), in_order(whole)
    (at,) = (number for number, item in enumerate(items) if isinstance(item, Break))
    # The last two before the gap may be damaged as well.
    assert items[at] == Break("lacks frames", lost=2 + (24 - until))
    read = [digest(item.picture) for item in items if isinstance(item, Frame)]
    assert (read[:at], read[at:]) == (expected[:12], expected[24:])


def test_packets_that_a_receiver_lost_are_missed(tmp_path: Path) -> None:
    """H.264 whose decoder predicts from older frames after a loss that had a keyframe."""
    images = sample.busy(60)
    whole = sample.write(tmp_path / "w.ts", images, g="20", bf="0", sc_threshold="0")
    path = sample.without_packets(whole, tmp_path / "a.ts", range(17, 24))
    read = [digest(item.picture) for item in Reader(str(path)) if isinstance(item, Frame)]
    expected = in_order(whole)
    assert read == expected[:17] + expected[40:]


def test_a_capture_may_start_between_keyframes(tmp_path: Path) -> None:
    whole = write_numbered(tmp_path / "w.ts", range(60), 0, b_frames=0)
    path = sample.without_packets(whole, tmp_path / "a.ts", range(14))
    assert check(path) == (40, 0)
    assert numbers_in(path) == list(range(20, 60))


# Display matrices (ISO 14496-12, 6.2.2): where the right and the bottom of a stored frame point to,
# right and down, and what it shows.
DIHEDRAL: dict[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]] = {
    (1, 0, 0, 1): lambda image: image,
    (0, 1, -1, 0): lambda image: np.rot90(image, 3),
    (-1, 0, 0, -1): lambda image: np.rot90(image, 2),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (0, 1, 1, 0): lambda image: image.swapaxes(0, 1),
    (0, -1, -1, 0): lambda image: np.rot90(image, 2).swapaxes(0, 1),
}


@pytest.mark.parametrize("matrix", DIHEDRAL, ids=str)
def test_frames_are_upright_for_every_display_matrix(
    tmp_path: Path, matrix: tuple[int, int, int, int]
) -> None:
    path = sample.write(tmp_path / "a.mp4", [sample.corners()] * 16, crf="10", g="8")
    data = bytearray(path.read_bytes())
    right_x, right_y, down_x, down_y = (one << 16 for one in matrix)
    place = data.index(b"tkhd") + 4 + 40
    data[place : place + 36] = struct.pack(
        ">9i", right_x, right_y, 0, down_x, down_y, 0, 0, 0, 1 << 30
    )
    path.write_bytes(data)
    expected = DIHEDRAL[matrix](sample.corners())
    height, width = expected.shape[:2]
    video = reading.Video(path)
    assert (video.height, video.width) == (height, width)
    shown = sample.grays(expected)
    assert sample.grays(next(video.images()).pixels) == shown
    (frame,) = sample.decoded(path, [3])
    for mirror, seen in ((False, expected), (True, np.fliplr(expected))):
        (crop,) = sample.cropped([frame], height=height, width=width, mirror=mirror)
        assert sample.grays(crop) == sample.grays(seen)
    settings = pieces.Settings(height=height, width=width, min_frames=1, min_side=8)
    (tmp_path / "cut").mkdir()
    pieces.cut(str(path), None, tmp_path / "cut", settings)
    (piece,) = (tmp_path / "cut").iterdir()
    assert sample.grays(next(reading.Video(piece).images()).pixels) == shown


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_for_every_exif_orientation(tmp_path: Path, orientation: int) -> None:
    image = PIL.Image.fromarray(sample.corners())
    exif = image.getexif()
    exif[0x0112] = orientation
    path = tmp_path / "a.jpg"
    image.save(path, exif=exif, quality=95)
    with PIL.Image.open(path) as opened:
        expected = np.asarray(PIL.ImageOps.exif_transpose(opened))
    (found,) = reading.Video(path).images()
    assert found.pixels.shape == expected.shape
    assert sample.grays(found.pixels) == sample.grays(expected)


@pytest.mark.parametrize("rate", ["24000/1001", "60"])
@pytest.mark.parametrize("suffix", ["mkv", "flv", "ts", "mp4"])
def test_the_frame_rate_is_that_of_the_frames(tmp_path: Path, suffix: str, rate: str) -> None:
    """The file declares 25 frames per second, or none; its time stamps are rounded."""
    path, expected = tmp_path / f"a.{suffix}", Fraction(rate)
    stamps = [round(number / expected * 90_000) for number in range(90)]
    sample.write_at(path, sample.busy(90), stamps, per_s=90_000, bf="0")
    assert reading.Video(path).rate == expected


@pytest.mark.parametrize("pix_fmt", ["gray", "gray10le", "gray16le"])
@pytest.mark.parametrize("limited", [False, True])
def test_gray_of_limited_range_becomes_black_and_white(
    tmp_path: Path, pix_fmt: str, limited: bool
) -> None:
    """FFV1 keeps the values: 16 and 235 of limited range, 0 and 255 of full range."""
    path, bits = tmp_path / "a.mkv", int(pix_fmt[4:-2] or 8)
    values = np.zeros((64, 96), int)
    values[:, 48:] = 235 if limited else 255
    values[:, :48] = 16 if limited else 0
    values = values << (bits - 8) if limited else values * (2**bits - 1) // 255
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("ffv1", rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, pix_fmt
        stream.codec_context.color_range = 1 if limited else 2
        frame = av.VideoFrame(96, 64, pix_fmt)
        plane = frame.planes[0]
        rows = np.zeros((64, plane.line_size // (1 if bits == 8 else 2)), np.uint16)
        rows[:, :96] = values
        plane.update(rows.astype(np.uint8 if bits == 8 else "<u2").tobytes())
        frame.color_range = 1 if limited else 2
        for number in range(4):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    image = next(reading.Video(path).images()).pixels
    (crop,) = sample.cropped(sample.decoded(path, [1]), height=64, width=96)
    for made in (image, crop):
        assert made[:, :40].max() <= 1
        assert made[:, 56:].min() >= 254


def test_colors_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    path = sample.write(tmp_path / "a.mp4", 12, **{"x264-params": "colormatrix=YCgCo"})
    with pytest.raises(BadExample, match=r"a.mp4: has YCgCo colors, which cannot be converted"):
        list(Reader(str(path)))


@pytest.mark.parametrize(
    ("options", "traits", "said"),
    [
        ({}, (), []),
        (
            {"x264-params": "transfer=smpte2084"},
            ("HDR (PQ)",),
            ["a.mp4 is HDR (PQ): colors are not tone-mapped"],
        ),
        (
            {"x264-params": "transfer=arib-std-b67"},
            ("HDR (HLG)",),
            ["a.mp4 is HDR (HLG): colors are not tone-mapped"],
        ),
        ({"x264-params": "tff=1"}, (), []),
    ],
)
def test_hdr_videos_are_named(
    tmp_path: Path, options: dict[str, str], traits: tuple[str, ...], said: list[str]
) -> None:
    path = sample.write(tmp_path / "in" / "a.mp4", 30, **options)
    settings = pieces.Settings(height=64, width=96, min_side=8, split_at_cuts=False)
    (tmp_path / "cut").mkdir()
    assert pieces.cut(str(path), None, tmp_path / "cut", settings).traits == traits
    lines: list[str] = []
    given = (str(path.parent), "--data.path", settings, tmp_path / "cache", lines.append)
    sets.CachedSet.of(*given).made(lines.append)
    assert lines[1:] == said  # after what is cut


def test_subtitles_may_be_longer_than_the_video(tmp_path: Path) -> None:
    (tmp_path / "a.srt").write_text("1\n00:00:00,200 --> 00:00:05,000\ntext\n")
    path = tmp_path / "a.mkv"
    with av.open(str(tmp_path / "a.srt")) as texts, av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        subtitles = container.add_stream_from_template(texts.streams.subtitles[0])
        for image in sample.busy(25):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())
        for packet in texts.demux(subtitles=0):
            if packet.size:
                packet.stream = subtitles
                container.mux(packet)
    assert check(path) == (25, 0)


def test_most_frames_of_a_program_stream_have_no_time_stamp(checkout: Path) -> None:
    """H.264 of a surveillance recorder: a PES packet holds several frames."""
    assert check(checkout / "tests/fixtures/h264_ps_tail.mpg") == (60, 0)


def combs(image_HWC: np.ndarray) -> float:
    """Returns how much lines differ from their neighbors, more than every second line does."""
    luma = image_HWC.astype(float).mean(-1)
    return float(np.abs(np.diff(luma, axis=0)).mean() - np.abs(luma[2:] - luma[:-2]).mean())


def test_frames_are_deinterlaced(tmp_path: Path) -> None:
    """Fields of two instants, between which a bar moves by 4 pixels."""
    images = []
    for number in range(24):
        image = np.full((64, 256, 3), 30, np.uint8)
        for field in (0, 1):
            left = 4 * (2 * number + field)
            image[field::2, left : left + 24] = 220
        images.append(image)
    path = sample.write(tmp_path / "a.mp4", images, crf="4", **{"x264-params": "tff=1"})
    assert combs(images[0]) > 4
    read = [image.pixels for image in reading.Video(path).images()]
    assert len(read) == 24
    assert max(map(combs, read)) < 1
    (tmp_path / "cut").mkdir()
    settings = pieces.Settings(height=64, width=256, min_frames=1, min_side=8)
    made = pieces.cut(str(path), None, tmp_path / "cut", settings)
    assert made.pieces == (24,)
    clips = [image.pixels for image in reading.Video(tmp_path / "cut/00000.mp4").images()]
    assert len(clips) == 24
    assert max(map(combs, clips)) < 1
