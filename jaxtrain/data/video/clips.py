"""Chooses, decodes, and crops the clips of one split of a video data set.

The host chooses frames and crop, decodes, and crops. The host, or for prepared clips the device,
resizes to the model's size, mirrors, and converts to RGB.

Shapes: T frames, H height, W width. ``video_THWC`` is uint8, RGB, full range.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from av.video.frame import VideoFrame

from jaxtrain.data.validation import Validated
from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video import pieces
from jaxtrain.data.video.latents import LatentStore
from jaxtrain.data.video.sets import Piece, Video, Videos, clips_in, located
from jaxtrain.errors import BadExample
from jaxtrain.storage import cache

if TYPE_CHECKING:
    from jaxtrain.data.video import Config

_CACHED = ("_ends", "_last")
_DRAWS = 6  # uniform numbers that every training example draws, whether it needs them or not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clips:
    """The clips of one split, a :class:`jaxtrain.data.source.Source`.

    Attributes:
        frames, height, width: size of an example. The model's config is not stored, because a
            worker that unpickles it would import jax.
        crop_of: height and width of the clip that an example is a crop of; None if it is the clip.
        train: whether to cut and augment at random; otherwise clips are of consecutive frames, and
            not augmented.
        latents: a teacher's latents of fixed windows or of their crops, or None.
        plane_size: height and width of the planes that the device resizes and converts; None does
            both on the host.
    """

    config: "Config"
    frames: int
    height: int
    width: int
    videos: Videos
    train: bool
    crop_of: tuple[int, int] | None = None
    latents: LatentStore | None = None
    plane_size: tuple[int, int] | None = None

    @property
    def block(self) -> int:
        """Returns the number of successive examples that are crops of one decoded clip."""
        return self.config.block if self.train else 1

    @property
    def fingerprint(self) -> str:
        """Returns a hex digest of the videos, of their pieces, and of clips per video."""
        if not self._is_random:
            taught = None if self.latents is None else self.latents.teacher
            kind = "fixed" if self.config.windows == "fixed" else "validated"
            cut = () if self.crop_of is None else (self.size,)
            return cache.digest(self.videos.content, kind, self.frames, taught, *cut)
        crops = (self.block,) if self.block > 1 else ()
        clips = self._clips or f"by length, of {self.frames} frames"
        return cache.digest(self.videos.content, clips, *crops)

    @property
    def groups(self) -> int:
        """Returns the number of videos: clips of one are not independent of each other."""
        return len(self.videos)

    @property
    def _is_random(self) -> bool:
        """Whether clips are cut at random; otherwise an index stands for a place in a video."""
        return self.train and self.config.windows == "random"

    @property
    def _clips(self) -> int | None:
        """Clips of each video in an epoch; None if each has a number of its own."""
        return self.config.clips_per_video if self._is_random else None

    def __len__(self) -> int:
        clips = self._ends[-1] if self._clips is None else len(self.videos) * self._clips
        return int(clips) * self.block

    def validated(self, count: int) -> Validated:
        """Returns clips for a validation, evenly over the videos: a mean over videos.

        With fewer clips than videos, the videos are evenly chosen. With more, no video has two more
        than another that has further clips. Those of a video are evenly spaced and do not overlap,
        and :func:`jaxtrain.inference.evaluation.evaluation_clips.choose` has the same places.
        """
        max_clips = self.videos.clips(self.frames, self.frames)
        shares = _shares(max_clips, count)
        places = np.diff(self._ends, prepend=0)
        indices, numbers = [], np.flatnonzero(shares)
        for number in numbers.tolist():
            share, size = int(shares[number]), int(places[number])
            first = int(self._ends[number]) - size
            at = (np.arange(share) + 0.5) / share
            fixed = self.config.windows == "fixed"
            inside = np.floor(at * size) if fixed else np.round(at * (size - 1))
            indices.append(first + inside.astype(np.int64))
        of_videos = shares[numbers]
        return Validated(
            np.concatenate(indices),
            np.repeat(1 / of_videos, of_videos).astype(np.float32),
            np.repeat(numbers, of_videos),
        )

    @property
    def size(self) -> str:
        """Returns the name of a folder for what is computed from fixed windows or their crops."""
        size = f"{self.frames}x{self.height}x{self.width}"
        if self.crop_of is None:
            return size
        scales = (self.config.min_crop_scale, self.config.max_crop_scale)
        crops = cache.digest(self.crop_of, scales, self.config.flip, _DRAWS)[:8]
        return f"{size}-{self.block}-crops-{crops}"

    def windows(self, video: Video) -> int:
        """Returns a video's number of fixed, consecutive windows in its pieces."""
        return int(sum(clips_in(piece.frames, self.frames, self.frames) for piece in video.pieces))

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """Returns the cumulative number of clips, one for each video.

        They are consecutive windows, or as many random clips. To validate a run with random ones,
        they are all frames where a clip can begin.
        """
        return np.cumsum(self.videos.clips(self.frames, self._stride))

    @property
    def _stride(self) -> int:
        """Returns the frames from one place to the next."""
        return self.frames if self.config.windows == "fixed" or self.train else 1

    def _video_of(self, clip: int) -> tuple[Video, int]:
        """Returns the video of a clip, and the clip's number in it."""
        if self._clips is not None:
            return self.videos[clip // self._clips], clip % self._clips
        number = int(np.searchsorted(self._ends, clip, side="right"))
        return self.videos[number], clip - (int(self._ends[number - 1]) if number else 0)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Loads one clip.

        Returns:
            ``video``: uint8 [T, H, W, 3]. With a teacher also ``latents``: float32 [L, h, w, C].
            With ``plane_size`` in place of ``video``: ``luma``, ``chroma``, and ``crop``
            (:func:`jaxtrain.ops.yuv.to_rgb`).

        Raises:
            BadExample: a piece is damaged or missing, or too short for a clip.
        """
        clip, number = divmod(index, self.block)
        draws = rng.random((self.block, _DRAWS)) if self._is_random else np.empty(0)
        key = (clip, draws.tobytes())
        if key not in self._last:
            self._last.clear()
            crops = self._crops(clip, draws) if self._is_random else self._fixed(clip)
            if self.block == 1:
                return crops[0]
            self._last[key] = crops
        return dict(self._last[key][number])

    @functools.cached_property
    def _last(self) -> dict[tuple[int, bytes], list[dict[str, np.ndarray]]]:
        """Returns the crops of the last clip, because the next examples are the others of them."""
        return {}

    def _crops(self, clip: int, draws: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Decodes a clip once, and returns an example for each row of random numbers."""
        video, _ = self._video_of(clip)
        piece, numbers = self._choose(video, draws[0, :2])
        positions = [self._position(piece, row) for row in draws]
        return self._read(piece, numbers, positions)

    def _read(
        self, piece: Piece, numbers: list[int], positions: list[video_frames.CropPosition]
    ) -> list[dict[str, np.ndarray]]:
        cuts = [self._cut(piece, position) for position in positions]

        def put(number: int, frame: VideoFrame) -> None:
            for cut in cuts:
                cut.put(number, frame)

        pieces.read(piece.path, piece.span, numbers, put)
        return [cut.arrays() for cut in cuts]

    def _position(self, piece: Piece, draws: np.ndarray) -> video_frames.CropPosition:
        smallest, largest = self.config.min_crop_scale, self.config.max_crop_scale
        scale = (smallest + (largest - smallest) * draws[2]) * self._part_of_largest(piece)
        return video_frames.CropPosition(
            scale, draws[3], draws[4], bool(self.config.flip and draws[5] < 0.5)
        )

    def _part_of_largest(self, piece: Piece) -> float:
        """Returns the side of a crop of scale 1, as a fraction of the largest crop of its shape.

        At scale 1, it is as large a part of the clip as its size says: things are as large in it as
        in a validation, which sees the complete clip.
        """
        if self.crop_of is None:
            return 1.0
        high, wide = piece.look.display_size
        full_height, full_width = self.crop_of
        clip_height = min(high, wide * full_height / full_width)
        largest_height = min(high, wide * self.height / self.width)
        return clip_height * self.height / full_height / largest_height

    def _cut(
        self, piece: Piece, position: video_frames.CropPosition
    ) -> video_frames.Crop | video_frames.Planes:
        size = {"frames": self.frames, "height": self.height, "width": self.width}
        if self.plane_size is None:
            return video_frames.Crop(piece.look, **size, position=position)
        return video_frames.Planes(
            piece.look, **size, plane_size=self.plane_size, position=position
        )

    def _fixed(self, clip: int) -> list[dict[str, np.ndarray]]:
        """Returns the crops of a fixed window, or the window."""
        video, place = self._video_of(clip)
        examples = self._window(video, place)
        if self.latents is not None:
            for number, example in enumerate(examples):
                example["latents"] = self.latents.load(video, place * self.block + number)
        return examples

    def _window(self, video: Video, place: int) -> list[dict[str, np.ndarray]]:
        piece, numbers = self._at(video, place)
        if self.crop_of is None:
            return self._read(piece, numbers, [video_frames.CropPosition()])
        # Positions depend on the video, not on the run's seed or the number of crops: runs with
        # other seeds share the latents, and more crops begin with the same ones.
        draws = np.random.default_rng([int(video.digest, 16), place]).random((self.block, _DRAWS))
        return self._read(piece, numbers, [self._position(piece, row) for row in draws])

    def pixels(self, video: Video, window: int) -> list[np.ndarray]:
        """Returns the crops of a fixed window, or the window, uint8 [T, H, W, 3].

        Raises:
            BadExample: as :meth:`example` does.
        """
        on_host = dataclasses.replace(self, plane_size=None)
        return [example["video"] for example in on_host._window(video, window)]

    def __getstate__(self) -> dict[str, Any]:
        """Omits what is cached, such as a number of windows per file: each worker gets a copy."""
        return {name: value for name, value in vars(self).items() if name not in _CACHED}

    def _at(self, video: Video, place: int) -> tuple[Piece, list[int]]:
        """Returns the piece of the clip at a place in a video, and its frames."""
        lengths = np.array([piece.frames for piece in video.pieces])
        number, inside = located(clips_in(lengths, self.frames, self._stride), place)
        first = inside * self._stride
        return video.pieces[number], list(range(first, first + self.frames))

    def _choose(self, video: Video, draws: np.ndarray) -> tuple[Piece, list[int]]:
        """Returns a piece of a video and the numbers of a clip's frames in it.

        All clips that are inside of a piece are equally likely. If no piece is long enough for the
        frame delta drawn, the largest delta is used for which one is.

        Args:
            draws: two uniform numbers, for the delta and the first frame.

        Raises:
            BadExample: no piece is long enough for the frames of a clip.
        """
        count = self.frames
        lengths = np.array([piece.frames for piece in video.pieces])
        if lengths.max() < count:
            raise BadExample(video.path, f"has no {count} frames in a row, as a clip needs")
        delta = _pick(1, self.config.max_frame_delta, draws[0])
        delta = min(delta, (int(lengths.max()) - 1) // max(count - 1, 1))
        counts = clips_in(lengths, (count - 1) * delta + 1, 1)
        number, first = located(counts, _pick(0, int(counts.sum()) - 1, draws[1]))
        return video.pieces[number], [first + delta * at for at in range(count)]


def _shares(max_clips: np.ndarray, count: int) -> np.ndarray:
    """Returns how many clips each video validates, up to `max_clips`: as equal as possible."""
    videos = len(max_clips)
    count = min(count, int(max_clips.sum()))
    shares = np.zeros(videos, np.int64)
    left = count
    while left:
        able = np.flatnonzero(shares < max_clips)
        each = left // len(able)
        if each:
            added = np.minimum(max_clips[able] - shares[able], each)
            shares[able] += added
            left -= int(added.sum())
        else:  # of these, some evenly chosen ones have one more
            shares[able[np.arange(left) * len(able) // left]] += 1
            left = 0
    return shares


def _pick(smallest: int, largest: int, draw: float) -> int:
    """Maps a uniform draw from [0, 1) to an integer from ``smallest`` to ``largest``."""
    return smallest + min(math.floor((largest - smallest + 1) * draw), largest - smallest)
