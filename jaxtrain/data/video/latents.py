"""A teacher's latents of fixed windows or their crops: computed once, and read with the clips.

Each video has one file in the cache, float16 [windows, L, h, w, C] without a header. Each crop of a
window counts as one, and follows the others. The file's name is a digest of the video's name,
content, and pieces, not of its location. A window that cannot be decoded is all NaN. If the cache
is in a bucket, the latents are written there, and :func:`find` fetches them.
:mod:`jaxtrain.data.video.encode_latents` computes them.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.config import invocation
from jaxtrain.data import remote
from jaxtrain.data.number_file import NumberFile
from jaxtrain.data.video.sets import Video
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import atomic, bucket_folders, disks

if TYPE_CHECKING:
    from jaxtrain.data.video.clips import Clips

ABOUT = "about.json"
_DTYPE = np.dtype(np.float16)
_FLAG = "--data.cache_dir"

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LatentStore:
    """The latents of one teacher for clips of one size.

    Attributes:
        folder: the teacher's folder in the cache.
        shape: shape of a clip's latents, [L, h, w, C].
        url: the folder in the bucket of the cache; None if the cache is on disk.
    """

    folder: Path
    shape: Shape
    url: str | None = None

    @property
    def teacher(self) -> str:
        """Returns the name of the teacher."""
        return self.folder.name

    @property
    def location(self) -> str:
        """Returns the folder or URL where latents are written."""
        return self.url or str(self.folder)

    def name(self, video: Video) -> str:
        """Returns the path of a video's latents, relative to the folder."""
        return f"{video.digest[:2]}/{video.digest[2:]}.f16"

    def missing(self, videos: Iterable[tuple[Video, int]]) -> list[Video]:
        """Returns the videos without latents on this disk.

        Lists the folders: to open a million files on a network disk takes minutes.

        Args:
            videos: with the number of windows of each.
        """
        sizes = {}
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with os.scandir(folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):  # another command's, unfinished
                        sizes[f"{folder.name}/{file.name}"] = file.stat().st_size
        return [
            video
            for video, windows in videos
            if sizes.get(self.name(video)) != windows * math.prod(self.shape) * _DTYPE.itemsize
        ]

    def load(self, video: Video, window: int) -> np.ndarray:
        """Loads the latents of a window, float32 [L, h, w, C].

        Raises:
            BadExample: they cannot be read, or do not exist because the window is broken.
            DiskAway: they cannot be read now.
        """
        file, count = NumberFile(str(self.folder / self.name(video)), _DTYPE), math.prod(self.shape)
        try:
            latents = file.read(window * count, (window + 1) * count).reshape(self.shape)
        except BadExample as bad:
            raise BadExample(video.path, f"its latents cannot be read: {bad}") from bad
        if np.isnan(latents[0, 0, 0, 0]):
            raise BadExample(video.path, f"window {window} has no latents: it could not be decoded")
        return latents.astype(np.float32)

    def save(self, file: Path, latents: Iterable[np.ndarray | None]) -> None:
        """Writes the latents of all windows of a video.

        Args:
            file: the file to write.
            latents: the windows, float16 [L, h, w, C]; None for one that has none.
        """
        nothing = np.full(self.shape, np.nan, _DTYPE)
        with open(file, "wb") as opened:
            for window in latents:
                opened.write((nothing if window is None else window).tobytes())

    def describe(self, teacher: str) -> None:
        """Writes the description of the teacher, by which :func:`find` knows it."""
        text = json.dumps({"teacher": teacher, "shape": list(self.shape)}, indent=1) + "\n"
        if self.url is None:
            atomic.write_whole(self.folder / ABOUT, text)
        else:
            bucket_folders.opened(self.url).put(ABOUT, text.encode())


