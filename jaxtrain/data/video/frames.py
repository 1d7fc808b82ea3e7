"""Turns decoded frames into a clip, on the host or in a form that the device completes.

:class:`Crop` crops, resizes, and converts to RGB in one libswscale pass, without intermediate
copies. 1280x720 to 720x480 takes 2.6 ms per frame on one core; converting with PyAV and resizing
with Pillow takes 9 ms. :class:`Planes` only copies the crop of each plane, in 0.15 ms; the device
resizes and converts (:mod:`jaxtrain.ops.yuv`).
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import av
import av.filter
import numpy as np
from av.video.frame import VideoFrame

if TYPE_CHECKING:
    from jaxtrain.data.video.reader import Look

# By default, x264 chooses instructions, which round differently, by a frame's memory address: 18 of
# 1,600 repeated files differed, and none with this. The bytes also depend on the number of threads.
REPEATABLE = "cpu-independent=1"

# libswscale widens its bilinear kernel when it shrinks an image, which prevents aliasing. The flags
# make the result the same on every processor.
_FLAGS = "bilinear+accurate_rnd+bitexact"

# Maps AVColorSpace (ITU-T H.273 matrix coefficients) to the scale filter's names.
_MATRICES = {
    1: "bt709",
    4: "fcc",
    5: "bt601",
    6: "bt601",
    7: "smpte240m",
    9: "bt2020",
    10: "bt2020",
}
# Convert to planar RGB first: direct conversion to packed RGB takes twice as long and repeats
# colors, which videos store at half the resolution, instead of interpolating them. Packing the
# planes afterwards only copies bytes; NumPy takes twice as long for that.
_TO_RGB = ("gbrp", "rgb24")
LIMITED_BT709 = ":out_range=limited:out_color_matrix=bt709"
"""The scale filter's color options for a result like prepared clips."""
_TIME_BASE = Fraction(1, 1000)  # required by filters; nothing here depends on time
_LIMITED_RANGE, _FULL_RANGE = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG

Filters = Callable[[VideoFrame], Sequence[tuple[str, ...]]]
"""Returns the names and arguments of filters for frames like the given one."""


class CropPosition(NamedTuple):
    """Where a clip's crop is in its frames. It has the target's aspect ratio.

    Attributes:
        scale: side length of the crop as a fraction of the largest that fits, above 0 to 1.
        across, down: position of the crop within the possible range, from 0 (left, top) to 1
            (right, bottom).
        mirror: whether to swap left and right.
    """

    scale: float = 1.0
    across: float = 0.5
    down: float = 0.5
    mirror: bool = False


class FilterGraph:
    """Filters frames in one thread; size and format may change within a stream."""

    def __init__(self) -> None:
        self._graph: av.filter.Graph | None = None
        self._kind: tuple[object, ...] = ()

    def __call__(self, frame: VideoFrame, filters: Filters) -> VideoFrame:
        """Returns the filtered frame.

        Args:
            filters: the same for all frames. It is not stored: a method of the object that has the
                graph would keep that object, with its clip, until Python collects garbage, and
                memory that is not used again at once costs 2 ms per frame of 480x720.
        """
        kind = (
            *(frame.width, frame.height, frame.format.name),
            *(frame.color_range, frame.colorspace),
        )
        if self._graph is None or kind != self._kind:
            graph = av.filter.Graph()
            graph.threads = 1
            source = graph.add_buffer(
                width=frame.width,
                height=frame.height,
                format=frame.format,
                time_base=_TIME_BASE,
            )
            nodes = [graph.add(*arguments) for arguments in filters(frame)]
            graph.link_nodes(source, *nodes, graph.add("buffersink")).configure()
            self._graph, self._kind = graph, kind
        self._graph.push(frame)
        return self._graph.vpull()


