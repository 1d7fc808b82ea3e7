"""Reads a video once, in order: a frame is what FFmpeg's decoder returns.

Nothing is predicted from packets. A :class:`Reader` yields the frames, each with how it is stored
(:class:`Look`), and a :class:`Break` where frames are missing: a decoder fails, marks a frame as
corrupt, or time stamps have a gap. After damage, frames are dropped up to the next one that is not
predicted from others. So what is intact before and after is yielded, and no damaged frame, unless
the decoder takes it for an image: usual for flipped bits in VP8, VP9, and AV1.
"""

import collections
import contextlib
import io
import itertools
import os
import re
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import av
import av.filter
import av.logging
import numpy as np
import PIL.Image
from av.container import InputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video import frames
from jaxtrain.errors import BadExample
from jaxtrain.storage import disks

_ANY_TEXT: Any = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
MAX_PIXELS = 139_264 * 256
"""Largest number of pixels per frame: the limit of H.264 (table A-1), HEVC and AV1 up to level 6.2,
somewhat above 8K (7680x4320). A few kilobytes of PNG can declare billions."""
FORMATS = (
    *("asf", "avi", "flv", "live_flv", "matroska", "mov", "mpeg", "mpegts", "mxf", "ogg"),
    *("dv", "gif", "h264", "hevc", "ivf", "m4v", "mpegvideo", "yuv4mpegpipe"),
    *("jpeg_pipe", "png_pipe", "webp_pipe"),  # one image
)
"""FFmpeg's names of the formats that are read, whatever the suffix; none refers to other files."""
_MAX_STREAMS = 128
_TICK = Fraction(1, 90_000)  # required by filters; nothing here depends on time
OPTIONS = {
    # Without it, decoders would decode frames of any size to guess a stream's parameters.
    "max_pixels": str(MAX_PIXELS),
    # A file of another format, such as a playlist (ffconcat), could open other files. 220 kB can
    # name one of them 20,000 times, whose scan takes minutes.
    "format_whitelist": ",".join(FORMATS),
    "protocol_whitelist": "file",
    # While a file is opened, each video stream has a decoder, which holds three frames of the
    # largest size (measured: 80 MiB for a PNG stream). A recording of a whole multiplex has 40
    # streams, most of them audio.
    "max_streams": str(_MAX_STREAMS),
}
_MAX_ASPECT = 16  # of a pixel, either way; anamorphic video has up to 2
_PROBED = 512  # packets, of which a poster or a cover has one
# Matrix coefficients (ITU-T H.273, table 4) that libswscale cannot convert.
MATRICES_WITHOUT_FILTER = {
    8: "YCgCo",
    11: "SMPTE ST 2085",
    12: "chromaticity-derived non-constant luminance",
    13: "chromaticity-derived constant luminance",
    14: "ICtCp",
}
HDR = {16: "HDR (PQ)", 18: "HDR (HLG)"}
"""By transfer function (ITU-T H.273, table 3)."""
# Exif's orientation (2 to 8): degrees counterclockwise, after a mirror.
_EXIF_ORIENTATION = 0x0112
_OF_EXIF = {
    2: (0, True),
    3: (180, False),
    4: (180, True),
    5: (90, True),
    6: (270, False),
    7: (270, True),
    8: (90, False),
}
# Decoders of these codecs do not notice that a frame is missing from which others are predicted.
_UNNOTICED = ("vp8", "vp9", "av1", "libdav1d", "mpeg1video", "mpeg2video", "mpeg4", "h263", "flv1")
# And these often do not notice damage within a frame, only that the next one does not fit.
_TRUSTING = ("hevc", "vp8", "vp9", "av1", "libdav1d")
# H.264's decoder predicts from another frame where one is missing. In these formats, packets are
# lost; in others, a pause of the recorder is usual.
_LOSSY = ("mpegts", "mpeg")
# Of no packet of these codecs: their data is coded arithmetically, or ends before a start code. A
# zeroed sector of a disk, or a part of a download that never came, is decoded without an error.
_ZEROS = re.compile(rb"\x00{32}\x00*(?![\x00\x01])")
_WITHOUT_ZEROS = ("h264", "hevc", *_UNNOTICED)
_RECENT = 16  # distances between frames, of which a gap is a multiple
_GAP, _IRREGULAR_GAP = 1.5, 10  # times the largest of them, if they are equal or not
_REGULAR = 1.5  # largest ratio of equal ones; Matroska rounds to ms
_REORDERED_PACKETS = 16  # H.264 and HEVC reorder no more frames
_PREDICTED = (PictureType.P, PictureType.B, PictureType.S)
_MARKED_BEFORE = 2  # packets from one that a transport stream marks to the next recording
_SEI, _UNSPECIFIED = 39, 48  # types of HEVC's units (H.265, table 7-1)
_BEFORE = "before the first frame that can be decoded alone"
SLACK_FRAMES, SLACK_SHARE = 2, 0.02
"""A file is cut off if it ends more frames, and a larger part of its length, before the end that
its headers declare. Intact files may lack a frame or two."""
_STANDARD_RATES = tuple(Fraction(rate) for rate in ("24000/1001", "30000/1001", "60000/1001"))
_RATE_SLACK = Fraction(1, 10_000)  # of these and whole numbers, besides the rounding of stamps
_LEAST_RATIO = Fraction(2, 5)
_TIMED = 64  # packets
_OF_IMAGES = (".jpeg", ".jpg", ".png", ".webp")
_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
_WITHOUT_STAMPS = ("avi", "asf")


