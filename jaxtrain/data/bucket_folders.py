"""Fetches and uploads objects and complete folders of buckets."""

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import RunAgain
from jaxtrain.storage.atomic import remove_leftovers
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import check_room

MANIFEST = "manifest.json"
"""In a folder: its key ``files`` has the size of each other file. It is written last."""


def object_at(url: str) -> tuple[Bucket, str]:
    """Returns the client of a bucket and the name of the object at a URL."""
    scheme, _, rest = url.partition("://")
    host, _, name = rest.partition("/")
    return opened(f"{'gs' if scheme == 'gcs' else scheme}://{host}"), name


@functools.lru_cache(maxsize=4)
def opened(url: str) -> Bucket:
    """Returns the client of a folder."""
    return Bucket(url)


def _sizes(bucket: Bucket, name: str) -> dict[str, int] | None:
    """Returns the size of each file of a folder; None if it is not complete."""
    manifest = bucket.get(f"{name}/{MANIFEST}")
    if manifest is None:
        return None
    try:
        sizes = json.loads(manifest.data)["files"] | {MANIFEST: len(manifest.data)}
    except (ValueError, KeyError, TypeError):
        return None
    listed = bucket.sizes(name)
    complete = all(listed.get(f"{name}/{file}") == size for file, size in sizes.items())
    return sizes if complete else None


def upload_folder(bucket: Bucket, name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Uploads a folder with a manifest, unless it is complete in the bucket.

    Args:
        bucket: the bucket.
        name: of the folder there.
        folder: on disk; complete.
        say: prints a message.

    Raises:
        Unavailable, InputError: the bucket cannot be written.
        OSError: a file cannot be read.
    """
    if _sizes(bucket, name) is not None:
        return
    sizes = json.loads((folder / MANIFEST).read_bytes())["files"]
    say(f"uploading {sum(sizes.values()) / 1e6:,.1f} MB to {bucket.url}/{name}")
    for file in (*sizes, MANIFEST):
        bucket.put(f"{name}/{file}", folder / file)


def download_folder(
    bucket: Bucket, name: str, folder: Path, cure: str, say: Callable[[str], None]
) -> bool:
    """Fetches a folder that :func:`upload_folder` has uploaded.

    Args:
        bucket: the bucket.
        name: of the folder there.
        folder: on disk. Files that it has with the right size are kept, so it can only have files
            of an earlier call with the same name. Each file appears complete.
        cure: what to do if the disk has too little space.
        say: prints a message.

    Returns:
        Whether the folder is complete in the bucket. If not, nothing is fetched.

    Raises:
        RunAgain: the disk has too little space, or a file was deleted in the meantime.
        Unavailable, InputError: the bucket cannot be read.
        OSError: a file cannot be written.
    """
    sizes, url = _sizes(bucket, name), f"{bucket.url}/{name}"
    if sizes is None:
        return False
    missing = {file: size for file, size in sizes.items() if _size(folder / file) != size}
    folder.mkdir(exist_ok=True)
    check_room(folder, sum(missing.values()), url, cure)
    say(f"fetching {sum(missing.values()) / 1e6:,.1f} MB from {url}")
    for path in {(folder / file).parent for file in sizes}:
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path, alone=True)
    for file in missing:
        if not bucket.fetch(f"{name}/{file}", folder / file):
            raise RunAgain(f"{url}/{file} was deleted while it was fetched: start again")
    return True


def _size(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None
