"""Fetches and uploads objects and complete folders of buckets."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import record
from jaxtrain.storage.atomic import remove_leftovers
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import check_room
from jaxtrain.storage.record import Record


def object_at(url: str) -> tuple[Bucket, str]:
    """Returns the client of a bucket and the name of the object at a URL."""
    scheme, _, rest = url.partition("://")
    host, _, name = rest.partition("/")
    return opened(f"{'gs' if scheme == 'gcs' else scheme}://{host}"), name


@functools.lru_cache(maxsize=4)
def opened(url: str) -> Bucket:
    """Returns the client of a folder."""
    return Bucket(url)


def _complete(bucket: Bucket, name: str) -> tuple[Record, dict[str, int]] | None:
    """Returns the record of a folder, and the size of each file; None if it is not complete."""
    content = bucket.get(f"{name}/{record.NAME}")
    made = record.parsed(None if content is None else content.data)
    if content is None or made is None:
        return None
    sizes, listed = record.sizes(made) | {record.NAME: len(content.data)}, bucket.sizes(name)
    complete = all(listed.get(f"{name}/{file}") == size for file, size in sizes.items())
    return (made, sizes) if complete else None


def upload_folder(bucket: Bucket, name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Uploads a folder with a record, unless it is complete in the bucket.

    Raises:
        Unavailable, InputError: the bucket cannot be written.
    """
    if _complete(bucket, name) is not None:
        return
    made = record.read(folder)
    assert made is not None, "the caller has made it, or found it complete"
    sizes = record.sizes(made)
    say(f"uploading {sum(sizes.values()) / 1e6:,.1f} MB to {bucket.url}/{name}")
    for file in (*sizes, record.NAME):
        bucket.put(f"{name}/{file}", folder / file)


def download_folder(
    bucket: Bucket, name: str, folder: Path, cure: str, say: Callable[[str], None]
) -> bool:
    """Fetches a folder that :func:`upload_folder` has uploaded.

    Args:
        folder: on disk. Files that it has with the right size are kept, so it can only have files
            of an earlier call with the same name. Each file appears complete.

    Raises:
        RunAgain: the disk has too little space, or a file was deleted in the meantime.
        Unavailable, InputError: the bucket cannot be read; or a file there is damaged.
    """
    complete, url = _complete(bucket, name), f"{bucket.url}/{name}"
    if complete is None:
        return False
    made, sizes = complete
    missing = {file: size for file, size in sizes.items() if _size(folder / file) != size}
    folder.mkdir(exist_ok=True)
    check_room(folder, sum(missing.values()), f"fetching {url}", cure)
    say(f"fetching {sum(missing.values()) / 1e6:,.1f} MB from {url}")
    for path in {(folder / file).parent for file in sizes}:
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path, alone=True)
    for file in missing:
        if not bucket.fetch(f"{name}/{file}", folder / file):
            raise RunAgain(f"{url}/{file} was deleted while it was fetched: start again")
    if bad := record.damaged(folder, made):
        (folder / bad).unlink()
        raise InputError(
            f"{url}/{bad} is damaged: its SHA-256 is not that of {record.NAME}: delete {url}, and "
            "repeat the command that prepares it"
        )
    return True


def _size(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None