class Span(NamedTuple):
    """A video that is part of another file.

    Attributes:
        file: the other file, such as a tar.
        offset: start of the video, in bytes.
        size: size of the video, in bytes.
    """

    file: str
    offset: int
    size: int


Filters = tuple[tuple[str, ...], ...]
"""Names and arguments of filters."""
_QUARTERS: dict[int, Filters] = {
    0: (),
    90: (("transpose", "cclock"),),
    180: (("hflip",), ("vflip",)),
    270: (("transpose", "clock"),),
}
"""Degrees counterclockwise -> filters that turn a frame."""


class Look(NamedTuple):
    """The form of a frame, which is upright.

    Attributes:
        width, height: size of the frame, in pixels.
        pixel_aspect: width of a pixel divided by its height.
        colors: format, range, matrix, and transfer function, by FFmpeg's names and ITU-T H.273's
            numbers.
    """

    width: int
    height: int
    pixel_aspect: Fraction
    colors: tuple[str, int, int, int] = ("yuv420p", 0, 2, 2)

    @property
    def display_size(self) -> tuple[float, float]:
        """Returns height and width of the frame, in square pixels."""
        return float(self.height), float(self.width * self.pixel_aspect)


class Frame(NamedTuple):
    """A decoded frame.

    Attributes:
        picture: as the decoder returns it, without what the container hides; deinterlaced, upright.
        pts: time in ticks of :attr:`Reader.time_base`; None if it is unknown.
        filters: what is still to be done, so that it is shown as the container says.
    """

    picture: VideoFrame
    look: Look
    pts: int | None
    filters: Filters = ()


class Break(NamedTuple):
    """A place where frames are missing, or where time stamps do not continue.

    Attributes:
        reason: why, after the name of the file; "" if nothing is damaged.
        lost: number of frames that were decoded and are not yielded.
    """

    reason: str
    lost: int = 0


Item = Frame | Break | av.Packet


