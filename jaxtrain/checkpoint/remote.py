"""Fetches checkpoints and files of a run from its bucket."""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.checkpoint import own_files, pointer
from jaxtrain.checkpoint.pointer import CHECKPOINTS, INDEX, KINDS, STATE, Damaged, Pointer
from jaxtrain.checkpoint.store import BucketFolder, CheckpointStore, Folder, mark_copy
from jaxtrain.errors import InputError
from jaxtrain.storage import file_copies, lock, run_marker
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.bucket import Bucket, normalized
from jaxtrain.storage.disks import check_room, disk_trouble
from jaxtrain.storage.file_copies import FileCopies
from jaxtrain.terminal import Say

_OF_PROCESS = "ocdbt.process_"  # begins the names of folders with the files of a process
_AT_ONCE = 8  # files


class RemoteRun:
    """The checkpoints of a run in a bucket."""

    def __init__(self, bucket: Bucket, say: Say) -> None:
        self.bucket, self._say = bucket, say
        self.store = CheckpointStore(BucketFolder(bucket), say)

    def fetch(self, name: str, run_dir: Path) -> str:
        """Makes a run directory have a checkpoint, intact.

        Files that are there, for example from an interrupted fetch, are not fetched again.

        Returns:
            Its damage in the bucket; "" if it is intact on disk now.

        Raises:
            Unavailable, InputError: the bucket cannot be read.
            RunAgain: the disk is full.
        """
        try:
            wanted, content = self.store.read(name)
            self._fetch_files(wanted, name.removesuffix(".json"), run_dir)
            if any(file.startswith(f"{STATE}/{_OF_PROCESS}") for file in wanted.files) and (
                f"{STATE}/{INDEX}" not in wanted.files  # of a run on disk that was copied there
            ):
                from jaxtrain.checkpoint import orbax_compat  # takes a second

                orbax_compat.index_arrays(run_dir / wanted.data / STATE)
            path = run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except Damaged as why:
            return str(why)
        except OSError as error:
            raise disk_trouble(error, f"{run_dir} cannot be written", "free space there") from error
        return ""

    def is_complete(self, kind: str, step: int) -> bool:
        """Whether the bucket has a checkpoint with all its files; reads none of them.

        Raises:
            Unavailable, InputError: the bucket cannot be read.
        """
        try:
            wanted, _ = self.store.read(pointer.name_of(kind, step))
            self._check_sizes(wanted.data, {name: size for name, (size, _) in wanted.files.items()})
        except Damaged:
            return False
        return True

    def forget(self, run_dir: Path) -> None:
        """Deletes checkpoints on disk that the bucket has no longer.

        Raises:
            OSError: the disk does not let it.
        """
        disk = CheckpointStore(Folder(run_dir))
        stored = set(self.store.pointers())
        for name in list(disk.pointers()):
            if name not in stored or disk.folder_of(name) != self.store.folder_of(name):
                disk.place.delete(name)
        CheckpointStore(Folder(run_dir)).collect()

    def _check_sizes(self, data: str, sizes: Mapping[str, int]) -> None:
        stored = self.bucket.sizes(data)
        for name, size in sizes.items():
            size_stored = stored.get(f"{data}/{name}")
            if size_stored is None:
                raise Damaged(f"{name} is missing")
            if size_stored != size:
                raise Damaged(f"{name} has {size_stored} bytes, but {size} were saved")

    def _fetch_files(self, wanted: Pointer, checkpoint: str, run_dir: Path) -> None:
        folder = run_dir / wanted.data
        left = {name: size for name, (size, _) in wanted.files.items()}
        present = {
            folder / name: size
            for name, size in left.items()
            if (folder / name).is_file() and (folder / name).stat().st_size == size
        }
        for path, digests in pointer.hashes(present).items():
            name = path.relative_to(folder).as_posix()
            if digests == wanted.files[name][1]:
                del left[name]
        if not left:
            return
        self._check_sizes(wanted.data, left)
        total = sum(left.values())
        self._say(f"fetching {checkpoint} from {self.bucket.url} ({total / 2**20:.1f} MiB)")
        folder.mkdir(parents=True, exist_ok=True)
        content = f"fetching checkpoint {checkpoint} of {self.bucket.url}"
        check_room(folder, total, content, "free space there")

        def fetch(name: str) -> None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"{path.name}.part")
            size, digests = wanted.files[name]
            self.bucket.download(f"{wanted.data}/{name}", beside, size=size)
            if pointer.hashes({beside: size})[beside] != digests:
                beside.unlink()
                raise Damaged(f"{name} was changed after it was saved: its checksum is wrong")
            os.replace(beside, path)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(fetch, sorted(left, key=lambda name: -left[name])):
                pass


