"""``jaxtrain prepare clips``: cuts every raw video of a source into pieces.

The pieces of ``a/b.mp4`` are ``OUT/a/b.mp4.pieces/00000.mp4`` and so on; their names keep them in
one split (:mod:`jaxtrain.data.video.split`). A video is an item of
:mod:`jaxtrain.jobs.resumable`, which resumes, records, and reports. OUT may be a folder of a
bucket, and so may SOURCE, whose videos are then fetched one by one.
"""

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

from jaxtrain.data.video import files, frames, pieces
from jaxtrain.data.video.files import PIECES, VideoFile
from jaxtrain.data.video.pieces import Settings
from jaxtrain.data.video.reader import INTERLACED, TRAITS
from jaxtrain.errors import InputError
from jaxtrain.jobs import cache, resumable
from jaxtrain.jobs.engines import Engine, Worker
from jaxtrain.storage import addresses, disks
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import is_bucket, normalized
from jaxtrain.terminal import Say

_SHOWN = 200  # characters of an entry in an error


def run(
    source: str,
    out: Path | str,
    settings: Settings,
    *,
    engine: Engine,
    say: Say,
    part: resumable.Part = resumable.ALL,
) -> resumable.Outcome:
    """Cuts all videos that have not been cut yet.

    Args:
        source: a folder, a video, or a list of videos.
        out: the output folder, created if missing, or the URL of a folder in a bucket.
        settings: settings of the pieces, the same for all pieces of a folder.
        engine: cuts the videos.
        say: prints a message.
        part: which of the videos to cut.

    Returns:
        What happened; its totals are ``pieces``, ``frames``, ``frames_left_out`` and
        ``frames_lost``.

    Raises:
        InputError: there are no videos, ``out`` cannot be written or has pieces with other
            settings, or as :func:`jaxtrain.jobs.resumable.run`.
        RunAgain: a bucket or a disk is unavailable.
    """
    _check_apart(source, out)
    videos = files.find(source, "SOURCE", cache.root(None), say, fetch_videos=False)
    if os.path.splitext(source)[1].lower() in files.LISTS and not any(map(_exists, videos)):
        raise InputError(
            f"SOURCE {source}: none of its {len(videos):,} entries exists on this machine, such as "
            f"{videos[0].path[:_SHOWN]}: is it a list of videos? With --engine ray, this "
            "machine must see them, too"
        )
    return resumable.run(
        map(_item, videos),
        functools.partial(_begin, settings),
        out,
        dataclasses.asdict(settings),
        engine=engine,
        say=say,
        part=part,
        doing="cutting",
        things="videos",
    )


def largest_crop(out: Path) -> tuple[int, int] | None:
    """Returns the height and width of the largest crop that the pieces of a folder were made for.

    Returns None if this command did not write the folder.
    """
    kept = resumable.settings_of(out) or {}
    try:
        settings = Settings(**{name: kept[name] for name in ("height", "width", "min_crop_scale")})
    except (KeyError, TypeError, InputError):
        return None
    return frames.plane_size(settings.height, settings.width, settings.min_crop_scale)


def folder_of(name: str) -> str:
    """Returns the folder of a video's pieces, relative to OUT."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    # Hidden folders would not be read as data.
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    return "/".join(parts) + PIECES


def _check_apart(source: str, out: Path | str) -> None:
    """Raises InputError if OUT is inside SOURCE, or a URL of another kind than a bucket's."""
    if is_bucket(str(out)) or addresses.is_address(str(out)):
        inner = normalized(str(out), "OUT")
        top = re.sub(r"^(gs|gcs):/+", "gs://", re.sub(r"^s3:/+", "s3://", source.strip()))
        inside = addresses.is_address(top) and f"{inner}/".startswith(f"{top.rstrip('/')}/")
    else:
        inner, top = str(expanded(out).absolute()), str(expanded(source).absolute())
        inside = os.path.isdir(top) and Path(inner).is_relative_to(top)
    if inside:
        is_in = "is" if inner == top.rstrip("/") else "is inside"
        raise InputError(
            f"OUT {inner} {is_in} SOURCE {top}, so its clips would be cut again: choose another "
            "folder"
        )


def _exists(video: VideoFile) -> bool:
    try:
        return not video.path or os.path.lexists(video.file)
    except ValueError:  # a NUL character
        return False


def _item(video: VideoFile) -> resumable.Item:
    """Returns the item of a video, which its size and time identify; in a tar also its place."""
    output = folder_of(video.name)
    if video.url:  # without a version, it is assumed not to change
        known = video.version or (cache.digest(addresses.identity(video.url)),)
        return resumable.Item(video.name, known, output, video)
    try:
        identity = resumable.identity(video.file)
    except (OSError, ValueError):  # gone, or a NUL in the name: the worker reports it
        identity = ()
    place = () if video.span is None else (video.span.offset, video.span.size)
    return resumable.Item(video.name, (*identity, *place), output, video, source=video.file)


def _begin(settings: Settings, worker: Worker) -> resumable.Make:
    del worker
    return functools.partial(_cut, settings)


def _cut(settings: Settings, item: resumable.Item, folder: Path) -> dict[str, Any]:
    """Writes the pieces of a video; returns their numbers of frames."""
    video = item.value
    if video.url:
        try:
            video = files.fetched(video, folder.parent, "SOURCE")
        except InputError as error:  # of this video: it is gone, or a web page
            raise resumable.Failed(str(error)) from error

    def cut() -> pieces.Cut:
        folder.mkdir(exist_ok=True)
        for left in folder.iterdir():  # of a try that the disk of the video ended
            left.unlink()
        return pieces.cut(video.path, video.span, folder, settings)

    made = disks.when_readable(cut)
    notes = [
        f"{item.name} is {trait}: {TRAITS[trait]}" for trait in made.traits if trait != INTERLACED
    ]
    if made.damage:
        damage, used = "; it ".join(made.damage), sum(made.pieces)
        notes.append(f"{item.name} {damage}: {made.lost:,} frames are lost, {used:,} are used")
    return ({"note": "; ".join(notes)} if notes else {}) | {
        "pieces": len(made.pieces),
        "frames": sum(made.pieces),
        "frames_left_out": made.left_out,
        "frames_lost": made.lost,
        "frames_per_piece": list(made.pieces),
        **dict.fromkeys(made.traits, 1),
    }