class Reader:
    """One video file; each iteration reads it from its start.

    Iterating yields frames and breaks, and with ``sound`` the packets of audio streams, in the
    order of the file.

    Args:
        path: the file; only used in messages if ``span`` is set.
        sound: whether to yield the packets of audio streams.
        threads: FFmpeg's ``thread_type`` of the decoder.

    Attributes:
        rate: frames per second, known with the first frame; 0 if nothing says it.
        time_base: seconds per tick of the frames' time stamps, known with the first frame; None if
            the stamps are not those of the display, as in AVI.
        start_s: when the first frame is shown or the first sound begins, in seconds.
        first_s: seconds from then to the first frame.
        frames: number of frames that the headers declare or let expect; 0 if they do not.

    Raises:
        BadExample: while iterating: the file cannot be read, or has no video that can be.
        DiskAway: its disk is temporarily unavailable.
    """

    def __init__(
        self, path: str, span: Span | None = None, *, sound: bool = False, threads: str = "NONE"
    ) -> None:
        self.path, self._span = path, span
        self._sound, self._threads = sound, threads
        self.rate = Fraction(0)
        self.time_base: Fraction | None = None
        self.start_s = self.first_s = Fraction(0)
        self.frames = 0

    def __iter__(self) -> Iterator[Item]:
        if self._span is None:
            check_file(self.path)
        elif self._span.size == 0:
            raise BadExample(self.path, "is empty")
        try:
            with open_input(self.path, self._span) as container:
                yield from _filtered_frames(_deinterlaced(self._items(container)))
        except MemoryError as error:  # FFmpeg also raises it for too many streams
            text = f"it has more than {_MAX_STREAMS} streams, or needs too much memory"
            raise BadExample(self.path, f"cannot be read: {text}") from error
        except av.ArgumentError as error:  # of FFmpeg, for a format that is not in FORMATS
            text = "cannot be read: its format is damaged or not supported: convert it to .mp4"
            raise BadExample(self.path, text) from error
        except av.FFmpegError as error:
            self._check_index()
            raise BadExample(self.path, f"cannot be read: {reason(error)}") from error

    def _check_index(self) -> None:
        """Raises BadExample if an MP4 file has no index, which most programs write last."""
        if _movies(self.path, self._span) == (0, None):
            text = "cannot be read: it is cut off or damaged, and lacks its index (moov)"
            raise BadExample(self.path, text)

    def _items(self, container: InputContainer) -> Iterator[Item]:
        packets = _demuxed(container)
        if not container.streams.video:
            self._check_index()
        video, first = chosen(self.path, container, packets)
        self._describe(container, video, first)
        frames = _Frames(self.path, container, video, self._threads)
        for packet in itertools.chain(first, packets):
            frames.ends.add(packet)
            if packet.stream_index == video.index:
                yield from frames.decoded(packet)
            elif self._sound and packet.stream.type == "audio" and packet.dts is not None:
                yield packet
        yield from frames.remaining()
        more = _movies(self.path, self._span)[1] if container.format.name.startswith("mov") else 0
        if more:
            yield Break(f"has another file behind byte {more:,}, joined to it, which is not read")

    def _describe(
        self, container: InputContainer, video: VideoStream, first: Sequence[av.Packet]
    ) -> None:
        stamps = [packet.pts for packet in first if packet.stream_index == video.index]
        known = [stamp for stamp in stamps if stamp is not None]
        # In a program stream, only the first frame of several has a time stamp.
        self.rate = _rate(video, sorted(known) if len(known) == len(stamps) else ())
        reordered = bool(video.codec_context.has_b_frames)
        if video.time_base and not (reordered and container.format.name in _WITHOUT_STAMPS):
            self.time_base = Fraction(video.time_base)
        starts = {
            track.index: track.start_time * track.time_base
            for track in (video, *container.streams.audio)
            if track.start_time is not None and track.time_base is not None
        }
        # Before 0 is what an edit list hides, such as the first samples of AAC.
        self.start_s = max(Fraction(0), min(starts.values(), default=Fraction(0)))
        self.first_s = max(Fraction(0), starts.get(video.index, self.start_s) - self.start_s)
        seconds = Fraction(container.duration or 0, av.time_base)
        self.frames = video.frames or round(seconds * self.rate)


def _deinterlaced(items: Iterable[Item]) -> Iterator[Item]:
    """Yields as many frames, with the lines of one field interpolated where they are interlaced."""
    graph: av.filter.Graph | None = None
    look: Look | None = None
    waiting: collections.deque[Frame] = collections.deque()

    def finished(graph: av.filter.Graph) -> Iterator[Frame]:
        """Yields what the filter has finished: it looks ahead by a frame."""
        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                picture = graph.vpull()
                yield waiting.popleft()._replace(picture=picture)

    for item in items:
        if isinstance(item, av.Packet):  # of sound
            yield item
            continue
        if graph is not None and (isinstance(item, Break) or item.look != look):
            graph.push(None)
            yield from finished(graph)
            graph = None
        if isinstance(item, Break) or (graph is None and not item.picture.interlaced_frame):
            yield item
            continue
        if graph is None:
            graph, look, frame = av.filter.Graph(), item.look, item.picture
            graph.threads = 1
            source = graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=_TICK
            )
            filters = [graph.add("bwdif", "mode=send_frame:deint=interlaced")]
            graph.link_nodes(source, *filters, graph.add("buffersink")).configure()
        waiting.append(item)
        graph.push(item.picture)
        yield from finished(graph)
    if graph is not None:
        graph.push(None)
        yield from finished(graph)


def _filtered_frames(items: Iterable[Item]) -> Iterator[Item]:
    """Yields as many frames, filtered as the container says."""
    graphs = collections.defaultdict[Filters, frames.FilterGraph](frames.FilterGraph)
    for item in items:
        if isinstance(item, Frame) and item.filters:
            yield _filtered(item, graphs[item.filters])
        else:
            yield item


def _filtered(frame: Frame, graph: frames.FilterGraph) -> Frame:
    picture = graph(frame.picture, lambda picture: frame.filters)
    is_quarter = any("transpose" in arguments for arguments in frame.filters)
    aspect = 1 / frame.look.pixel_aspect if is_quarter else frame.look.pixel_aspect
    return Frame(picture, Look(picture.width, picture.height, aspect, frame.look.colors), frame.pts)


