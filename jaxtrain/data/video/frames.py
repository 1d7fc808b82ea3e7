"""From decoded frames to a clip: crop, resize and convert to RGB in one pass of libswscale.

One filter graph does all three without copying in between: 1280x720 to 720x480 takes 2.6 ms a frame
on one core, where converting with PyAV and resizing with Pillow takes 9 ms.
"""

from fractions import Fraction

import av
import av.filter
import numpy as np
from av.video.frame import VideoFrame

from jaxtrain.data.video.packets import Scan

# libswscale widens its bilinear kernel when it shrinks, so that nothing aliases. The flags make the
# result the same on every processor.
_FLAGS = "bilinear+accurate_rnd+bitexact"

# AVColorSpace (ITU-T H.273 matrix coefficients) to the scale filter's names.
_MATRICES = {
    1: "bt709",
    4: "fcc",
    5: "bt601",
    6: "bt601",
    7: "smpte240m",
    9: "bt2020",
    10: "bt2020",
}
_TIME_BASE = Fraction(1, 1000)  # filters want one; nothing here depends on time
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG


class Cut:
    """Cuts the same piece out of the frames of a clip and converts it, frame by frame.

    The piece has the target's aspect, so nothing is stretched; a small video is enlarged.

    Args:
        info: of the file; rotation and pixel aspect are taken from here.
        frames: of the clip.
        height, width: of the result, in pixels.
        scale: side of the piece as a share of the largest that fits, above 0 to 1.
        across, down: where the piece lies, 0 (left, top) to 1 (right, bottom) of the room there is.
        mirror: whether to swap left and right.

    Attributes:
        out_THWC: the clip, uint8 [T, height, width, 3], as far as frames were put.
    """

    def __init__(
        self,
        info: Scan,
        *,
        frames: int,
        height: int,
        width: int,
        scale: float,
        across: float,
        down: float,
        mirror: bool,
    ) -> None:
        self.out_THWC = np.empty((frames, height, width, 3), np.uint8)
        self._info = info
        self._place = (scale, across, down)
        turned = info.rotation % 180 == 90
        self._target = (width, height) if turned else (height, width)
        self._flip = ("vflip" if turned else "hflip") if mirror else None
        self._graph: av.filter.Graph | None = None
        self._made_for: tuple[object, ...] = ()

    def put(self, number: int, frame: VideoFrame) -> None:
        """Makes frame ``number`` of the clip from a frame as decoded, not yet rotated."""
        kind = _kind(frame)
        if self._graph is None or kind != self._made_for:  # a stream may change its size on the way
            high, wide = self._target
            piece = _piece(frame, self._info.pixel_aspect, wide / high, *self._place)
            self._graph, self._made_for = _graph(frame, piece, wide, high, self._flip), kind
        self._graph.push(frame)
        picture_HWC = self._graph.vpull().to_ndarray()
        self.out_THWC[number] = np.rot90(picture_HWC, self._info.rotation // 90)


class WholeFrames:
    """Converts whole frames of a video to RGB, upright, one after the other.

    Args:
        rotation: degrees counter-clockwise by which a stored frame is to be turned.
    """

    def __init__(self, rotation: int) -> None:
        self._turns = rotation // 90
        self._size = (0, 0)
        self._graph: av.filter.Graph | None = None
        self._kind: tuple[object, ...] = ()

    def __call__(self, frame: VideoFrame) -> np.ndarray:
        """uint8 [H, W, 3]; a stream that changes its size keeps that of its first frame."""
        kind = _kind(frame)
        if self._graph is None or kind != self._kind:
            self._size = self._size if self._graph else (frame.width, frame.height)
            whole = (frame.width, frame.height, 0, 0)
            self._graph, self._kind = _graph(frame, whole, *self._size, None), kind
        self._graph.push(frame)
        return np.ascontiguousarray(np.rot90(self._graph.vpull().to_ndarray(), self._turns))


def _kind(frame: VideoFrame) -> tuple[object, ...]:
    """What a filter graph is made for."""
    return frame.width, frame.height, frame.format.name, frame.color_range, frame.colorspace


def _piece(
    frame: VideoFrame, pixel_aspect: float, aspect: float, scale: float, across: float, down: float
) -> tuple[int, int, int, int]:
    """Width, height, left and top of the piece, in stored pixels.

    All even where the frame allows it, as colour is stored at half the resolution.
    """
    stored_aspect = aspect / pixel_aspect
    wide = min(frame.width, frame.height * stored_aspect) * scale
    high = min(frame.height, frame.width / stored_aspect) * scale
    piece_w, piece_h = _even(wide, frame.width), _even(high, frame.height)
    left, top = (frame.width - piece_w) * across, (frame.height - piece_h) * down
    return piece_w, piece_h, int(left) // 2 * 2, int(top) // 2 * 2


def _even(length: float, most: int) -> int:
    """The even number nearest to ``length``, from 2 to ``most``; ``most`` itself may be odd."""
    if length >= most - 0.5:
        return most
    return min(max(round(length / 2) * 2, 2), most)


def _graph(
    frame: VideoFrame, piece: tuple[int, int, int, int], width: int, height: int, flip: str | None
) -> av.filter.Graph:
    """Crop, flip, scale and convert; single-threaded, as the cores belong to the workers."""
    graph = av.filter.Graph()
    graph.threads = 1
    nodes = [
        graph.add_buffer(
            width=frame.width,
            height=frame.height,
            format=frame.format,
            time_base=_TIME_BASE,
        )
    ]
    if piece[:2] != (frame.width, frame.height):
        nodes.append(graph.add("crop", ":".join(map(str, piece)) + ":exact=1"))
    if flip is not None:
        nodes.append(graph.add(flip))
    options = f"{width}:{height}:flags={_FLAGS}{colour_options(frame)}"
    nodes.append(graph.add("scale", options))
    # Planes first: the direct way to packed RGB takes twice as long, and repeats colours that
    # videos store at half the resolution instead of interpolating them. Packing the planes then
    # copies bytes; NumPy takes twice as long for it.
    nodes.append(graph.add("format", "gbrp"))
    nodes.append(graph.add("format", "rgb24"))
    nodes.append(graph.add("buffersink"))
    graph.link_nodes(*nodes).configure()
    return graph


def is_hd(height: int, width: int) -> bool:
    """Whether players take an unmarked video of this size (pixels) for BT.709, not BT.601."""
    return width >= 1280 or height > 576


def colour_options(frame: VideoFrame) -> str:
    """How the scale filter is to understand a frame's colours; begins with a colon, or is empty."""
    if frame.format.is_rgb:
        return ""
    full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
    unmarked = "bt709" if is_hd(frame.height, frame.width) else "bt601"
    matrix = _MATRICES.get(frame.colorspace, unmarked)
    return f":in_range={'full' if full else 'limited'}:in_color_matrix={matrix}"
