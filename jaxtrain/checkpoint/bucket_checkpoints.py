"""Keeps checkpoints in a bucket, as complete and as verified as those on disk.

Below the run's URL::

    checkpoints/<step>.json    manifest, written last: the files, their sizes and checksums
    best/<step>.json           the same, of the best checkpoint
    superseded/, damaged/, uncertified/
                               the same folders again, of checkpoints that do not count
    data/<step>-<id>/<part>/   the files of a checkpoint; never written again once they are there

An object store has no rename, so the manifest is what makes a checkpoint complete: it is written
after all files that it lists, and deleted before them. Files are found only through a manifest, and
a manifest of the same step never has the same files with other content, because ``<id>`` is of the
content or of the save. A ``data/<step>-<id>/`` that no manifest lists is
deleted; other objects, even below ``data/``, are not the run's.

A part holds what one process saved. A run on one disk has one part. Where each process has a disk
of its own, each part is a checkpoint with the shards of that process, described in ``part.json``;
:class:`Layout` states which parts make it complete, and which of them a process needs. A file
``files-uploaded`` in ``data/<step>-<id>/<process>/`` is not part of the checkpoint: it states that
the logs and records of that process are uploaded up to this step.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from jaxtrain.checkpoint import files as checkpoint_files
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.layout import (
    BEST,
    CHECKPOINTS,
    DAMAGED,
    STATE,
    SUPERSEDED,
    UNCERTIFIED,
    others,
)
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import listing, lock
from jaxtrain.storage.atomic import parse_json, read_json
from jaxtrain.storage.bucket import Bucket, TooLarge, normalized
from jaxtrain.storage.disks import check_room, cure_of, disk_trouble, reason

PART = "part.json"
FETCHING = ".fetching"  # folder of a run directory, for downloads that are not complete
_FILES_MARK = "files-uploaded"
_FORMAT = 1
_AT_ONCE = 8  # files
_DATA = re.compile(r"data/(\d+)-[0-9a-f]{12}")
_MOST_PARTS = 2**16
_ASIDE = (SUPERSEDED, DAMAGED, UNCERTIFIED)
_FOLDERS = (CHECKPOINTS, BEST, *_ASIDE)
_PREFIXES = ("", *(f"{aside}/" for aside in _ASIDE))

Say = Callable[[str], None]


class Incomplete(Exception):
    """A checkpoint in the bucket is damaged or not complete; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which shards each part of a checkpoint holds.

    Attributes:
        shards: number of pieces that arrays are divided into (``mesh.fsdp``).
        of_part: for each part, in the order of the processes, the numbers of its shards.
    """

    shards: int = 1
    of_part: tuple[tuple[int, ...], ...] = ((0,),)

    @classmethod
    def of(cls, described: Any) -> Self:
        """Reads the stored form.

        Raises:
            ValueError: it is not one.
        """
        shards, parts = described["shards"], described["of_part"]
        if not (type(shards) is int and 0 < shards <= _MOST_PARTS and isinstance(parts, list)):
            raise ValueError("its layout is damaged")
        found = tuple(tuple(part) for part in parts)
        numbers = [number for part in found for number in part]
        if not all(type(number) is int and 0 <= number < shards for number in numbers):
            raise ValueError("its layout is damaged")
        return cls(shards, found)

    def parts_with(self, wanted: Iterable[int], first: int = 0) -> list[int]:
        """Returns few parts that hold these shards together; all parts if none do.

        Args:
            wanted: numbers of shards.
            first: the part to prefer.
        """
        left, chosen = set(wanted), []
        order = sorted(range(len(self.of_part)), key=lambda part: (part != first, part))
        for part in order:
            if left.intersection(self.of_part[part]):
                chosen.append(part)
                left.difference_update(self.of_part[part])
        return sorted(chosen)

    def complete(self) -> list[int]:
        """Returns few parts that make a checkpoint complete: the ones to upload."""
        return self.parts_with(range(self.shards))


@dataclasses.dataclass(frozen=True)
class Part:
    """What a folder with a checkpoint holds, as its ``part.json`` describes; complete without one.

    Attributes:
        save: identifies the save, in all processes alike.
        layout: of all parts of the checkpoint.
        number: which of them this is; None if it was put together from several.
        shards: numbers of the shards that it holds.
    """

    save: str
    layout: Layout
    number: int | None
    shards: tuple[int, ...]

    def to_json(self) -> bytes:
        """Returns the content of ``part.json``."""
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()

    def has(self, shards: int, wanted: Iterable[int]) -> bool:
        """Whether a process can restore its shards from this folder alone."""
        if set(self.shards) == set(range(self.layout.shards)):
            return True
        return shards == self.layout.shards and set(wanted) <= set(self.shards)


def part_of(checkpoint: Path) -> Part:
    """Returns what a folder on disk holds.

    Raises:
        Incomplete: its ``part.json`` is damaged.
        OSError: the disk does not respond.
    """
    try:
        found = read_json(checkpoint / PART)
        layout = Layout.of(found["layout"])
        number, save, shards = found["number"], found["save"], tuple(found["shards"])
        if number is not None and not (type(number) is int and 0 <= number < len(layout.of_part)):
            raise ValueError("its number is damaged")
        if not re.fullmatch("[0-9a-f]{12}", save):
            raise ValueError("its name is damaged")
        return Part(save, layout, number, shards)
    except FileNotFoundError:
        pass
    except (ValueError, LookupError, TypeError) as error:
        raise Incomplete(f"{PART} is damaged: {error}") from None
    try:  # a complete checkpoint is identified by its content
        return Part(_digest(checkpoint / manifest.NAME), Layout(), 0, (0,))
    except FileNotFoundError:
        raise Incomplete(f"{manifest.NAME} is missing") from None


def data_of(step: int, part: Part) -> str:
    """Returns the folder in the bucket for the files of a checkpoint."""
    return f"data/{step}-{part.save}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint in the bucket, from its manifest.

    Attributes:
        step: completed steps.
        saved: UTC time, such as ``2026-01-31T09:00:00Z``.
        data: folder of its files.
        layout: of its parts.
        files: path below ``data``, which begins with the part -> (bytes, SHA-256 of each piece).
    """

    step: int
    saved: str
    data: str
    layout: Layout
    files: dict[str, tuple[int, list[str]]]

    def of_parts(self, parts: Iterable[int]) -> dict[str, tuple[int, list[str]]]:
        """Returns the files of some parts."""
        wanted = {str(part) for part in parts}
        return {
            name: entry for name, entry in self.files.items() if name.partition("/")[0] in wanted
        }