def _rate(video: VideoStream, stamps: Sequence[int]) -> Fraction:
    """Returns the frames per second that a stream declares, or that its first time stamps say.

    FFmpeg guesses the rate of formats that do not declare one: "1000" of a Matroska file with 30.
    """
    declared = Fraction(video.average_rate or video.guessed_rate or 0)
    if len(stamps) < 2 or not video.time_base or stamps[-1] == stamps[0]:
        return declared
    span_s = (stamps[-1] - stamps[0]) * Fraction(video.time_base)
    measured = (len(stamps) - 1) / span_s
    slack = Fraction(3, 2) * Fraction(video.time_base) / span_s + _RATE_SLACK
    of_fields = 2 * declared  # each is a packet
    for rate in (declared, of_fields, Fraction(round(measured)), *_STANDARD_RATES):
        if rate and abs(rate / measured - 1) <= slack:
            return declared if rate == of_fields else rate
    # At a rate that varies, the declared one is that of the complete file.
    is_average = _LEAST_RATIO < declared / measured < 1 / _LEAST_RATIO
    return declared if is_average else measured


def _demuxed(container: InputContainer) -> Iterator[av.Packet]:
    """Yields all packets with data; some formats continue after an error."""
    since_error = 1
    while since_error:
        since_error = 0
        try:
            for packet in container.demux():
                since_error += 1
                if packet.size:
                    yield packet
        except av.FFmpegError:
            continue  # of the file's structure: what is missing is seen by its end or its gaps
        return


def chosen(
    path: str, container: InputContainer, packets: Iterator[av.Packet]
) -> tuple[VideoStream, list[av.Packet]]:
    """Returns the largest stream with several frames, and the packets that were read to find it.

    A poster is a stream of one frame; covers are marked.

    Raises:
        BadExample: there is no video stream.
    """
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        many = len(container.streams) >= _MAX_STREAMS
        limit = f" among its first {_MAX_STREAMS} streams" if many else ""
        raise BadExample(path, f"has no video stream{limit}")
    streams = [stream for stream in streams if stream.codec_context is not None]
    if not streams:
        raise BadExample(path, "has no video stream with a supported codec")
    read, counts = list[av.Packet](), collections.Counter[int]()
    max_packets = _PROBED if len(streams) > 1 else _TIMED
    for packet in itertools.islice(packets, max_packets):
        read.append(packet)
        counts[packet.stream_index] += 1
    moving = [stream for stream in streams if counts[stream.index] > 1] or streams
    return max(moving, key=lambda stream: stream.width * stream.height), read


