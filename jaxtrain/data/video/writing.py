"""Writing a video frame by frame as H.264, with the sound of another file copied beside it."""

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.audio.stream import AudioStream
from av.video.reformatter import ColorRange, Colorspace

from jaxtrain.data.video import frames, packets
from jaxtrain.data.video.reading import Picture, Video
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic

ENDINGS = (".mp4", ".m4v", ".mov", ".mkv")
_TAG_BT709, _TAG_BT601 = 1, 6  # ITU-T H.273 matrix coefficients


def check_path(path: Path) -> None:
    """Refuses a place where no video can be written.

    Raises:
        InputError: names what is wrong.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a video that is written ends with one of {', '.join(ENDINGS)}")
    atomic.check_writable("OUT", path)


class Writer:
    """Takes pictures and packets of sound; made by :func:`writing`.

    Args:
        container: opened for writing.
        rate: frames a second, on average.
        time_base: seconds a tick of the pictures' time stamps.
        pixel_aspect: width of a pixel over its height.
        crf: H.264's quality, 0 (nothing lost) to 51.
        sound: streams whose packets will come.
    """

    def __init__(
        self,
        container: Any,
        *,
        rate: Fraction,
        time_base: Fraction,
        pixel_aspect: Fraction,
        crf: int,
        sound: list[AudioStream],
    ) -> None:
        self._container = container
        self._rate, self._time_base, self._aspect = rate, time_base, pixel_aspect
        self._options = {"crf": str(crf), "preset": "fast"}
        self._stream: Any = None
        self._waiting: list[av.Packet] = []
        self._sound = sound
        self._copies: dict[int, Any] = {}

    def add(self, picture: Picture) -> None:
        """The next frame, all of one size: even height and width."""
        height, width = picture.pixels.shape[:2]
        if self._stream is None:
            self._open(height, width)
        hd = frames.is_hd(height, width)
        frame = av.VideoFrame.from_ndarray(picture.pixels, "rgb24").reformat(
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709 if hd else Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
        )
        frame.pts, frame.time_base = picture.pts, self._time_base
        self._container.mux(self._stream.encode(frame))

    def copy(self, packet: av.Packet) -> None:
        """A packet of the sound."""
        if self._stream is None:  # the header needs the size of a picture
            self._waiting.append(packet)
            return
        packet.stream = self._copies[packet.stream_index]
        self._container.mux(packet)

    def finish(self) -> None:
        """What the encoder holds back."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))

    def _open(self, height: int, width: int) -> None:
        if height % 2 or width % 2:
            raise ValueError(f"H.264 with yuv420p needs even sizes, not {height}x{width}")
        stream = self._container.add_stream("libx264", rate=self._rate, options=self._options)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.time_base = stream.codec_context.time_base = self._time_base
        stream.codec_context.sample_aspect_ratio = self._aspect
        hd = frames.is_hd(height, width)
        stream.codec_context.colorspace = _TAG_BT709 if hd else _TAG_BT601
        stream.codec_context.color_range = ColorRange.MPEG
        self._stream = stream
        for one in self._sound:
            self._copies[one.index] = self._container.add_stream_from_template(one)
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
    """A writer; the file appears whole when the block ends without an error.

    Args:
        path: of the file; :func:`check_path` has let it pass.
        rate, time_base, pixel_aspect, crf: as for :class:`Writer`.
        sound_of: the video whose packets of sound will be copied.

    Raises:
        InputError: the kind of file cannot hold that sound, or the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        sound: list[AudioStream] = []
        if sound_of is not None:
            source = stack.enter_context(packets.open_input(str(sound_of.path)))
            sound = list(source.streams.audio)
        try:
            beside = stack.enter_context(atomic.appearing(path))
            container = stack.enter_context(av.open(str(beside), "w"))
            _check_sound(path, container, sound)
            writer = Writer(
                container,
                rate=rate,
                time_base=time_base,
                pixel_aspect=pixel_aspect,
                crf=crf,
                sound=sound,
            )
            yield writer
            writer.finish()
        except (av.FFmpegError, OSError) as error:
            raise InputError(f"{path} cannot be written: {packets.reason(error)}") from error


def _check_sound(path: Path, container: Any, sound: list[AudioStream]) -> None:
    for one in sound:
        context = one.codec_context
        codec = "of an unknown codec" if context is None else context.name
        names = set() if context is None else {codec, one.codec.canonical_name}
        if not names & container.supported_codecs:
            raise InputError(
                f"{path}: {path.suffix} cannot hold the sound, which is {codec}; name a file "
                "of another kind, as .mkv, or leave the sound out with --no-audio"
            )