class BucketCheckpoints:
    """The checkpoints of a run in a bucket.

    Args:
        bucket: of the run's URL.
        say: prints a line.

    Attributes:
        bucket, say: see above.
    """

    def __init__(self, bucket: Bucket, say: Say) -> None:
        self.bucket, self.say = bucket, say

    def steps(self, folder: str = CHECKPOINTS) -> list[int]:
        """Returns the steps with a manifest in a folder such as ``"checkpoints"``, ascending."""
        names = (name.removeprefix(f"{folder}/") for name in self.bucket.sizes(folder))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"(\d+)\.json", name)))

    def read(self, folder: str, step: int) -> Stored:
        """Reads a manifest.

        Raises:
            Incomplete: it is missing or damaged.
            Unavailable, InputError: the bucket cannot be read.
        """
        name = _manifest(folder, step)
        found = self.bucket.get(name)
        if found is None:
            raise Incomplete(f"{name} is missing")
        try:
            content = _json(found.data)
            if content.pop("sha256") != manifest.checksum(content):
                raise ValueError("its content does not match its own checksum")
            if content["format"] != _FORMAT:
                raise ValueError(f"it has format {content['format']!r}")
            data, saved, listed = content["data"], content["saved"], content["files"]
            named = _DATA.fullmatch(data)
            if content["step"] != step or named is None or int(named[1]) != step:
                raise ValueError("it is of another step")
            for path, entry in listed.items():
                if not listing.is_inside(path) or not manifest.is_entry(entry):
                    raise ValueError(f"its entry for {path!a} is damaged")
            entries = {path: (one["bytes"], one["sha256"]) for path, one in listed.items()}
            return Stored(step, str(saved), data, Layout.of(content["layout"]), entries)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Incomplete(f"{name} is damaged: {error}") from None

    def upload(self, checkpoint: Path, to: str, part: int, sent: Callable[[int], None]) -> None:
        """Uploads a part; files that are there from an interrupted upload are kept.

        Args:
            checkpoint: folder of a complete checkpoint on disk, which must not change.
            to: from :func:`data_of`.
            part: its number.
            sent: called with the number of bytes, each time that the bucket has taken some.

        Raises:
            Unavailable, InputError: it is not complete; calling this again continues.
            OSError, manifest.Unusable: the files cannot be read.
        """
        listed = manifest.read(checkpoint).files
        there = self.bucket.sizes(f"{to}/{part}")

        def send(name: str) -> None:
            size = listed[name][0]
            if there.get(f"{to}/{part}/{name}") != size:
                self.bucket.put(f"{to}/{part}/{name}", checkpoint / name, sent)
            else:
                sent(size)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(send, sorted(listed, key=lambda name: -listed[name][0])):
                pass
        # Last, as it shows process 0 that this part is complete.
        self.bucket.put(f"{to}/{part}/{manifest.NAME}", checkpoint / manifest.NAME)

    def mark_files(self, data: str, process: int) -> None:
        """Records that the files of a process are uploaded up to a checkpoint.

        Args:
            data: from :func:`data_of`.
            process: its number.
        """
        self.bucket.put(f"{data}/{process}/{_FILES_MARK}", b"")

    def missing(
        self, data: str, layout: Layout, processes: Iterable[int] = ()
    ) -> tuple[list[int], int]:
        """Returns the processes whose upload is not complete, and the bytes of all that is there.

        Args:
            data: from :func:`data_of`.
            layout: of the parts that must be there.
            processes: those that must have called :meth:`mark_files`.
        """
        there = self.bucket.sizes(data)
        names = [(part, manifest.NAME) for part in layout.complete()]
        names += [(process, _FILES_MARK) for process in processes]
        left = {number for number, name in names if f"{data}/{number}/{name}" not in there}
        return sorted(left), sum(there.values())

    def commit(self, folder: str, step: int, data: str, layout: Layout) -> None:
        """Completes a checkpoint whose parts are uploaded: checks them and writes its manifest.

        Raises:
            Incomplete: a file is missing, or has another size than was saved.
            Unavailable, InputError: it is not complete.
        """
        files: dict[str, Any] = {}
        saved = ""
        there = self.bucket.sizes(data)
        for part in layout.complete():
            name = f"{data}/{part}/{manifest.NAME}"
            found = self.bucket.get(name)
            if found is None:
                raise Incomplete(f"{name} is missing")
            try:
                parsed = manifest.parsed(_json(found.data))
            except (manifest.Unusable, ValueError) as why:
                raise Incomplete(f"{name}: {why}") from None
            saved = saved or parsed.saved  # by the clock of process 0, if it has a part
            files |= {
                f"{part}/{path}": {"bytes": size, "sha256": digests}
                for path, (size, digests) in parsed.files.items()
            }
            files[f"{part}/{manifest.NAME}"] = {
                "bytes": len(found.data),
                "sha256": manifest.digests(found.data),
            }
        for path, entry in files.items():
            if there.get(f"{data}/{path}") != entry["bytes"]:
                raise Incomplete(f"{data}/{path} is missing or has another size")
        content = {
            "format": _FORMAT,
            "step": step,
            "saved": saved,
            "data": data,
            "layout": dataclasses.asdict(layout),
            "files": files,
        }
        # As JSON has it: tuples become lists.
        content = json.loads(json.dumps(content))
        whole = content | {"sha256": manifest.checksum(content)}
        self.bucket.put(_manifest(folder, step), json.dumps(whole).encode())

    def supersede(self, step: int, folders: Iterable[str] = (CHECKPOINTS, BEST)) -> None:
        """Moves the manifests of later steps aside, which would count as the newest.

        Args:
            step: from which the run continues.
            folders: to look in.
        """
        for folder in folders:
            for later in (one for one in self.steps(folder) if one > step):
                self._move(folder, later, SUPERSEDED)
                self.say(f"checkpoint {self.bucket.url}/{folder}/{later} is {SUPERSEDED}")

    def set_aside_uncertified(self, saves: Iterable[str]) -> None:
        """Moves the manifests of saves that may be wrong aside.

        Args:
            saves: the folders of their files, from :func:`data_of`.
        """
        for folder in (CHECKPOINTS, BEST):
            for step, data in self.saves(folder).items():
                if data in saves:
                    self._move(folder, step, UNCERTIFIED)
                    self.say(f"checkpoint {self.bucket.url}/{folder}/{step} is {UNCERTIFIED}")

    def saves(self, folder: str) -> dict[int, str]:
        """Returns step -> the folder of its files, as its manifest states; "" if it is damaged."""
        found: dict[int, str] = {}
        for step in self.steps(folder):
            stored = self.bucket.get(_manifest(folder, step))
            match = stored and re.search(rb'"data": ?"(data/\d+-[0-9a-f]{12})"', stored.data)
            found[step] = match[1].decode() if match else ""
        return found

    def set_aside(self, folder: str, step: int, wrong: str) -> None:
        """Moves the manifest of a damaged checkpoint aside."""
        self.say(
            f"warning: checkpoint {self.bucket.url}/{folder}/{step} is damaged ({wrong}): its "
            f"manifest is moved to {DAMAGED}/"
        )
        self._move(folder, step, DAMAGED)

    def delete_oldest(
        self, folder: str, keep: int, every: int = 1, certified: int | None = None
    ) -> None:
        """Deletes manifests as :func:`jaxtrain.checkpoint.files.delete_oldest` does on disk."""
        there = self.steps(folder)
        at_cadence = [step for step in there if step % every == 0]
        right = [step for step in there if certified is not None and step <= certified]
        kept = (*at_cadence[-1:], *right[-1:])
        old = [step for step in there[:-keep] if step not in kept]
        self.bucket.delete([_manifest(folder, step) for step in old])

    def collect(self, keep: Iterable[str] = ()) -> None:
        """Deletes files that no manifest lists, from deleted checkpoints and interrupted uploads.

        Args:
            keep: folders in ``data/`` that are being uploaded.
        """
        used = set(keep)
        for prefix in _PREFIXES:
            for folder in (f"{prefix}{CHECKPOINTS}", f"{prefix}{BEST}"):
                for step, data in self.saves(folder).items():
                    used.add(data or f"data/{step}-")  # everything that it may be
        unused = [
            name
            for name in self.bucket.sizes("data")
            if re.match(f"{_DATA.pattern}/", name)  # others are a user's
            and not any(name.startswith(f"{one}/" if _DATA.fullmatch(one) else one) for one in used)
        ]
        self.bucket.delete(unused)

    def fetch(self, found: Stored, parts: list[int], run: Path, target: Path) -> None:
        """Downloads parts of a checkpoint and makes them one on disk, complete and verified.

        What an interrupted download has, and intact files of ``target``, are not downloaded again.

        Args:
            found: from :meth:`read`.
            parts: their numbers, as :meth:`Layout.parts_with` returns.
            run: the run directory.
            target: the folder of the checkpoint, in the run directory; replaced if it exists.

        Raises:
            Incomplete: a file is missing in the bucket, or differs from what was saved.
            Unavailable, InputError: the bucket cannot be read.
            RunAgain: the disk is full.
        """
        wanted = found.of_parts(parts)
        for part in parts:
            if f"{part}/{manifest.NAME}" not in wanted:
                raise Incomplete(f"part {part} is missing")
        local = run / FETCHING / found.data.replace("/", "-")
        try:
            local.mkdir(parents=True, exist_ok=True)
            for other in local.parent.iterdir():  # an interrupted fetch, whose space is needed
                if other != local:
                    shutil.rmtree(other, ignore_errors=True)
            there = self.bucket.versions(found.data)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                left = {
                    name: count
                    for name, count in pool.map(
                        lambda name: (
                            name,
                            _left(wanted[name], local / name, target / name.partition("/")[2]),
                        ),
                        wanted,
                    )
                    if count is not None
                }
                check_room(
                    local,
                    sum(left.values()),
                    f"checkpoint {found.step} of {self.bucket.url}",
                    "free space there",
                )
                for _ in pool.map(
                    lambda name: self._fetch_file(
                        f"{found.data}/{name}",
                        there.get(f"{found.data}/{name}"),
                        wanted[name],
                        local / name,
                    ),
                    sorted(left, key=lambda name: -wanted[name][0]),
                ):
                    pass
            assembled = local / str(parts[0])
            if len(parts) > 1:
                assembled = _assembled(local, parts, found)
            if target.exists():
                shutil.rmtree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            assembled.rename(target)
            shutil.rmtree(run / FETCHING)
        except OSError as error:
            raise disk_trouble(error, f"{local} cannot be written", "free space there") from error

    def _fetch_file(
        self,
        name: str,
        version: tuple[int, str] | None,
        entry: tuple[int, list[str]],
        path: Path,
    ) -> None:
        size, digests = entry
        if version is None:
            raise Incomplete(f"{name} is missing")
        beside = _partial(path)
        for _ in range(1 + beside.exists()):  # what an interrupted download left may be damaged
            try:
                got = self.bucket.download(
                    name, beside, manifest.PIECE_BYTES, most=size, version=version
                )
            except TooLarge as why:
                raise Incomplete(str(why)) from None
            if got is None:
                raise Incomplete(f"{name} is missing")
            if got == digests:
                os.replace(beside, path)
                return
            beside.unlink()
        raise Incomplete(f"{name} was changed after it was saved: its checksum is wrong")

    def _move(self, folder: str, step: int, aside: str) -> None:
        found = self.bucket.get(_manifest(folder, step))
        if found is not None:
            self.bucket.put(f"{aside}/{_manifest(folder, step)}", found.data)
            self.bucket.delete([_manifest(folder, step)])


