"""Writes small videos whose frames show their number, and damages them."""

import struct
import types
from collections.abc import Callable, Container, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from jaxtrain.data import video
from jaxtrain.data.source import Sources
from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video.reader import Break, Frame, Reader

HEIGHT, WIDTH = 64, 96
_BITS = 8


def model(frames: int = 6, height: int = HEIGHT, width: int = WIDTH, **more: Any) -> Any:
    """Returns the fields of a model's config that video data reads."""
    size = {"frames": frames, "height": height, "width": width}
    return types.SimpleNamespace(batch_spec=lambda rows: {}, **size, **more)


MODEL = model()


def opened(path: Path | str, cache: Path | str, model: Any = MODEL, **settings: Any) -> Sources:
    """Opens videos as a run does, in batches of two."""
    given: dict[str, Any] = {"batch_size": 2, "cache_dir": str(cache), "convert_on": "host"}
    given |= settings
    return video.Config(path=str(path), **given).open(model, seed=0, say=lambda line: None)


def numbered(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Returns an image with eight dark or light bars: the bits of ``number``, highest first.

    Their contrast is low, so that the next number is not a new shot.
    """
    bits = [(number >> bit) & 1 for bit in range(_BITS - 1, -1, -1)]
    row = np.repeat(90 + 75 * np.array(bits, np.uint8), width // _BITS)
    row = np.pad(row, (0, width - len(row)))
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def number_of(image_HW3: np.ndarray) -> int:
    """Reads the number in an image of :func:`numbered`, at any size but not cropped."""
    width = image_HW3.shape[1]
    bars = [int((bar + 0.5) * (width // _BITS)) for bar in range(_BITS)]
    bits = [image_HW3[image_HW3.shape[0] // 2, x].mean() > 127 for x in bars]
    return sum(int(bit) << (_BITS - 1 - index) for index, bit in enumerate(bits))


def write(
    path: Path,
    frames: int | list[np.ndarray] = 30,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    fps: int = 25,
    full_range: bool = False,
    pixel_aspect: Fraction | None = None,
    title: str = "",
    container_options: dict[str, str] | None = None,
    **options: str,
) -> Path:
    """Encodes numbered frames, or the given images.

    Files of numbered frames with different names differ, so that they are not duplicates.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [numbered(n) for n in range(frames)] if isinstance(frames, int) else frames
    with av.open(str(path), "w", options=container_options or {}) as container:
        container.metadata["title"] = title or (path.stem if isinstance(frames, int) else "")
        stream: Any = container.add_stream(codec, rate=Fraction(fps), options=options)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = pix_fmt
        stream.codec_context.thread_count = 1
        if full_range:
            stream.codec_context.color_range = 2
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        for image in images:
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            if full_range:
                frame = frame.reformat(format=pix_fmt, dst_color_range="JPEG")
                frame.color_range = 2
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_at(
    path: Path, images: list[np.ndarray], stamps: list[int], *, per_s: int = 1000, **options: str
) -> Path:
    """Encodes images with the given timestamps, of which a second has ``per_s``."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25, options=options)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, per_s)
        for stamp, image in zip(stamps, images, strict=True):
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, per_s)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def without_frames(path: Path) -> Path:
    """Writes a video file without frames."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=25)
        stream.height = stream.width = 16
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    return path


def busy(frames: int, seed: int = 0, height: int = HEIGHT, width: int = WIDTH) -> list[np.ndarray]:
    """Returns images of moving noise; their file is large enough to be damaged in the middle."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height + frames, width, 3), np.uint8)
    return [noise[n : n + height] for n in range(frames)]


def smooth(number: int, height: int = 90, width: int = 160) -> np.ndarray:
    """Returns an image of smooth colors that move with its number."""
    y, x = np.mgrid[:height, :width].astype(float) * 90 / height
    waves = (x / 18 + number / 3, y / 14 - number / 5, (x + y) / 22)
    return np.stack([128 + 90 * np.sin(wave) for wave in waves], -1).astype(np.uint8)


def corners(height: int = 64, width: int = 96) -> np.ndarray:
    """Returns an image with a different gray in each corner."""
    image = np.zeros((height, width, 3), np.uint8)
    image[: height // 2, : width // 2], image[: height // 2, width // 2 :] = 40, 100
    image[height // 2 :, : width // 2], image[height // 2 :, width // 2 :] = 160, 220
    return image


def grays(image: np.ndarray) -> list[int]:
    """Returns the grays of the corners: top left and right, bottom left and right."""
    height, width = image.shape[:2]
    places = [(y, x) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return [int(round(float(image[place].mean()) / 60, 0)) * 60 for place in places]


def copied(
    source: Path, target: Path, change: Callable[[int, av.Packet], Sequence[av.Packet]]
) -> Path:
    """Copies a video's packets; each is replaced by those that ``change`` returns."""
    with av.open(str(source)) as given, av.open(str(target), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        packets = (packet for packet in given.demux(video=0) if packet.size)
        for number, packet in enumerate(packets):
            for other in change(number, packet):
                other.stream = stream
                made.mux(other)
    return target


def without_packets(source: Path, target: Path, numbers: Container[int]) -> Path:
    """Copies a video without some of its packets."""
    return copied(source, target, lambda number, one: [] if number in numbers else [one])


def truncate(path: Path, fraction: float) -> Path:
    """Cuts the end off a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    return path


def garble(path: Path, at: float = 0.6, length: int = 400) -> Path:
    """Overwrites some bytes in the middle with noise."""
    data = bytearray(path.read_bytes())
    start = int(len(data) * at)
    data[start : start + length] = np.random.default_rng(0).bytes(length)
    path.write_bytes(data)
    return path


def rotate_quarter(path: Path) -> Path:
    """Sets the rotation of an MP4 to 90 degrees clockwise (ISO 14496-12, 8.3.2)."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    data[matrix : matrix + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def shorten_edit(path: Path, fraction: float) -> Path:
    """Shortens the edit list of an MP4 to its first part (ISO 14496-12, 8.6.6)."""
    data = bytearray(path.read_bytes())
    field = data.index(b"elst") + 4 + 8
    (duration,) = struct.unpack_from(">I", data, field)
    struct.pack_into(">I", data, field, int(duration * fraction))
    path.write_bytes(data)
    return path


def decoded(path: Path | str, numbers: Sequence[int] | None = None) -> list[Frame]:
    """Returns the frames of an intact video with these numbers, or all of them, from its reader."""
    frames = list[Frame]()
    for item in Reader(str(path)):
        if isinstance(item, Frame):
            frames.append(item)
        else:
            assert isinstance(item, Break)
            assert not item.reason, f"frame {len(frames)}: {item.reason}"
    return frames if numbers is None else [frames[number] for number in numbers]


def cropped(frames: Sequence[Frame], *, height: int, width: int, **position: Any) -> np.ndarray:
    """Crops all frames alike; ``position`` has the fields of :class:`video_frames.CropPosition`."""
    where, look = video_frames.CropPosition(**position), frames[0].look
    clip = video_frames.Crop(look, frames=len(frames), height=height, width=width, position=where)
    for index, frame in enumerate(frames):
        clip.put(index, frame.picture)
    return clip.out_THWC


def growing(path: Path, small: tuple[int, int], large: tuple[int, int]) -> Path:
    """Writes an MPEG transport stream whose (height, width) changes after 150 frames."""
    content = b""
    for number, size in enumerate((small, large)):
        part = path.with_name(f"part{number}.ts")
        content += write(part, [numbered(n, *size) for n in range(150)]).read_bytes()
        part.unlink()
    path.write_bytes(content)
    return path


class Means:
    """A teacher whose latents identify the clip: means over squares and frames."""

    name = "means-0123"
    about = "means"

    def __init__(self) -> None:
        self.clips = 0
        self.batches: list[int] = []

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        assert video_BTHW3.dtype == np.float32
        assert 0 <= video_BTHW3.min() <= video_BTHW3.max() <= 1
        b, t, h, w, _ = video_BTHW3.shape
        self.batches.append(b)
        return video_BTHW3.reshape(b, 2, t // 2, h // 8, 8, w // 8, 8, 3).mean((2, 4, 6))


def films(folder: Path) -> Path:
    """Writes videos of 20 and 40 numbered frames, 25 and 60 per second, and a short one."""
    write(folder / "a.mp4", 20, fps=25)
    write(folder / "b.mp4", 40, fps=60)
    write(folder / "c.mp4", 5, fps=25)
    return folder
