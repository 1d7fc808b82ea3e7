"""Configures video data sets: clips from a folder or list of video files.

An example is one clip of one file (:mod:`jaxtrain.data.video.clips`), at a random position or, for
a teacher's latents, at a fixed one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from jaxtrain.config import bounds
from jaxtrain.data import listing, quarantine
from jaxtrain.data.contract import DataConfig
from jaxtrain.data.source import ArrayTypes, Sources
from jaxtrain.data.video import demo_videos, latents, pieces, sets, split
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.sets import Videos
from jaxtrain.errors import BadExample, InputError, Problem
from jaxtrain.storage import addresses, cache, disks
from jaxtrain.storage.atomic import expanded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DataConfig):
    """Source of the videos; how clips are cut and augmented."""

    path: str | None = None
    """Video data: a folder (read recursively), a video, a .tar of videos, a pattern such as
    shards-{000..127}.tar, or a .jsonl, .csv, or .txt list of videos and tars; or the output of
    prepare clips, of which the run else makes one in the cache. Files may be at s3:// and gs://;
    those at https:// are only fetched by prepare clips."""
    val_path: str | None = None
    """Video data for validation, in the same form as path; None splits the files of path."""
    batch_size: int
    """Global batch size: clips per step, over all devices and microbatches."""
    workers: int | None = None
    """Worker processes that load examples, per host and not per GPU. None uses as many as the
    host's cores allow; 0 loads examples in the main process. The number never changes the examples
    or their order."""
    prefetch: int = 2
    """Batch parts that each worker loads in advance. A process divides its clips of a batch into
    gcd(workers, devices) parts; with one device, into gcd(workers, clips). With crops_per_clip,
    there may be fewer, so that they share as few clips as possible."""
    cache_dir: str | None = None
    """Folder for sets of pieces, latents, fetched files, and demo data; None uses $JAXTRAIN_CACHE,
    or else ~/.cache/jaxtrain. With s3://BUCKET/PATH or gs://BUCKET/PATH, sets and latents are kept
    there, training fetches them, and $JAXTRAIN_CACHE has copies. Hosts that share neither cannot
    make a set together."""
    demo: bool = False
    """If path is None, train on synthetic moving scenes, which are rendered once."""
    max_bad_share: bounds.ClosedFraction = 0.1
    """Largest fraction of unusable files, 0 to 1; with more, the run stops."""
    train_split: bounds.ClosedFraction = 0.95
    """Fraction of the clips for training, 0 to 1; the others, of other videos, are for validation.
    Ignored if val_path is set, or if names say what validates: folders train and val."""
    prepare: bool = False
    """Cut videos into pieces at the start of a run also if that takes more than half an hour, or
    more than the free disk. Pieces that the cache has are never cut again."""
    windows: Literal["random", "fixed"] = "random"
    """How clips are chosen. random: training clips are cut and augmented at random. fixed: in both
    splits, an epoch contains each of a video's consecutive clips once, center-cropped and not
    augmented; with crop, training has crops_per_clip random crops of each, which are the same in
    every epoch and run. model.teacher requires this, except with model.teacher.network."""
    teacher: str | None = None
    """With model.teacher: the name of the teacher whose latents are used, as printed by prepare
    latents; None selects the only teacher in the cache for this clip size."""
    clips_per_video: bounds.Count | None = 1
    """Training clips per video and epoch, each at a random position and decoded by itself: a film
    counts as much as a short clip. None takes as many as fit into the video one after another, so
    each video counts by its length, as with windows fixed."""
    convert_on: Literal["host", "device"] | None = None
    """Where training clips are resized and converted to RGB. With device, the workers only decode,
    and load prepared clips 1.6 times as fast; some values differ by one of 255 levels, at the
    border by two. None uses device, unless path is a URL or was written by prepare clips for
    larger clips or a smaller min_crop_scale."""
    max_frame_delta: bounds.Count = 2
    """Largest distance between consecutive frames of a training clip, in frames of the file. Each
    from 1 to this is equally likely; 1 takes every frame."""
    flip: bool = True
    """Mirror half of the training clips left to right."""
    crop: tuple[bounds.Count, bounds.Count] | None = None
    """Height and width of training examples (pixels): random crops of clips of model.height x
    model.width, which validations see completely: one per device must fit, without gradients. None
    trains on complete clips."""
    crops_per_clip: bounds.Count = 1
    """Training examples from each decoded clip: crops at random positions, each augmented by
    itself, which follow each other in the order. Decoding costs that much less per example. The
    number of examples that a process loads per batch should be a multiple of it: else
    clips that two parts of batches share are decoded by two workers."""
    min_crop_scale: Annotated[float, bounds.Bounds(above=0, most=1)] = 0.8
    """Smallest side length of the part of a video that a training crop shows, as a fraction of its
    side at the scale of validations; without crop, of the largest crop that fits."""
    max_crop_scale: Annotated[float, bounds.Bounds(above=0)] = 1.0
    """Largest side length of this part, as such a fraction; more than 1 requires crop."""

    @property
    def block(self) -> int:
        """Implements :meth:`DataConfig.block`."""
        return self.crops_per_clip

    def check(self) -> None:
        """Implements :meth:`bounds.Section.check`."""
        if self.min_crop_scale > self.max_crop_scale:
            raise InputError(
                f"data.min_crop_scale={self.min_crop_scale} must be at most "
                f"data.max_crop_scale={self.max_crop_scale}",
                about=("data.min_crop_scale", "data.max_crop_scale"),
            )
        if self.crop is None and self.crops_per_clip != 1:
            raise InputError(
                f"data.crops_per_clip={self.crops_per_clip} requires data.crop: set --data.crop to "
                "a height and a width, or --data.crops_per_clip 1",
                about=("data.crops_per_clip", "data.crop"),
            )
        if self.windows == "fixed" and self.clips_per_video != 1:
            raise InputError(
                f"data.clips_per_video={self.clips_per_video} must be 1 with data.windows=fixed, "
                "because an epoch has each fixed clip once: set --data.clips_per_video 1",
                about=("data.clips_per_video", "data.windows"),
            )

    def training_model(self, model: Any) -> Any:
        """Implements :meth:`DataConfig.training_model`: clips have the size of ``crop``."""
        if self.crop is None:
            return model
        height, width = self.crop
        return dataclasses.replace(model, height=height, width=width)

    def converts_on_device(self, model: Any) -> bool:
        """Returns whether the device resizes clips and converts them to RGB."""
        if self.convert_on is not None:
            return self.convert_on == "device"
        if self.path is None or addresses.is_address(self.path):
            return False
        # Larger crops would be shrunk on the host first, which takes longer than converting there.
        made_for = sets.settings_of(expanded(self.path))
        if made_for is None:  # a run cuts other videos into pieces of just this size
            return True
        crop = video_frames.plane_size(made_for.height, made_for.width, made_for.min_crop_scale)
        planes = video_frames.plane_size(model.height, model.width, self.min_crop_scale)
        return all(side <= limit for side, limit in zip(crop, planes, strict=True))

    def arrays(self, model: Any) -> ArrayTypes:
        """Returns shape and dtype of each array of an example, before :meth:`sent`."""
        spec = model.batch_spec(1).get("latents")
        latents = {} if spec is None else {"latents": (spec.shape[1:], str(spec.dtype))}
        return latents | {
            "video": ((model.frames, model.height, model.width, 3), "uint8"),
            "weight": ((), "float32"),
        }

    def sent(self, spec: dict[str, Any], model: Any) -> dict[str, Any]:
        """Implements :meth:`DataConfig.sent`: planes, where the device converts them."""
        if not self.converts_on_device(model):
            return spec
        import jax

        video = spec["video"]
        batch, frames = video.shape[:2]
        high, wide = self._plane_size(model)
        planes = {
            "luma": jax.ShapeDtypeStruct((batch, frames, high, wide), video.dtype),
            "chroma": jax.ShapeDtypeStruct((batch, frames, 2, high // 2, wide // 2), video.dtype),
            "crop": jax.ShapeDtypeStruct((batch, 3), np.int32),
        }
        return planes | {name: array for name, array in spec.items() if name != "video"}

    def received(self, batch: dict[str, Any], model: Any) -> dict[str, Any]:
        """Implements :meth:`DataConfig.received`."""
        if "luma" not in batch:
            return batch
        from jaxtrain.ops import yuv

        received = dict(batch)
        planes = (received.pop(name) for name in ("luma", "chroma", "crop"))
        trained = self.training_model(model)
        return received | {"video": yuv.to_rgb(*planes, height=trained.height, width=trained.width)}

    def _plane_size(self, model: Any) -> tuple[int, int]:
        trained = self.training_model(model)
        scales = (self.min_crop_scale, self.max_crop_scale)
        return video_frames.plane_size(trained.height, trained.width, *scales)

    def problems(self, model: Any) -> list[str]:
        """Implements :meth:`DataConfig.problems`."""
        problems: list[str] = []
        taught = _has_prepared_latents(model)
        if taught and self.windows != "fixed":
            problems.append(
                Problem(
                    "model.teacher requires data.windows=fixed, because only fixed clips have a "
                    "teacher's latents: set --data.windows fixed, or --model.teacher None, or "
                    "--model.teacher.network to compute them inside the step",
                    "model.teacher",
                    "data.windows",
                )
            )
        if self.teacher is not None and not taught:
            problems.append(
                Problem(
                    f"data.teacher={self.teacher} has no effect without model.teacher, or with "
                    "model.teacher.network: remove data.teacher, or train on prepared latents",
                    "data.teacher",
                    "model.teacher",
                )
            )
        if self.path is None and not self.demo:
            problems.append(
                Problem(
                    "no data given: pass a folder or a list of videos with --data.path", "data.path"
                )
            )
        problems += self._crop_problems(model)
        for flag, path in (("--data.path", self.path), ("--data.val_path", self.val_path)):
            if path is None or addresses.is_address(path):
                continue
            problem = video_files.absent(flag, path) if video_files.is_absent(path) else ""
            problem = problem or listing.in_run(expanded(path).absolute(), flag)
            if problem:
                problems.append(Problem(problem, flag.removeprefix("--")))
        return problems

    def _crop_problems(self, model: Any) -> Iterator[str]:
        """Yields why crops of this size do not fit the clips or the model."""
        about = ("data.crop", "data.max_crop_scale")
        if self.crop is None:
            if self.max_crop_scale > 1:
                yield Problem(
                    f"data.max_crop_scale={self.max_crop_scale} shows more than the largest crop "
                    "that fits: set --data.max_crop_scale 1, or --data.crop to a height and a "
                    "width below the clip's",
                    *about,
                )
            return
        sizes = zip((model.height, model.width), self.crop, strict=True)
        max_scale = min(full / side for full, side in sizes)
        if self.max_crop_scale > max_scale:
            limit = math.floor(max_scale * 100) / 100
            flags = "--data.max_crop_scale"
            if self.min_crop_scale > limit:
                flags = "--data.min_crop_scale and --data.max_crop_scale"
            covered = " x ".join(f"{side * self.max_crop_scale:g}" for side in self.crop)
            yield Problem(
                f"data.crop={_size(self.crop)} with data.max_crop_scale={self.max_crop_scale} "
                f"shows {covered} pixels, more than a clip's {model.height} x {model.width} "
                f"(model.height, model.width): use a smaller --data.crop, or at most {limit:g} for "
                f"{flags}",
                *about,
            )
        try:
            self.training_model(model)
        except InputError as error:
            yield Problem(
                f"data.crop={_size(self.crop)}, which is the clip size in training: {error}", *about
            )

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        """Opens the sets of pieces, or makes them, and splits the videos.

        Args:
            model: its ``frames``, ``height`` and ``width`` (pixels) are the size of a clip.
            seed: unused; the split depends only on names and contents.

        Raises:
            InputError: the path is missing or not found, or has too few videos for both splits.
        """
        del seed
        if problems := self.problems(model):
            raise InputError(*problems)
        root = cache.root(self.cache_dir)
        taught = _has_prepared_latents(model)
        path = str(demo_videos.prepare(root, say)) if self.path is None else self.path
        source = f"--data.path {addresses.public(path)}"
        opened, usable, bad = self._set(path, "--data.path", model, root, say)
        files = opened.inputs
        val_videos, val_opened, of_val = None, opened, usable
        if self.val_path is not None:
            val_opened, of_val, val_bad = self._set(
                self.val_path, "--data.val_path", model, root, say
            )
            val_videos = _described(val_opened.table, of_val)
            bad, files = bad + val_bad, files + val_opened.inputs
        quarantine.name_first(bad, say)
        sizes = np.ones(len(usable), np.int64)
        if self.windows == "fixed":
            sizes = opened.table.clips(model.frames, model.frames)[usable]
        described = _described(opened.table, usable)
        train, val = split.choose(
            described, val_videos, sizes.tolist(), self.train_split, source, say
        )
        splits = [
            Videos.of(table, numbers[chosen])
            for table, numbers, chosen in (
                (opened.table, usable, train),
                (val_opened.table, of_val, val),
            )
        ]
        train_clips = self.clips(model, splits[0], train=True)
        val_clips = self.clips(model, splits[1], train=False)
        if taught:
            url, teacher = cache.url(self.cache_dir), self.teacher
            clips_of_splits = list[Clips]()
            for shape, group in self.latent_groups(model, train_clips, val_clips):
                store = latents.find(root, shape, teacher, group, say, url)
                teacher = store.teacher
                clips_of_splits += [dataclasses.replace(clips, latents=store) for clips in group]
            train_clips, val_clips = clips_of_splits
            say(f"latents of teacher {teacher}")
        frames = sum(int(videos.table.rows["frames"][videos.chosen].sum()) for videos in splits)
        tables = [opened.table] if val_opened is opened else [opened.table, val_opened.table]
        return Sources(
            train=train_clips,
            val=val_clips,
            files=files,
            pieces=sum(table.pieces for table in tables),
            example_file=_file_of(self.val_path or path, splits[1][0].name),
            bad=tuple(bad),
            groups="videos",
            summary=f"{files:,} videos ({files - len(bad):,} good), {frames:,} frames in pieces, "
            f"{len(train):,} train / {len(val):,} val",
        )

    def latent_groups(
        self, model: Any, train: Clips, val: Clips
    ) -> list[tuple[latents.Shape, tuple[Clips, ...]]]:
        """Returns the clips whose latents are stored together, and the shape of these latents.

        Validations see complete clips, whose latents are not those of crops.
        """
        if self.crop is None:
            return [(model.latent_shape, (train, val))]
        return [(self.training_model(model).latent_shape, (train,)), (model.latent_shape, (val,))]

    def to_prepare(self, model: Any, say: Callable[[str], None]) -> list[sets.CachedSet]:
        """Implements :meth:`DataConfig.to_prepare`: sets of the user's videos."""
        root = cache.root(self.cache_dir)
        missing = []
        for flag, path in (("--data.path", self.path), ("--data.val_path", self.val_path)):
            if path is None or disks.when_readable(functools.partial(sets.is_set, path)):
                continue
            cached = self._cached_set(path, flag, model, root, say)
            if not cached.is_complete():
                missing.append(cached)
        return missing

    def needed(self, model: Any) -> pieces.Settings:
        """Returns the settings of pieces that are large and long enough for a run's clips."""
        longest = (model.frames - 1) * self.max_frame_delta + 1
        usual = pieces.Settings()
        sides = [math.ceil(side / usual.unit) * usual.unit for side in (model.height, model.width)]
        return pieces.Settings(
            height=sides[0],
            width=sides[1],
            min_crop_scale=self.min_crop_scale,
            frames=max(usual.frames, longest),
            min_frames=model.frames,  # of a shorter piece, a smaller distance is used
            min_side=1,  # as for frames, small videos are enlarged
        )

    def clips(self, model: Any, videos: Videos, *, train: bool) -> Clips:
        """Returns the clips of one split; see :class:`Clips`."""
        size = self.training_model(model) if train else model
        cropped = train and self.crop is not None
        return Clips(
            config=self,
            frames=model.frames,
            height=size.height,
            width=size.width,
            crop_of=(model.height, model.width) if cropped else None,
            videos=videos,
            train=train,
            # Validation converts on the host, so that its results do not depend on this.
            plane_size=self._plane_size(model)
            if train and self.converts_on_device(model)
            else None,
        )

    def _cached_set(
        self, path: str, flag: str, model: Any, root: Path, say: Callable[[str], None]
    ) -> sets.CachedSet:
        bucket, needed = cache.url(self.cache_dir), self.needed(model)
        options: dict[str, Any] = {"prepare_long": self.prepare, "bucket": bucket}
        return sets.CachedSet.of(path, flag, needed, root, say, **options)

    def _set(
        self, path: str, flag: str, model: Any, root: Path, say: Callable[[str], None]
    ) -> tuple[sets.Opened, np.ndarray, list[BadExample]]:
        """Returns the set of one input, the numbers of its usable videos, and its bad ones."""
        if disks.when_readable(functools.partial(sets.is_set, path)):
            opened = sets.opened_at(path, flag, root, say)
        else:
            opened = self._cached_set(path, flag, model, root, say).made(say)
        long_enough = opened.table.clips(model.frames, 1) > 0
        usable, short = np.flatnonzero(long_enough), np.flatnonzero(~long_enough)
        bad = [*opened.bad]
        if len(short):
            names = opened.table.names
            text = f"is too short: a clip needs {model.frames} frames in a row"
            bad += [BadExample(names[number], text) for number in short.tolist()]
        if not len(usable):
            quarantine.name_first(bad[1:], say)
            raise InputError(
                f"{flag} {addresses.public(path)}: none of {opened.inputs:,} videos can be used "
                f"({bad[0]}): pass longer videos with {flag}, or lower --model.frames"
            )
        return opened, usable, bad


def _described(table: sets.Table, numbers: np.ndarray) -> split.Videos:
    names, rows = table.names, table.rows
    return split.Videos(
        [names[number] for number in numbers.tolist()],
        [(int(rows["size"][n]), rows["ends"][n]) for n in numbers.tolist()],
    )


def _file_of(path: str, name: str) -> str:
    """Returns the path of a video; "" if it is not on disk by itself."""
    top = expanded(path).absolute()
    file = (top if top.is_dir() else top.parent) / name
    return str(file) if file.is_file() else ""


def _size(sides: tuple[int, int]) -> str:
    return " ".join(map(str, sides))


def _has_prepared_latents(model: Any) -> bool:
    return "latents" in model.batch_spec(1)
