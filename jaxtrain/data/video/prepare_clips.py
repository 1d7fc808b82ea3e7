"""``jaxtrain prepare clips``: cuts the videos of a source into a set (:mod:`.sets`).

A video is decoded once, in order. The command resumes, records, and reports
(:mod:`jaxtrain.jobs.resumable`). OUT may be a folder of a bucket, and so may SOURCE, whose videos
are then fetched one by one.
"""

import os
import re
from pathlib import Path

from jaxtrain.data.video import files, sets
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import InputError
from jaxtrain.jobs import resumable
from jaxtrain.jobs.engines import Engine
from jaxtrain.storage import addresses, cache
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import is_bucket, normalized
from jaxtrain.terminal import Say


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
        out: the output folder, created if missing, or the URL of a folder in a bucket.

    Returns:
        What happened; its totals are ``pieces``, ``frames``, ``frames_left_out`` and
        ``frames_lost``.

    Raises:
        InputError: there are no videos, ``out`` cannot be written or has pieces with other
            settings, or as :func:`jaxtrain.jobs.resumable.run`.
        RunAgain: a bucket or a disk is unavailable.
    """
    _check_apart(source, out)
    root = cache.root(None)
    videos = files.find(source, "SOURCE", root, say, fetch_videos=False, by_http=True)
    return sets.prepare(videos, out, settings, engine=engine, say=say, part=part)


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