def stage(url: str, cache_root: Path, process: int = 0) -> Path:
    """Returns the folder on disk for a run in a bucket."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "", url.rpartition("/")[2])[:40]
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = "run" if process == 0 else f"run-{process}"
    return cache_root / "buckets" / f"{name}-{digest}" / folder


def split(text: str, flag: str) -> tuple[str, tuple[str, ...], int | None]:
    """Returns the URL of a run, and the kind and step of a checkpoint, if the URL has them.

    Raises:
        InputError: it is not the URL of a folder in a bucket.
    """
    url = normalized(text, flag)
    match = re.fullmatch(rf"(.+?)/({'|'.join(KINDS)})/(\d+)(?:\.json)?", url)
    return (match[1], (match[2],), int(match[3])) if match else (url, KINDS, None)


@contextlib.contextmanager
def reading(url: str, cache_root: Path, say: Say) -> Iterator[tuple[RemoteRun, Path]]:
    """Yields a run in a bucket and a folder for what commands read of it, for one at a time."""
    local = stage(url, cache_root).with_name("read")
    try:
        local.mkdir(parents=True, exist_ok=True)
        with lock.locked(local.with_name(".reading"), say, f"reading {url}"):
            remote = RemoteRun(Bucket(url), say)
            if marker := remote.store.place.get(run_marker.NAME):
                mark_copy(local, marker.decode())
            yield remote, local
    except OSError as error:
        raise disk_trouble(
            error,
            f"{url} cannot be fetched to {error.filename}",
            "set $JAXTRAIN_CACHE to another folder",
        ) from error


def run_to_read(
    text: str, cache_root: Path, say: Say, damaged: dict[str, str] | None = None
) -> Path:
    """Fetches the files of a run for a command that reads them, and returns their folder.

    Args:
        damaged: if given, all checkpoints are fetched, too, which verifies them; receives the path
            of each damaged one -> the damage.

    Raises:
        InputError: nothing is there.
        RunAgain: the bucket or the disk is unavailable.
    """
    url = normalized(text, "RUN")
    with reading(url, cache_root, say) as (remote, local):
        sizes = remote.bucket.sizes()
        if not sizes:
            raise InputError(f"{url} has no files: check the URL")
        need = sum(n for name, n in sizes.items() if own_files.is_own(file_copies.file_of(name)))
        cure = "free space there, or set $JAXTRAIN_CACHE to another folder"
        check_room(local, need, f"fetching {url}", cure)
        FileCopies(remote.bucket, local).fetch(own_files.is_own)
        if damaged is not None:
            # What is in the bucket is verified.
            shutil.rmtree(local / CHECKPOINTS, ignore_errors=True)
            for name in list(remote.store.pointers()):
                _fetch_any(remote, name, local, damaged)
            remote.forget(local)
    return local


def _fetch_any(remote: RemoteRun, name: str, local: Path, damaged: dict[str, str]) -> None:
    path = local / name
    if damage := remote.fetch(name, local):
        damaged[name.removesuffix(".json")] = damage
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(remote.store.place.get(name) or b"")
    if reason := remote.store.place.get(f"{name.removesuffix('.json')}.txt"):
        path.with_suffix(".txt").write_bytes(reason)