class _Frames:
    """Decodes the packets of a stream."""

    def __init__(
        self, path: str, container: InputContainer, video: VideoStream, threads: str
    ) -> None:
        self.ends = _Ends(container, video)
        self._path, self._video, self._context = path, video, video.codec_context
        self._hidden = _hidden(path, container, video)
        check_size(path, video.width, video.height)
        prepare_decoder(video, threads)
        self._context.copy_opaque = True
        if self._context.name == "hevc":
            # Its decoder does not flag damaged frames, so it must fail on them.
            self._context.options = {**self._context.options, "err_detect": "crccheck+explode"}
        # Streams such as MPEG-2 in a transport stream may change the aspect, which a container such
        # as Matroska sets for all frames.
        stated, coded = video.sample_aspect_ratio, self._context.sample_aspect_ratio
        self._stated = stated if stated and stated != coded else None
        self._aspects: dict[int, Fraction] = {}
        self._sent = 0
        self._times: dict[int, int | None] = {}
        self._came: set[int] = set()
        self._missed: set[int] = set()  # packets whose frame did not come in its turn
        self._keys: set[int] = set()
        self._marked: int | None = None  # a packet that may be damaged
        self._last: Frame | None = None
        self._trusts = self._context.name in _TRUSTING
        self._unnoticed = self._context.name in _UNNOTICED or (
            self._context.name == "h264" and container.format.name in _LOSSY
        )
        self._held: collections.deque[tuple[int, VideoFrame]] = collections.deque()
        self._damages: list[tuple[int, str]] = [(-1, _BEFORE)]
        self._lost, self._yielded = 0, 0
        self._why = dict[str, None]()  # frames were lost since the last one
        self._clock, self._gaps = _Clock(), list[int]()
        self._of_exif: Filters | None = None
        self._image = b""

    def decoded(self, packet: av.Packet) -> Iterator[Item]:
        """Sends a packet to the decoder, and yields what is known to be intact."""
        self._image = self._image or bytes(packet)
        if packet.has_sidedata("encryption_info"):
            raise BadExample(self._path, "is encrypted: decrypt it first")
        number = self._sent
        if packet.is_keyframe:
            self._keys.add(number)
        gap = self._clock.gap(packet.dts)
        if gap:
            self._gaps.append(number)
            if self._trusts:
                self._damage(number - 1, "lacks frames")
            elif self._unnoticed and not packet.is_keyframe:
                self._damage(number, "lacks frames")
        if self._context.name in _WITHOUT_ZEROS and _ZEROS.search(packet):
            self._damage(number, "has zeros in place of data")
        if (gap < 0 or gap > _RECENT) and packet.is_keyframe:
            self._marked = None  # one of the last before another recording, all complete
        self._judge_marked(number - _MARKED_BEFORE)
        if packet.is_corrupt and self._marked is None:
            self._marked = number
        if self._context.name == "hevc":
            _hide_messages(packet, self._context.extradata)
        packet.opaque, self._times[number] = number, packet.pts
        yield from self._sent_to_decoder(packet)
        self._sent += 1

    def remaining(self) -> Iterator[Item]:
        """Yields the frames that the decoder still has, and why it has no more.

        Raises:
            BadExample: there was no frame at all.
        """
        self._judge_marked(self._sent)
        yield from self._sent_to_decoder(None)
        yield from self._released(everything=True)
        cut_off = self.ends.cut_off()
        if self._last is not None and not self._damages:
            yield self._last
        elif self._last is not None:
            self._lost += 1
        if not self._yielded:
            raise BadExample(self._path, self._no_frame())
        self._why.update(dict.fromkeys([*(text for _, text in self._damages), *cut_off]))
        if self._lost or self._why:
            yield self._break()

    def _no_frame(self) -> str:
        if not self._sent:
            return "has no video packets"
        damages = self._why | dict.fromkeys(text for _, text in self._damages)
        damages.pop(_BEFORE, None)
        why = f": it {'; it '.join(damages)}" if damages else ""
        return f"has {self._sent:,} video packets, but none yields a frame{why}"

    def _sent_to_decoder(self, packet: av.Packet | None) -> Iterator[Item]:
        number = self._sent
        try:
            pictures = self._context.decode(packet)
        except (av.FFmpegError, MemoryError) as error:
            for lost in (number - 1, number) if self._trusts else (number,):
                self._damage(lost, f"cannot be decoded: {reason(error)}")
            pictures = []
        self._aspects[number] = self._context.sample_aspect_ratio or Fraction(1)
        for picture in pictures:
            of = picture.opaque if isinstance(picture.opaque, int) else number
            self._came.add(of)
            self._held.append((of, picture))
            if picture.is_corrupt:
                self._damage(of, "has damaged frames")
        yield from self._released(everything=False)

    def _judge_marked(self, last: int) -> None:
        """Takes a packet that was marked for damaged, if it is not later than ``last``."""
        if self._marked is not None and self._marked <= last:
            self._damage(self._marked, "is damaged")
            if self._trusts:  # the next packet may begin in the damage
                self._damage(self._marked + 1, "is damaged")
            self._marked = None

    def _damage(self, number: int, text: str) -> None:
        """Notes that the frame of a packet is not intact, and those that are predicted from it."""
        self._damages.append((number, text))

    def _released(self, *, everything: bool) -> Iterator[Item]:
        """Yields the frames before which no other one was decoded that has not come yet.

        If such a frame is found to be damaged, so may be those that were predicted from it, which
        are shown before.
        """
        oldest = self._sent - _REORDERED_PACKETS
        while self._held:
            number, picture = self._held[0]
            unsure = self._sent if self._marked is None else self._marked
            waits = number >= unsure or (
                self._context.has_b_frames
                and any(other not in self._came for other in range(max(0, oldest), number))
            )
            if waits and not everything and len(self._held) < _REORDERED_PACKETS:
                return
            self._held.popleft()
            for item in self._checked(number, picture):
                yield from self._after_next(item)
        for old in [of for of in self._aspects if of < oldest - _REORDERED_PACKETS]:
            del self._aspects[old]
            self._times.pop(old, None)
            self._came.discard(old)
            self._missed.discard(old)
            self._keys.discard(old)

    def _after_next(self, item: Frame | Break) -> Iterator[Item]:
        """Yields a frame when the next one is known: the last one before damage may be damaged."""
        if not self._trusts:
            yield item
            return
        last, self._last = self._last, None
        if isinstance(item, Break):
            if last is not None and item.reason:
                item = item._replace(lost=item.lost + 1)
            elif last is not None:
                yield last
            yield item
            return
        if last is not None:
            yield last
        self._last = item

    def _checked(self, number: int, picture: VideoFrame) -> Iterator[Frame | Break]:
        is_key = bool(picture.key_frame) and picture.pict_type not in _PREDICTED
        is_key = is_key and (number in self._keys or self._context.name not in _UNNOTICED)
        gap = any(other <= number for other in self._gaps)
        damages = [damage for damage in self._damages if damage[0] <= number]
        if not self._yielded:  # some intact files do not mark their first keyframe
            is_key = is_key or picture.pict_type == PictureType.I
        self._why.update(dict.fromkeys(text for _, text in damages))
        if damages and not (is_key and all(damage[0] < number for damage in damages)):
            self._lost += 1
            return
        self._damages = [damage for damage in self._damages if damage[0] > number]
        self._note_missing(number, picture.pts)
        self._gaps = [other for other in self._gaps if other > number]
        if gap or self._lost or self._why.keys() - {_BEFORE}:
            yield self._break()
        self._yielded += 1
        self._why.clear()
        yield self._frame(number, picture)

    def _note_missing(self, number: int, pts: int | None) -> None:
        """Notes damaged packets that are later than a frame's, but would be shown before it."""
        for other, text in self._damages:
            if other not in self._times or other in self._came | self._missed:
                continue
            if any(number < gap <= other for gap in self._gaps):
                continue  # of another recording, with its own clock
            time = self._times[other]
            if time is None or pts is None or time < pts:
                self._missed.add(other)
                self._why[text] = None

    def _break(self) -> Break:
        """Returns why frames were lost since the last one; leading frames count as intact."""
        texts = [text for text in self._why if text != _BEFORE]
        lost, self._lost = self._lost, 0
        self._why.clear()
        return Break("; ".join(texts), lost)

    def _frame(self, number: int, picture: VideoFrame) -> Frame:
        if self._yielded == 1:
            _check_colors(self._path, picture)
        check_size(self._path, picture.width, picture.height)
        aspect = self._stated or self._aspects.get(number, Fraction(1))
        if not 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT:
            raise BadExample(self._path, f"has pixels {float(aspect):.4g} times as wide as high")
        colors = (
            *(picture.format.name, int(picture.color_range)),
            *(int(picture.colorspace), int(picture.color_trc)),
        )
        look = Look(picture.width, picture.height, aspect, colors)
        filters = self._cropping(picture) + self._turning(picture)
        return Frame(picture, look, picture.pts, filters)

    def _cropping(self, picture: VideoFrame) -> Filters:
        if self._hidden is None:
            return ()
        left, right, top, bottom = self._hidden
        width, height = picture.width - left - right, picture.height - top - bottom
        return (("crop", f"{width}:{height}:{left}:{top}:exact=1"),)

    def _turning(self, picture: VideoFrame) -> Filters:
        try:
            matrix: Any = picture.side_data.get("DISPLAYMATRIX")
        except ValueError:  # PyAV 18 does not know Exif's type: an image, the first one for all
            if self._of_exif is None:
                with PIL.Image.open(io.BytesIO(self._image)) as opened:
                    orientation = opened.getexif().get(_EXIF_ORIENTATION, 1)
                self._of_exif = _turn(*_OF_EXIF.get(orientation, (0, False)))
            return self._of_exif
        return () if matrix is None else _turn(*_orientation(matrix))