def _left(entry: tuple[int, list[str]], path: Path, old: Path) -> int | None:
    """Returns how many bytes of a file are to be fetched; None if it is there, or in ``old``.

    A file of ``old`` is linked: a copy would need its space twice.
    """
    size, digests = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    for one in (path, old):
        regular = one.is_file() and not one.is_symlink()
        if regular and one.stat().st_size == size and manifest.hashes({one: size})[one] == digests:
            if one is old:
                try:
                    os.link(old, path)
                except OSError:  # a file system without hard links
                    shutil.copyfile(old, path)
            return None
        if one is path:
            path.unlink(missing_ok=True)
    beside = _partial(path)
    return size - min(size, beside.stat().st_size if beside.is_file() else 0)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def stage(url: str, cache_root: Path, process: int = 0) -> Path:
    """Returns the folder on disk for a run in a bucket."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "", url.rpartition("/")[2])[:40]  # as launchers do
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    own = "run" if process == 0 else f"run-{process}"
    return cache_root / "buckets" / f"{name}-{digest}" / own


def model_to_read(text: str, flag: str, cache_root: Path, say: Say) -> Path:
    """Fetches a checkpoint for a command that uses a trained model, and returns its folder.

    Args:
        text: the URL of a run (its best checkpoint, else its newest) or of one of its checkpoints.
        flag: the flag or field that has the URL, for messages.
        cache_root: the cache folder.
        say: prints what is fetched, and which checkpoints are damaged.

    Raises:
        InputError: it has no intact checkpoint.
        RunAgain: the bucket or the disk is unavailable.
    """
    url, folder, only = _split(text, flag)
    found = BucketCheckpoints(Bucket(url), say)
    folders = (folder,) if folder else (BEST, CHECKPOINTS)
    with _reading(url, cache_root, say) as local, _of_disk(url):
        damaged = ""
        for one in folders:
            for step in found.steps(one)[::-1]:
                if only in (None, step):
                    try:
                        return _fetch_to_read(found, one, step, local)
                    except Incomplete as why:
                        damaged = damaged or f" ({why})"
                        say(f"warning: checkpoint {url}/{one}/{step} is damaged ({why}): skipped")
    shown = f"{url}/{folder}/{only}" if folder else url
    raise InputError(f"{shown} has no intact checkpoint{damaged}: check the URL")


def checkpoint_to_resume(text: str, cache_root: Path, say: Say) -> tuple[Path, str]:
    """Fetches the checkpoint for ``--resume URL``, and returns its folder and its URL.

    Of a run, this is the newest intact one, as on disk; damaged ones are reported.

    Args:
        text: the URL of a run or of one of its checkpoints.
        cache_root: the cache folder.
        say: prints what is fetched, and what is damaged.

    Raises:
        InputError: the checkpoint is missing or damaged; the message lists the others.
        RunAgain: the bucket or the disk is unavailable.
    """
    url, folder, only = _split(text, "--resume")
    found = BucketCheckpoints(Bucket(url), say)
    with _reading(url, cache_root, say) as local, _of_disk(url):
        there = {name: found.steps(name) for name in (CHECKPOINTS, BEST)}
        if only is not None:
            path = _fetch_step(found, folder, only, local, f"--resume {text}", there)
            return path, f"{url}/{folder}/{only}"
        damaged: list[str] = []
        for one in (CHECKPOINTS, BEST) if there[CHECKPOINTS] else ():
            for step in there[one][::-1]:
                try:
                    path = _fetch_to_read(found, one, step, local)
                except Incomplete as why:
                    damaged.append(f"{one}/{step}: {why}")
                    say(f"warning: checkpoint {url}/{one}/{step} is damaged ({why}): skipped")
                    continue
                if damaged:
                    say(
                        f"warning: resuming from {url}/{one}/{step}, the newest intact one in "
                        f"{one}/"
                    )
                return path, f"{url}/{one}/{step}"
    if damaged:
        raise InputError(f"--resume {text}: no checkpoint there is intact ({damaged[0]})")
    raise InputError(f"--resume {text}: no complete checkpoint found there; {others(there, -1)}")


def _fetch_step(
    found: BucketCheckpoints,
    folder: str,
    step: int,
    local: Path,
    flag: str,
    there: dict[str, list[int]],
) -> Path:
    """Fetches the one checkpoint that a URL names, and no other."""
    if step not in there[folder]:
        raise InputError(f"{flag}: no checkpoint {step} found there; {others(there, step)}")
    try:
        return _fetch_to_read(found, folder, step, local)
    except Incomplete as why:
        raise InputError(
            f"{flag}: {found.bucket.url}/{folder}/{step} is not a complete checkpoint ({why}); "
            f"{others(there, step)}"
        ) from None


def run_to_read(
    text: str, cache_root: Path, say: Say, damaged: dict[str, str] | None = None
) -> Path:
    """Fetches the files of a run for a command that reads them, and returns their folder.

    Args:
        text: the URL of the run.
        cache_root: the cache folder.
        say: prints what is fetched.
        damaged: if given, all checkpoints are fetched, too, which verifies them; receives the path
            of each damaged one -> the damage. Its folder is empty.

    Raises:
        InputError: nothing is there.
        RunAgain: the bucket or the disk is unavailable.
    """
    url = normalized(text, "RUN")
    found = BucketCheckpoints(Bucket(url), say)
    with _reading(url, cache_root, say) as local, _of_disk(url):
        sizes = {name: n for name, n in found.bucket.sizes().items() if listing.is_inside(name)}
        if not sizes:
            raise InputError(f"{url} has no files: check the URL")
        names = [
            name
            for name in sizes
            if name.partition("/")[0] not in (*_FOLDERS, "data") and not name.startswith(".")
        ]
        # Those of an earlier command are replaced one by one.
        here = [local / name for name in names if (local / name).is_file()]
        need = sum(sizes[name] for name in names) - sum(path.stat().st_size for path in here)
        cure = "free space there, or set $JAXTRAIN_CACHE to another folder"
        check_room(local, need, url, cure)
        for name in names:
            (local / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda name: found.bucket.download(name, local / name), names):
                pass
        prefixes = _PREFIXES if damaged is not None else ()
        for folder in [f"{prefix}{one}" for prefix in prefixes for one in (CHECKPOINTS, BEST)]:
            there = found.steps(folder)
            for step in there:
                try:
                    if folder.startswith(DAMAGED):
                        raise Incomplete("a resume has found this")
                    _fetch_to_read(found, folder, step, local)
                except Incomplete as why:
                    assert damaged is not None, "see above"
                    damaged[f"{folder}/{step}"] = str(why)
                    shutil.rmtree(local / folder / str(step), ignore_errors=True)
                    (local / folder / str(step)).mkdir(parents=True)
            for path in (local / folder).glob("*"):  # deleted in the bucket since
                if path.name.isdecimal() and int(path.name) not in there:
                    shutil.rmtree(path)
    return local


def _split(text: str, flag: str) -> tuple[str, str, int | None]:
    """Returns the URL of a run, and the folder and step if the URL is of a checkpoint."""
    url = normalized(text, flag)
    match = re.fullmatch(rf"(.+?)/({CHECKPOINTS}|{BEST})/(\d+)(?:\.json)?", url)
    return (match[1], match[2], int(match[3])) if match else (url, "", None)


@contextlib.contextmanager
def _reading(url: str, cache_root: Path, say: Say) -> Iterator[Path]:
    """Yields the folder for what commands read from a bucket, one of them at a time."""
    local = stage(url, cache_root).with_name("read")
    local.mkdir(parents=True, exist_ok=True)
    with lock.locked(local / ".reading", say, f"reading {url}"):
        yield local


@contextlib.contextmanager
def _of_disk(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_trouble(
            error,
            f"{url} cannot be fetched to {error.filename}",
            "set $JAXTRAIN_CACHE to another folder",
        ) from error


def _fetch_to_read(found: BucketCheckpoints, folder: str, step: int, local: Path) -> Path:
    checkpoint, target = found.read(folder, step), local / folder / str(step)
    there = found.bucket.versions(checkpoint.data)
    about = {name: there.get(f"{checkpoint.data}/{name}") for name in checkpoint.files}
    now = json.dumps([checkpoint.data, about])
    mark = target.with_name(f".{step}")  # what the files on disk were fetched from
    if not (mark.is_file() and mark.read_text() == now):
        for old in (target, local / FETCHING):
            shutil.rmtree(old, ignore_errors=True)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(now)
    elif target.is_dir() and not manifest.verify(target):
        return target
    parts = checkpoint.layout.complete()
    size = sum(count for count, _ in checkpoint.of_parts(parts).values())
    found.say(f"fetching {folder}/{step} from {found.bucket.url} ({size / 2**20:.1f} MiB)")
    found.fetch(checkpoint, parts, local, target)
    return target


def _manifest(folder: str, step: int) -> str:
    return f"{folder}/{step}.json"


def _json(data: bytes) -> dict[str, Any]:
    content = parse_json(data)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def _digest(path: Path) -> str:
    return manifest.digests(path.read_bytes())[0][:12]


def _assembled(local: Path, parts: list[int], found: Stored) -> Path:
    """Puts parts together, each a checkpoint with the shards of one process, as one checkpoint."""
    from jaxtrain.checkpoint.orbax_compat import merge_parts

    base = local / str(parts[0])
    try:
        first = part_of(base)
        merge_parts([local / str(part) / STATE for part in parts])
    except Exception as error:  # TensorStore's errors have no class of their own
        words = str(error) if isinstance(error, Incomplete) else reason(error)
        if cure := cure_of(words):
            raise RunAgain(f"{local} cannot be written ({words}): {cure}") from error
        shutil.rmtree(local)  # a merge uses the parts up
        raise Incomplete(f"its parts cannot be put together ({words})") from error
    for part in parts[1:]:
        shutil.rmtree(local / str(part))
    shards = sorted({shard for part in parts for shard in found.layout.of_part[part]})
    together = Part(first.save, found.layout, None, tuple(shards))
    (base / manifest.NAME).unlink()
    checkpoint_files.complete(base, {PART: together.to_json()}, found.step)
    return base