class Crop:
    """Crops and converts the frames of a clip, one by one, with the same crop.

    Nothing is stretched; a small video is enlarged.

    Attributes:
        out_THWC: the clip, uint8 [T, height, width, 3]; frames not yet put are undefined.
    """

    def __init__(
        self,
        look: "Look",
        *,
        frames: int,
        height: int,
        width: int,
        position: CropPosition,
    ) -> None:
        self.out_THWC = np.empty((frames, height, width, 3), np.uint8)
        self._look = look
        self._position = position
        self._graph = FilterGraph()

    def _filters(self, frame: VideoFrame) -> list[tuple[str, ...]]:
        high, wide = self.out_THWC.shape[1:3]
        stored = (frame.width, frame.height)
        crop = crop_of(stored, self._look.pixel_aspect, wide / high, self._position)
        flip = (("hflip",),) if self._position.mirror else ()
        return _filters(frame, crop, wide, high, flip=flip)

    def put(self, number: int, frame: VideoFrame) -> None:
        """Sets frame ``number`` of the clip."""
        image = self._graph(frame, self._filters)
        (plane,) = image.planes
        strides = (plane.line_size, 3, 1)  # a view, where to_ndarray copies
        self.out_THWC[number] = np.ndarray(
            (image.height, image.width, 3), np.uint8, memoryview(plane), strides=strides
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the example."""
        return {"video": self.out_THWC}


class Planes:
    """Copies the crop of each frame of a piece as YUV 4:2:0 planes, for the device.

    libswscale resizes a crop that is larger than the planes. Of such a crop, only the colors differ
    from those of :class:`Crop`: they have half the resolution.

    Args:
        look: form of the piece's frames, which are yuv420p, BT.709, limited range.
        height, width: size that the device gives the clip, in pixels.
        plane_size: height and width of the planes (:func:`plane_size`).
    """

    def __init__(
        self,
        look: "Look",
        *,
        frames: int,
        height: int,
        width: int,
        plane_size: tuple[int, int],
        position: CropPosition,
    ) -> None:
        high, wide = plane_size
        self._luma_Thw = np.empty((frames, high, wide), np.uint8)
        self._chroma_T2hw = np.empty((frames, 2, high // 2, wide // 2), np.uint8)
        self._mirror = position.mirror
        stored = (look.width, look.height)
        self._crop = crop_of(stored, look.pixel_aspect, width / height, position)
        self._fits = self._crop[0] <= wide and self._crop[1] <= high
        # A crop that does not fit gets its last size here, so that it is not resized twice.
        self._wide, self._high = self._crop[:2] if self._fits else (width, height)
        self._graph = FilterGraph()

    def put(self, number: int, frame: VideoFrame) -> None:
        """Sets frame ``number`` of the clip."""
        left, top = self._crop[2:]
        if not self._fits:
            frame, left, top = self._graph(frame, self._filters), 0, 0
        outs = (self._luma_Thw[number], *self._chroma_T2hw[number])
        for out_hw, plane, subsampling in zip(outs, frame.planes, (1, 2, 2), strict=True):
            rows_hw = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            high, wide = self._high // subsampling, self._wide // subsampling
            out_hw[:high, :wide] = rows_hw[top // subsampling :][:high, left // subsampling :][
                :, :wide
            ]
            out_hw[high:] = out_hw[:high, wide:] = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the example, as :func:`jaxtrain.ops.yuv.to_rgb` expects them."""
        crop = np.array([self._high, self._wide, self._mirror], np.int32)
        return {"luma": self._luma_Thw, "chroma": self._chroma_T2hw, "crop": crop}

    def _filters(self, frame: VideoFrame) -> list[tuple[str, ...]]:
        size = self._wide, self._high
        return _filters(frame, self._crop, *size, formats=("yuv420p",), colors=LIMITED_BT709)


def plane_size(
    height: int, width: int, min_crop_scale: float, max_crop_scale: float = 1.0
) -> tuple[int, int]:
    """Returns the height and width of planes for crops of any scale, in pixels; both are even.

    A smallest crop is not enlarged then, and the largest one is stored without shrinking it.
    """
    larger = max_crop_scale / min_crop_scale
    high, wide = (math.ceil(round(side * larger, 6) / 2) * 2 for side in (height, width))
    return high, wide


def complete(frame: VideoFrame, height: int, width: int) -> list[tuple[str, ...]]:
    """Returns filters that convert a complete frame to an RGB image of some size."""
    return _filters(frame, (frame.width, frame.height, 0, 0), width, height)


def crop_of(
    stored: tuple[int, int], pixel_aspect: float | Fraction, aspect: float, position: CropPosition
) -> tuple[int, int, int, int]:
    """Returns width, height, left, and top of the crop, in stored pixels.

    All are even where the frame allows it, because color is stored at half the resolution.

    Args:
        stored: width and height of the frame.
        pixel_aspect: width of a stored pixel divided by its height.
        aspect: width of the crop divided by its height, as shown.
    """
    width, height = stored
    stored_aspect = aspect / float(pixel_aspect)
    wide = min(width, height * stored_aspect) * position.scale
    high = min(height, width / stored_aspect) * position.scale
    crop_w, crop_h = _even(wide, width), _even(high, height)
    left, top = (width - crop_w) * position.across, (height - crop_h) * position.down
    return crop_w, crop_h, int(left) // 2 * 2, int(top) // 2 * 2


def _even(length: float, limit: int) -> int:
    """Returns the even number nearest to ``length``, from 2 to ``limit``, which may be odd."""
    if length >= limit - 0.5:
        return limit
    return min(max(round(length / 2) * 2, 2), limit)


def _filters(
    frame: VideoFrame,
    crop: tuple[int, int, int, int],
    width: int,
    height: int,
    *,
    flip: tuple[tuple[str], ...] = (),
    formats: Sequence[str] = _TO_RGB,
    colors: str = "",
) -> list[tuple[str, ...]]:
    """Returns filters that crop, flip, scale, and convert.

    Args:
        crop: width, height, left, and top of the crop.
        colors: the scale filter's color options for the result.
    """
    cuts = crop[:2] != (frame.width, frame.height)
    return [
        *([("crop", ":".join(map(str, crop)) + ":exact=1")] if cuts else ()),
        *flip,
        *gray_as_yuv(frame),
        ("scale", f"{width}:{height}:flags={_FLAGS}{color_options(frame)}{colors}"),
        *(("format", name) for name in formats),
    ]


def gray_as_yuv(frame: VideoFrame) -> list[tuple[str, ...]]:
    """Returns filters for gray frames of limited range, which libswscale takes for full range."""
    name = frame.format.name
    if frame.color_range != _LIMITED_RANGE or not name.startswith(("gray", "ya")):
        return []
    bits = frame.format.components[0].bits
    depth = "" if bits == 8 else f"{bits}le"
    return [("scale", "in_range=full:out_range=full"), ("format", f"yuv444p{depth}")]


def is_hd(height: int, width: int) -> bool:
    """Returns whether players assume BT.709, not BT.601, for an unmarked video of this size."""
    return width >= 1280 or height > 576


def color_options(frame: VideoFrame) -> str:
    """Returns the scale filter's color options for a frame: empty, or beginning with a colon."""
    if frame.format.is_rgb:
        return ""
    full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
    unmarked = "bt709" if is_hd(frame.height, frame.width) else "bt601"
    matrix = _MATRICES.get(frame.colorspace, unmarked)
    return f":in_range={'full' if full else 'limited'}:in_color_matrix={matrix}"