def _turn(degrees: int, mirror: bool) -> Filters:
    return ((("hflip",),) if mirror else ()) + _QUARTERS[degrees]


def _orientation(matrix: Any) -> tuple[int, bool]:
    """Returns degrees counterclockwise by which a display matrix turns a frame (ISO 14496-12,
    6.2.2), and whether it swaps left and right before that.
    """
    a, b, _, c, d, *_ = struct.unpack_from("<9i", matrix)
    mirror = a * d - b * c < 0
    right = (-a, -b) if mirror else (a, b)  # where the right of the frame points to
    degrees = float(np.degrees(np.arctan2(-right[1], right[0])))
    return round(degrees / 90) * 90 % 360, mirror


def _hide_messages(packet: av.Packet, extradata: bytes | None) -> None:
    """Gives messages of cameras (SEI, type 39) a type that HEVC's decoder ignores.

    A decoder that must fail on damage also fails on those that are malformed, which players ignore.
    """
    data = memoryview(packet)
    if not (extradata and extradata[0] == 1):  # units begin with a start code
        units = [match.end() for match in re.finditer(b"\x00\x00\x01", bytes(data))]
    else:  # or, with a record of the decoder's configuration, with their size (ISO 14496-15, 8.3.3)
        size_bytes, units, at = (extradata[21] & 3) + 1, [], 0
        while at + size_bytes < len(data):
            units.append(at + size_bytes)
            at += size_bytes + int.from_bytes(data[at : at + size_bytes], "big")
    for at in units:
        if at < len(data) and data[at] >> 1 & 63 == _SEI:
            data[at] = data[at] & 0x81 | _UNSPECIFIED << 1


