"""Writes a video frame by frame as H.264, with the audio of another file."""

import contextlib
import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.audio.stream import AudioStream
from av.video.reformatter import ColorRange, Colorspace

from jaxtrain.data.video import frames, reader
from jaxtrain.errors import InputError
from jaxtrain.inference.video.reading import Frame, Video
from jaxtrain.storage import atomic, disks

ENDINGS = (".mp4", ".m4v", ".mov", ".mkv")
_THREADS = 8  # the bytes depend on it; by default, it is that of the machine's cores
_USUAL_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1"}
_USUAL_LAYOUTS |= {7: "6.1", 8: "7.1"}
_NOT_IN_MOV = ("flac", "opus")  # FFmpeg's table has them, and its muxer refuses them
_TAG_BT709, _TAG_BT601 = 1, 6  # ITU-T H.273 matrix coefficients


def check_path(path: Path) -> None:
    """Checks that a video can be written to a path."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(
            f"{path}: the suffix of an output video must be one of {', '.join(ENDINGS)}"
        )
    atomic.check_writable("OUT", path)


@dataclasses.dataclass
class Writer:
    """Writes frames and audio packets; created by :func:`writing`, with its arguments."""

    container: Any
    rate: Fraction
    time_base: Fraction
    pixel_aspect: Fraction
    crf: int
    sound: list[AudioStream]

    def __post_init__(self) -> None:
        self._options = {"crf": str(self.crf), "preset": "fast", "x264-params": frames.REPEATABLE}
        self._stream: Any = None
        self._waiting: list[av.Packet] = []
        self._copies: dict[int, Any] = {}

    def add(self, image: Frame) -> None:
        """Encodes the next frame; all frames have the same, even height and width."""
        height, width = image.pixels.shape[:2]
        if self._stream is None:
            self._open(height, width)
        hd = frames.is_hd(height, width)
        frame = av.VideoFrame.from_ndarray(image.pixels, "rgb24").reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709 if hd else Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
        )
        frame.pts, frame.time_base = image.pts, self.time_base
        self.container.mux(self._stream.encode(frame))

    def copy(self, packet: av.Packet) -> None:
        """Copies an audio packet."""
        if self._stream is None:  # the header needs the size of a frame
            self._waiting.append(packet)
            return
        packet.stream = self._copies[packet.stream_index]
        self.container.mux(packet)

    def finish(self) -> None:
        """Writes the frames that the encoder still holds."""
        if self._stream is not None:
            self.container.mux(self._stream.encode(None))

    def _open(self, height: int, width: int) -> None:
        if height % 2 or width % 2:
            raise ValueError(f"H.264 with yuv420p needs even sizes, not {height}x{width}")
        stream = self.container.add_stream("libx264", rate=self.rate, options=self._options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.thread_type, stream.codec_context.thread_count = "FRAME", _THREADS
        stream.time_base = stream.codec_context.time_base = self.time_base
        stream.codec_context.sample_aspect_ratio = self.pixel_aspect
        hd = frames.is_hd(height, width)
        stream.codec_context.colorspace = _TAG_BT709 if hd else _TAG_BT601
        stream.codec_context.color_range = ColorRange.MPEG
        self._stream = stream
        for source in self.sound:
            copy = self.container.add_stream_from_template(source)
            context = source.codec_context
            # AVI and Matroska do not say which channels PCM has, and MP4 has to.
            if context is not None and context.layout.name.endswith(" channels"):
                copy.codec_context.layout = _USUAL_LAYOUTS.get(
                    context.channels, context.layout.name
                )
            self._copies[source.index] = copy
        for packet in self._waiting:
            self.copy(packet)
        self._waiting.clear()


@contextlib.contextmanager
def writing(
    path: Path,
    *,
    rate: Fraction,
    time_base: Fraction,
    pixel_aspect: Fraction = Fraction(1),
    crf: int,
    sound_of: Video | None = None,
) -> Iterator[Writer]:
    """Yields a writer; the complete file appears when the block ends without an error.

    Args:
        path: the output file, which must have passed :func:`check_path`.
        rate: average number of frames per second.
        time_base: seconds per tick of the frames' time stamps.
        pixel_aspect: width of a pixel divided by its height.
        crf: H.264's quality, 0 (lossless) to 51.
        sound_of: the video whose audio packets will be copied.

    Raises:
        InputError: the file format does not support the audio codec, or writing fails.
        RunAgain: the disk is full.
    """
    with contextlib.ExitStack() as inputs:
        sound: list[AudioStream] = []
        if sound_of is not None:
            source = inputs.enter_context(reader.open_input(str(sound_of.path)))
            sound = list(source.streams.audio)
        try:
            with atomic.appearing(path) as beside, _opened(beside) as container:
                _check_sound(path, container, sound)
                writer = Writer(container, rate, time_base, pixel_aspect, crf, sound)
                yield writer
                writer.finish()
        except (av.FFmpegError, OSError) as error:
            raise disks.unwritable(path, reader.reason(error)) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a file for writing. Closing writes, too; after an error, only that one counts."""
    container = av.open(str(path), "w")
    try:
        yield container
    except BaseException:
        with contextlib.suppress(av.FFmpegError, OSError):
            container.close()
        raise
    container.close()


def _check_sound(path: Path, container: Any, sound: list[AudioStream]) -> None:
    for stream in sound:
        context = stream.codec_context
        codec = "(unknown)" if context is None else context.name
        names = set() if context is None else {codec, stream.codec.canonical_name}
        refused = path.suffix.lower() == ".mov" and names & {*_NOT_IN_MOV}
        if refused or not names & container.supported_codecs:
            raise InputError(
                f"{path}: {path.suffix} does not support the audio codec {codec}: choose another "
                "format, such as .mkv, or omit the audio with --no-audio"
            )