def store(
    root: Path, size: str, shape: Shape, teacher: str, cache_url: str | None = None
) -> LatentStore:
    """Returns a teacher's store for clips of a size, whether or not it exists.

    Args:
        root: the cache folder.
        size: name of the size (:attr:`Clips.size`).
        shape: shape of a clip's latents, [L, h, w, C].
        teacher: its name.
        cache_url: the cache in a bucket, of which ``root`` is a copy.
    """
    folder = root / "latents" / size / teacher
    url = None if cache_url is None else f"{cache_url}/{folder.relative_to(root).as_posix()}"
    return LatentStore(folder, tuple(shape), url)


def _teachers(root: Path, size: str) -> list[str]:
    """Returns the teachers whose latents for clips of a size are on this disk."""
    return sorted(path.parent.name for path in (root / "latents" / size).glob(f"*/{ABOUT}"))


def find(
    root: Path,
    shape: Shape,
    teacher: str | None,
    splits: Sequence["Clips"],
    say: Callable[[str], None],
    cache_url: str | None = None,
) -> LatentStore:
    """Returns the store with all latents that a run needs.

    If this disk has them all, the bucket is not asked.

    Args:
        root: the cache folder.
        shape: shape of a clip's latents in the model, [L, h, w, C].
        teacher: name of the teacher; None selects the only one in the cache.
        splits: the windows, all of one :attr:`Clips.size`.
        say: prints a message.
        cache_url: the cache in a bucket, of which ``root`` is a copy.

    Raises:
        InputError: there are no latents, several teachers to choose from, latents of the wrong
            shape, or latents missing for some videos.
    """
    size = splits[0].size
    cure = (
        f"compute them with `{invocation.program()} prepare latents`, this run's --config, its "
        "--data and --model fields, and --teacher SPEC"
    )
    videos = [
        (video, split.windows(video) * split.block) for split in splits for video in split.videos
    ]
    cached = _teachers(root, size)
    chosen = teacher or (cached[0] if len(cached) == 1 else None)
    if cache_url is not None and (
        chosen not in cached or store(root, size, shape, chosen).missing(videos)
    ):
        url, folder = f"{cache_url}/latents/{size}", root / "latents" / size
        remote.copy_folder(url, folder, root, _FLAG, say, lambda name: name.endswith(ABOUT))
        cached = _teachers(root, size)
    else:
        cache_url = None
    if teacher is None and len(cached) > 1:
        raise InputError(
            f"the cache has latents of {len(cached)} teachers for clips of {size}: choose one with "
            f"--data.teacher ({', '.join(cached)})"
        )
    if not cached or (teacher is not None and teacher not in cached):
        lacking = "no teacher's latents" if teacher is None else f"no latents of teacher {teacher}"
        other_teachers = sorted(
            f"{path.parent.name} at {path.parent.parent.name}"
            for path in (root / "latents").glob(f"*/*/{ABOUT}")
        )
        known = f" (found: {', '.join(other_teachers)})" if other_teachers else ""
        raise InputError(f"{lacking} for clips of {size} in {root}{known}: {cure}")
    latents = store(root, size, shape, teacher or cached[0], cache_url)
    about = latents.folder / ABOUT
    try:
        stored_shape = tuple(atomic.read_json(about)["shape"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{about} is damaged ({disks.reason(error)}): delete it, for a cache in a bucket also "
            "there, and repeat prepare latents"
        ) from error
    if stored_shape != latents.shape:
        raise InputError(
            f"the latents of teacher {latents.teacher} have shape {stored_shape} (time, height, "
            f"width, channels), but the model's have {latents.shape}: change model.latent_channels "
            "or model.patch_size"
        )
    missing = latents.missing(videos)
    if latents.url is not None and missing:
        names = {latents.name(video) for video in missing}
        remote.copy_folder(latents.url, latents.folder, root, _FLAG, say, names.__contains__)
        missing = latents.missing(videos)
    if missing:
        raise InputError(
            f"the latents of teacher {latents.teacher} are missing for {len(missing):,} of "
            f"{len(videos):,} videos, such as {missing[0].name}: {cure}"
        )
    return latents