class _Clock:
    """Finds gaps between packets, by when they are decoded."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._steps: collections.deque[int] = collections.deque(maxlen=_RECENT)
        self._stamped = _RECENT  # packets in a row that have a time stamp

    def gap(self, time: int | None) -> float:
        """Returns how many usual distances a time stamp is later than the last one, or earlier, if
        these are too many; else 0.

        It is earlier only where two recordings are joined, or later by more than 16.
        """
        last, self._last = self._last, time
        self._stamped = 0 if time is None else self._stamped + 1
        if last is None or time is None:
            return 0.0
        step, steps = time - last, self._steps
        largest = max(steps, default=0)
        if len(steps) < 2 or 0 < step <= largest:
            is_gap = False
        elif step > 0:
            # In a program stream, FFmpeg gives some packets the time stamp of the next one.
            regular = self._stamped > _RECENT and largest <= _REGULAR * min(steps)
            is_gap = step > (_GAP if regular else _IRREGULAR_GAP) * largest
        else:
            is_gap = -step > 2 * largest
        if is_gap:
            steps.clear()
        elif step > 0:
            steps.append(step)
        return step / largest if is_gap else 0.0


class _Ends:
    """Where the packets end, against what the headers declare."""

    def __init__(self, container: InputContainer, video: VideoStream) -> None:
        self._container, self._video = container, video
        self._count, self._end_s, self._any_end_s = 0, 0.0, 0.0
        self._start_s: float | None = None
        self._frame_s = float(1 / video.average_rate) if video.average_rate else 0.0

    def add(self, packet: av.Packet) -> None:
        """Notes the end of a packet."""
        is_video = packet.stream_index == self._video.index
        end_s = 0.0
        if packet.time_base is not None:
            duration_s = float((packet.duration or 0) * packet.time_base)
            if packet.pts is not None:
                start_s = float(packet.pts * packet.time_base)
                end_s = start_s + duration_s
                if is_video and (self._start_s is None or start_s < self._start_s):
                    self._start_s = start_s
            elif is_video:  # in a program stream, only the first frame of several has a time stamp
                end_s = self._end_s + (duration_s or self._frame_s)
        self._any_end_s = max(self._any_end_s, end_s)
        if is_video:
            self._count += 1
            self._end_s = max(self._end_s, end_s)

    def cut_off(self) -> list[str]:
        """Returns why the file is cut off, if it is.

        A declared number of frames is compared with the packets. Edit lists make intact files
        shorter than that, so the declared duration must be missing as well. Without a number, the
        duration is compared, which any stream may fill.
        """
        video, end_s = self._video, self._end_s
        if video.duration and video.time_base:
            declared_s = float(video.duration * video.time_base)
        elif self._container.duration:
            declared_s, end_s = self._container.duration / av.time_base, self._any_end_s
        else:
            declared_s = 0.0
        # In fragments, the duration may count from 0, although the clock starts later.
        start_s = self._start_s or 0.0
        lasts_s = end_s if end_s >= declared_s else end_s - start_s
        lacks = []
        if declared := video.frames:
            short = _too_few(declared - self._count, declared)
            lacks.append((short, f"{self._count:,} of {declared:,} declared frames"))
        if declared_s and self._frame_s:
            missing, expected = (declared_s - lasts_s, declared_s)
            short = _too_few(round(missing / self._frame_s), round(expected / self._frame_s))
            lacks.append((short, f"{lasts_s:.2f} of {declared_s:.2f} declared seconds"))
        if lacks and all(short for short, _ in lacks):
            return [f"is cut off: it has {lacks[0][1]}"]
        return []


def _too_few(missing: int, promised: int) -> bool:
    return missing > SLACK_FRAMES and missing > SLACK_SHARE * promised


def _check_colors(path: str, picture: VideoFrame) -> None:
    if picture.colorspace in MATRICES_WITHOUT_FILTER and not picture.format.is_rgb:
        matrix = MATRICES_WITHOUT_FILTER[picture.colorspace]
        raise BadExample(
            path, f"has {matrix} colors, which cannot be converted: encode it again in BT.709"
        )


_DESCRIBED = threading.Lock()  # the level of FFmpeg's messages is that of the process
_DOLBY_VISION = re.compile(r"DOVI configuration record:.*\bprofile: (\d+)")
_CROPPING = re.compile(r"Frame Cropping: (\d+)/(\d+)/(\d+)/(\d+)")  # left, right, top, bottom


def _hidden(
    path: str, container: InputContainer, video: VideoStream
) -> tuple[int, int, int, int] | None:
    """Returns how many pixels the container hides: at the left, right, top, and bottom.

    Raises:
        BadExample: its side data says that the frames' colors cannot be converted.
    """
    with _DESCRIBED:  # PyAV 18 does not give the side data of streams
        av.logging.set_level(av.logging.INFO)
        try:
            described = container.dumps_format()  # type: ignore[attr-defined]
        finally:
            av.logging.set_level(None)
    streams = re.split(r"\n  Stream #\d+:", described)
    side_data = next((text for text in streams[1:] if text.startswith(str(video.index))), "")
    dolby = _DOLBY_VISION.search(side_data)
    if dolby and dolby[1] == "5":  # 7 and 8 have a base layer with usual colors
        raise BadExample(
            path,
            "has colors of Dolby Vision's profile 5, which cannot be converted: encode it again in "
            "BT.709",
        )
    cropping = _CROPPING.search(side_data)
    if cropping is None or not any(map(int, cropping.groups())):
        return None
    left, right, top, bottom = map(int, cropping.groups())
    return left, right, top, bottom


def _movies(path: str, span: Span | None) -> tuple[int, int | None]:
    """Returns how many complete movies an MP4 file has, and where the second one begins.

    A movie begins with a box "ftyp" and has its index in a box "moov" (ISO 14496-12, 4.2). Other
    files have -1 movies.
    """
    begin, size = (0, os.path.getsize(path)) if span is None else (span.offset, span.size)
    movies, start, at = (0 if size >= 8 else -1), 0, 0
    with open(path if span is None else span.file, "rb") as file:
        while at + 8 <= size:
            file.seek(begin + at)
            length, kind = struct.unpack(">I4s", file.read(8))
            if length == 1:
                (length,) = struct.unpack(">Q", file.read(8).rjust(8, b"\0"))
            if not at and kind not in _FIRST_BOXES:
                return -1, None
            if length < 8:
                break
            if kind == b"ftyp":
                start = at
            movies += kind == b"moov" and at + length <= size
            if movies == 2 and start:
                return movies, start
            at += length
    return movies, None


@contextlib.contextmanager
def open_input(path: str, span: Span | None = None) -> Iterator[InputContainer]:
    """Opens a file, or part of one, for reading; its metadata may be in any encoding.

    Raises:
        DiskAway, BadExample: the system cannot read the file, now or at all; at the end of the
            block at the latest.
    """
    source = _Source(path, span)
    try:
        # By default, PyAV 18 raises on metadata that is not UTF-8; PyAV 19 has no such setting.
        with av.open(source, options=OPTIONS, **_ANY_TEXT) as container:
            yield container
    finally:
        source.close()
        if source.error is not None:
            raise source.error


class _Source:
    """Reads a file, or part of one, for FFmpeg, which takes some errors for the end of the file.

    Attributes:
        error: the first error of the system.
    """

    def __init__(self, path: str, span: Span | None) -> None:
        # By these suffixes, FFmpeg takes a file for one of numbered images, and would open others.
        stem, suffix = os.path.splitext(local(path))
        self.name = stem if suffix.lower() in _OF_IMAGES else local(path)
        self.error: Exception | None = None
        self._path = path
        self._file = path if span is None else span.file
        try:
            self._descriptor = os.open(self._file, os.O_RDONLY)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disks.unreadable(path, error, existed=True) from error
        self._begin, self._size = (0, size) if span is None else (span.offset, span.size)
        self._at = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes; none at the end."""
        size = max(0, min(size, self._size - self._at))
        try:
            data = os.pread(self._descriptor, size, self._begin + self._at)
        except OSError as error:
            self.error = self.error or disks.unreadable(self._path, error, existed=True)
            raise self.error from error
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a byte, and returns its number."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Returns the number of the next byte."""
        return self._at

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def local(path: str) -> str:
    """Returns a path for FFmpeg, to which ``12:30.mp4`` or ``concat:a|b`` would be a URL."""
    return f"file:{os.path.abspath(path)}"


