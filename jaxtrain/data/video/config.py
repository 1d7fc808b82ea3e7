"""Video data sets: random clips of a folder or list of video files.

An example is one clip of one file (:mod:`jaxtrain.data.video.clips`), cut at random or, for a
teacher's latents, fixed.
"""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.data.source import Sources
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video import index, latents, scenes
from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample, InputError, Problem
from jaxtrain.storage import addresses

# The device's kernel reaches three of it (LARGEST_SIGMA in models/video_ae/augment.py).
LARGEST_SIGMA = 2.0

# Clips in a group of pictures of ordinary length: 3.4 times as fast as one by one.
_LARGEST_GROUP = 6

_NAMED = 5  # broken files that the console names; quarantine.jsonl names all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where video comes from, how clips are cut, and how they are varied."""

    path: str | None = None
    """A folder (read recursively), a video, a .tar of videos, shards-{000..127}.tar, or a .json,
    .jsonl, .csv or .txt list of videos and tars; also at https://, s3:// and gs://, from where
    files are fetched into the cache once."""
    val_path: str | None = None
    """The same for validation; None splits the files of path."""
    batch_size: int
    """Clips in a batch, over all devices and accumulation."""
    workers: int = 2
    """Processes that make examples; 0 makes them in the main process."""
    prefetch: int = 2
    """Parts of batches that each worker makes in advance. A process's rows of a batch have as many
    parts as divide the workers and its devices evenly (of one device: the workers and the rows)."""
    cache_dir: str | None = None
    """Folder for indexes and demonstration data; None is $JAXTRAIN_CACHE, else
    ~/.cache/jaxtrain."""
    demo: bool = False
    """With path None: train on moving scenes that are rendered once."""
    max_bad_share: float = 0.1
    """Stop if more than this share of the files cannot be used, 0 to 1."""
    train_split: float = 0.95
    """Share of the files that trains, 0 to 1; the rest validates. Without meaning where val_path is
    given."""
    verify: Literal["first_use", "index", "never"] = "first_use"
    """When to decode a file whole, to find one that is broken inside: when a process first uses it,
    all of them while indexing, or never."""
    windows: Literal["random", "fixed"] = "random"
    """random: clips are cut and varied at random; fixed: an epoch has each of the consecutive,
    centred, unvaried clips of each file once, for both splits: what a teacher's latents need."""
    teacher: str | None = None
    """With model.teacher: the name of the teacher whose latents are taken, as prepare latents
    prints it; None is the only one that the cache has for these sizes."""
    clips_per_video: int = 1
    """Training clips that an epoch takes from each file."""
    clips_per_group: int | None = None
    """Training clips of a file that are cut from one stretch of it and decoded together; it divides
    clips_per_video. They fall into as many batches in a row, which a worker makes at once. 1
    decodes each by itself; None is 1 where keyframes are close, as prepare clips writes them, else
    the largest divisor up to 6."""
    group_spread: int | None = None
    """Examples from one clip of a group to the next; None is batch_size, so that no two are in
    one batch. To resume with another batch_size, give the first one here."""
    min_frame_delta: int = 1
    """Least distance of two frames of a clip, in frames of the file."""
    max_frame_delta: int = 2
    """Largest distance of two frames of a clip, in frames of the file."""
    flip: bool = True
    """Mirror one half of the training clips left to right."""
    min_crop_scale: float = 0.8
    """Least side of a training crop, as a share of the largest crop that fits."""
    jitter_probability: float = 0.7
    """Share of training clips whose colours are varied."""
    brightness: float = 0.15
    """Brightness is multiplied by 1 - this to 1 + this."""
    contrast: float = 0.15
    """Contrast is multiplied by 1 - this to 1 + this."""
    saturation: float = 0.15
    """Saturation is multiplied by 1 - this to 1 + this."""
    hue: float = 0.08
    """Hue is turned by - this to + this, in full turns."""
    blur_probability: float = 0.2
    """Share of training clips that are blurred."""
    blur_sigma: tuple[float, float] | None = (0.1, 2.0)
    """Least and largest sigma of the Gaussian blur, in pixels; None blurs nothing."""

    def __post_init__(self) -> None:
        shares = ("max_bad_share", "train_split", "jitter_probability", "blur_probability")
        for name in (*shares, "brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(
                    f"data.{name} is a number from 0 to 1, not {value}", about=f"data.{name}"
                )
        if not 0 <= self.hue <= 0.5:
            raise InputError(
                f"data.hue is a number of turns from 0 to 0.5, not {self.hue}", about="data.hue"
            )
        if not 0 < self.min_crop_scale <= 1:
            text = f"data.min_crop_scale is above 0 and at most 1, not {self.min_crop_scale}"
            raise InputError(text, about="data.min_crop_scale")
        if not 1 <= self.min_frame_delta <= self.max_frame_delta:
            raise InputError(
                f"data.min_frame_delta ({self.min_frame_delta}) must be at least 1 and at most "
                f"data.max_frame_delta ({self.max_frame_delta})",
                about=("data.min_frame_delta", "data.max_frame_delta"),
            )
        if self.clips_per_video < 1:
            raise InputError(
                f"data.clips_per_video must be >= 1, not {self.clips_per_video}",
                about="data.clips_per_video",
            )
        if self.clips_per_group is not None and (
            self.clips_per_group < 1 or self.clips_per_video % self.clips_per_group
        ):
            raise InputError(
                f"data.clips_per_group={self.clips_per_group} does not divide "
                f"data.clips_per_video={self.clips_per_video}: all groups of a file have one size",
                about=("data.clips_per_group", "data.clips_per_video"),
            )
        if self.group_spread is not None and self.group_spread < 1:
            raise InputError(
                f"data.group_spread must be >= 1, not {self.group_spread}",
                about="data.group_spread",
            )
        if self.windows == "fixed" and self.clips_per_video != 1:
            raise InputError(
                f"data.clips_per_video={self.clips_per_video}: with data.windows=fixed an epoch "
                "has each clip of a file once; set --data.clips_per_video 1",
                about=("data.clips_per_video", "data.windows"),
            )
        if self.blur_sigma is not None and not (
            0 < self.blur_sigma[0] <= self.blur_sigma[1] <= LARGEST_SIGMA
        ):
            raise InputError(
                "data.blur_sigma is the least and the largest sigma in pixels, above 0 and at most "
                f"{LARGEST_SIGMA}, not {self.blur_sigma}",
                about="data.blur_sigma",
            )

    @property
    def largest_group(self) -> int:
        """Clips of a group where keyframes are far apart, or as many as the config says."""
        if self.clips_per_group is not None:
            return self.clips_per_group
        sizes = range(1, _LARGEST_GROUP + 1)
        return max(size for size in sizes if self.clips_per_video % size == 0)

    def problems(self, model: Any) -> list[str]:
        """What is wrong beside the fields' own values; no file is opened and nothing is fetched.

        Args:
            model: as for :meth:`open`.
        """
        found: list[str] = []
        taught = getattr(model, "teacher", None) is not None
        if taught and self.windows != "fixed":
            found.append(
                Problem(
                    "model.teacher is set, and a teacher's latents exist for fixed clips only: set "
                    "--data.windows fixed, or --model.teacher None",
                    "model.teacher",
                    "data.windows",
                )
            )
        if self.teacher is not None and not taught:
            found.append(
                Problem(
                    f"data.teacher={self.teacher}: nothing learns from it while model.teacher is "
                    "None",
                    "data.teacher",
                    "model.teacher",
                )
            )
        if self.path is None and not self.demo:
            found.append(
                Problem(
                    "no data given: name a folder or a list of videos with --data.path", "data.path"
                )
            )
        for flag, path in (("--data.path", self.path), ("--data.val_path", self.val_path)):
            if path is not None and video_files.is_absent(path):
                found.append(Problem(video_files.absent(flag, path), flag.removeprefix("--")))
        return found

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        """Index the files and split them.

        Args:
            model: its ``frames``, ``height`` and ``width`` (pixels) are those of a clip.
            seed: of the run; the split does not depend on it, only on names.
            say: takes messages for the console.

        Raises:
            InputError: no path, no such path, or not enough files to train and validate.
        """
        del seed
        if wrong := self.problems(model):
            raise InputError(*wrong)
        root = cache.root(self.cache_dir)
        taught = getattr(model, "teacher", None) is not None
        path = str(scenes.prepare(root, say)) if self.path is None else self.path
        train, bad, folder = self._index(path, "--data.path", model, root, say)
        val_folder = folder
        files = len(train) + len(bad)
        if self.val_path is not None:
            val, val_bad, val_folder = self._index(
                self.val_path, "--data.val_path", model, root, say
            )
            bad, files = bad + val_bad, files + len(val) + len(val_bad)
        else:
            if len({video_files.video_of(entry.name) for entry in train}) < 2:
                _say_left_out(bad, say)
                raise InputError(
                    f"only one video of {addresses.public(path)} can be used ({train[0].name}), "
                    "and it cannot both train and validate: give more videos, or others with "
                    "--data.val_path"
                )
            sides = video_files.split([entry.name for entry in train], self.train_split)
            val = [entry for entry, trains in zip(train, sides, strict=True) if not trains]
            train = [entry for entry, trains in zip(train, sides, strict=True) if trains]
        # Those that first use found broken stay in the order, so that it does not change between
        # two runs; they are named all the same, and the order's substitutes replace them.
        known = [
            BadExample(entry.path, entry.verdict.broken)
            for entry in (*train, *val)
            if entry.verdict is not None and entry.verdict.broken and self.verify == "first_use"
        ]
        _say_left_out(bad + known, say)
        frames = sum(entry.scanned.frames for entry in (*train, *val))
        good = files - len(bad) - len(known)
        train_clips = self._clips(model, train, folder, train=True)
        val_clips = self._clips(model, val, val_folder, train=False)
        if taught:
            found = latents.find(root, model, self.teacher, (train_clips, val_clips))
            say(f"latents of teacher {found.teacher}")
            train_clips = dataclasses.replace(train_clips, latents=found)
            val_clips = dataclasses.replace(val_clips, latents=found)
        return Sources(
            train=train_clips,
            val=val_clips,
            files=files,
            bad=tuple(bad + known),
            faster=self._faster(path, model) if train_clips.keyframes_are_far else "",
            summary=f"{files:,} videos ({good:,} good), {frames:,} frames, "
            f"{len(train):,} train / {len(val):,} val",
        )

    def _faster(self, path: str, model: Any) -> str:
        # From videos of 1280x720 with distant keyframes (benchmarks/RESULTS.md, "after prepare
        # clips"): 4.6 clips/s a core one by one, 22.7 from prepared pieces.
        source = shlex.quote(addresses.public(path))
        return (
            f"prepare the clips once, which makes them about five times as cheap to read: "
            f"{invocation.program()} prepare clips {source} OUT --height {model.height} --width "
            f"{model.width}; then --data.path OUT"
        )

    def _clips(self, model: Any, entries: list[Entry], folder: Path, *, train: bool) -> Clips:
        return Clips(
            config=self,
            frames=model.frames,
            height=model.height,
            width=model.width,
            entries=tuple(entries),
            folder=folder,
            train=train,
        )

    def _index(
        self, path: str, flag: str, model: Any, root: Path, say: Callable[[str], None]
    ) -> tuple[list[Entry], list[BadExample], Path]:
        """The usable files of one input, the others, and the input's folder in the cache."""
        found = video_files.find(path, flag, root, say)
        folder = index.folder_of(path, root)
        entries = index.build(found, folder, decode_all=self.verify == "index", say=say)
        usable, bad = [], []
        for entry in entries:
            reason = self._unusable(entry, model.frames)
            if reason is None:
                usable.append(entry)
            else:
                bad.append(BadExample(entry.path, reason))
        if not usable:
            _say_left_out(bad[1:], say)
            raise InputError(
                f"{flag} {addresses.public(path)}: none of {len(entries):,} videos can be used; "
                f"the first is {bad[0]}"
            )
        return usable, bad, folder

    def _unusable(self, entry: Entry, frames: int) -> str | None:
        """Why no clip can be cut from a file; None where one can."""
        if entry.info is None:
            return entry.reason
        if self.verify == "index" and entry.verdict is not None and entry.verdict.broken:
            return entry.verdict.broken
        missing = len(entry.verdict.missing) if entry.verdict and self.verify == "index" else 0
        if entry.info.frames - missing < frames:
            return f"is too short: {entry.info.frames - missing} frames, a clip needs {frames}"
        return None


def _say_left_out(bad: list[BadExample], say: Callable[[str], None]) -> None:
    for one in bad[:_NAMED]:
        say(f"left out: {one}")
    if len(bad) > _NAMED:
        say(f"left out: {len(bad) - _NAMED:,} more")