def check_file(path: str) -> None:
    """Checks that a file has content.

    Raises:
        BadExample, DiskAway: it cannot be read, at all or now.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise disks.unreadable(path, error) from error
    except ValueError as error:  # a NUL in the name, from a list
        raise BadExample(path, f"is not a valid file name: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadExample(path, "is not a file")
    if status.st_size == 0:
        raise BadExample(path, "is empty")


def check_size(path: str, width: int, height: int) -> None:
    """Checks the frame size against :data:`MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise BadExample(path, f"is {width}x{height}: more than {MAX_PIXELS:,} pixels per frame")


def prepare_decoder(stream: VideoStream, threads: str = "NONE") -> None:
    """Makes a decoder reject frames above :data:`MAX_PIXELS` anywhere in the stream.

    Args:
        threads: FFmpeg's ``thread_type``; by default one, because workers use all cores.
    """
    stream.thread_type = threads  # type: ignore[assignment]  # an enum's name
    if threads == "NONE":
        stream.codec_context.thread_count = 1
    limit = {"max_pixels": str(MAX_PIXELS)}
    stream.codec_context.options = {**stream.codec_context.options, **limit}


def reason(error: Exception) -> str:
    """Returns the text of an error from PyAV or the system, without the path."""
    return getattr(error, "strerror", None) or str(error)
