"""One resumable map: for each input, makes one output; everything that prepares data is a call.

The output of an item is a file or a folder of OUT, whose name is a function of the input's name. It
is made in a folder of its own, appears by a rename, and then its record is written, with the
input's identity and the sizes and checksums of its files. So a killed command loses only what it
was making: the next one skips what has a record, and makes again what has changed. Making an
output twice, also at the same time, gives the same files. The folders of a cache have their record
inside (:mod:`jaxtrain.storage.record`), and no other.

OUT may be a folder of a bucket: then outputs are made in a temporary folder and uploaded, in the
same order. OUT/.jobs has the records, and of a *set*, a list of inputs with settings, the files
set.json and, once each input is made or has failed, complete.json. Readers accept only a complete
set. Several commands may each make a part of a set (:class:`Part`); each tries to complete it.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

from jaxtrain import terminal
from jaxtrain.errors import BadExample, InputError, RunAgain, first_line
from jaxtrain.jobs.engines import Engine, Ray, Worker
from jaxtrain.storage import addresses, atomic, bucket_folders, cache, disks, lock, run_marker
from jaxtrain.storage import record as records
from jaxtrain.storage.bucket import Bucket, is_bucket, normalized
from jaxtrain.terminal import Say

WORK = ".jobs"  # in OUT; hidden, so that its files are not read as data
RECORDS = f"{WORK}/records"
REPORT = "report.json"
FINISHED = "table"
"""A folder of a set that is made of the records of all outputs."""
KILLS = (
    "kills the worker that processes it: if it lacks memory, use fewer workers or larger machines"
)
_SET, _COMPLETE = f"{WORK}/set.json", f"{WORK}/complete.json"
_THREADS, _AT_ONCE = 32, 1000  # that read records, and records in memory
_NAMED = 20  # failed items, and notes, that the console lists

Record = dict[str, Any]
Make = Callable[["Item", Path], Record]
"""(item, the file or folder to make, which does not exist) -> details for the record, as JSON.

The detail "notes" has messages for the user; details that are numbers are summed up. The detail
"again" says that the next command is to make the output, a file, again, because an input could not
be read; "absent" is the path of one that does not exist on this machine.

Raises:
    BadExample: the content of the input is broken. The item is not tried again until it changes.
    Failed: the item cannot be processed now. The next command tries it again.
    RunAgain, InputError: end the command.
    OSError: the output cannot be written: ends the command.
    Exception: as Failed.
"""
Begin = Callable[[Worker], Make]
"""Prepares a worker, for example loads a model; see :data:`jaxtrain.jobs.engines.Begin`."""
Finish = Callable[[Path, list[Record]], None]
"""(the folder to make, which does not exist; the records of all outputs) -> None."""
Identity = tuple[str | int, ...]


class Failed(Exception):
    """An item cannot be processed, and is not known to be broken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """An input, and the name of its output.

    Attributes:
        name: differs from that of all other items; messages show it.
        identity: changes when the content of the input does, such as size and modification time.
        output: path of the output, relative to OUT.
        source: the input if it is a local file, which must not change while it is processed.
        is_folder: whether the output is a folder that has its own record
            (:data:`jaxtrain.storage.record.NAME`) with the details, and whose name changes with the
            input. Failures are then not recorded: the next command tries again.
        singles: of an item that stands for several inputs, an item for each. They are made in its
            place if it kills its worker. The detail "failed" of such an item is a dictionary of
            inputs that failed, name -> reason.
    """

    name: str
    identity: Identity
    output: str
    value: Any = None
    source: str = ""
    is_folder: bool = False
    singles: tuple["Item", ...] = ()

    @property
    def inputs(self) -> int:
        """Returns how many inputs the item stands for."""
        return len(self.singles) or 1

    @property
    def digest(self) -> str:
        """Returns a digest of the name, by which records and parts are found."""
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()


@dataclasses.dataclass(frozen=True)
class Part:
    """Which items a command makes: in the list sorted by digest, every ``count``-th one.

    So few and large items spread evenly.

    Attributes:
        index: from 0 to ``count`` - 1.
        count: number of parts; 1 is all items.
    """

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"part {self.index}/{self.count}"


ALL = Part()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to the items of a command.

    Attributes:
        failed: name -> reason, also of items that failed before and were not tried again.
        left: items that other parts have not made yet.
    """

    made: int
    skipped: int
    failed: dict[str, str]
    left: int
    totals: dict[str, int]

    @property
    def exit_code(self) -> int:
        """Returns 1 if an item failed, else 0."""
        return 1 if self.failed else 0


def identity(path: str | Path) -> Identity:
    """Returns the size and modification time of a file.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def run(
    items: Iterable[Item],
    begin: Begin,
    out: Path | str,
    settings: Mapping[str, Any] | None = None,
    *,
    engine: Engine,
    say: Say,
    part: Part = ALL,
    doing: str = "preparing",
    things: str = "files",
    finish: Finish | None = None,
) -> Outcome:
    """Makes the outputs that do not exist yet.

    Args:
        out: the folder of the outputs, or the URL of a folder in a bucket.
        settings: all that an output depends on besides its input, for JSON. OUT then has one set,
            with these settings. None is for a cache, where the names of outputs depend on them:
            it may have outputs of other items, too.
        doing: the work, for messages, such as "cutting".
        things: the inputs, for messages, such as "videos".
        finish: writes the folder :data:`FINISHED` of a complete set.

    Raises:
        InputError: OUT has outputs with other settings, two items have the same output, or another
            part has another list of inputs.
        RunAgain: a disk, bucket or cluster is full or unavailable. What is made is kept.
    """
    listed = sorted(items, key=lambda item: item.digest)
    _check_distinct(listed)
    names = _list_digest(listed)
    # Commands that fill a cache with other things do not wait for each other.
    key = f"{part.index}-of-{part.count}" if settings is not None else f"{names[:12]}-{part.index}"
    place = _place(out, key)
    current = {"settings": settings, "items": len(listed), "list": names}
    with place.opened(say):
        if settings is not None:
            _check_set(place, current, part)
        tally, todo = _Tally(), list[Item]()
        mine = listed[part.index :: part.count]
        for item, record in _current(place, mine):
            if record is not None and record.get("final", True):
                tally.add(record)
            else:
                todo.append(item)
        total = sum(item.inputs for item in mine)
        skipped, failed, notes = tally.made, len(tally.failed), 0
        if tally.count:
            before = f"; {failed:,} failed before, without a change since" if failed else ""
            say(f"{skipped:,} of {total:,} {things} are already done{before}")
        mark = place.mark() if isinstance(engine, Ray) else None
        work = functools.partial(_begin, begin, place, mark)
        with terminal.progress_bar(doing, things, total, tally.count, say) as show:
            again = list[Item]()
            for item, result in _chained(lambda items: engine.map(work, items), todo, again):
                record = _failed(item, KILLS) if result is None else result
                if result is None:
                    place.remove(item.output)  # of an earlier version of the input
                    place.write_record(item, record)
                    if item.singles:
                        again += item.singles
                        continue
                if "absent" in record:
                    _check_seen(*record["absent"])
                reported = len(tally.failed)
                tally.add(record)
                for name, why in itertools.islice(tally.failed.items(), reported, None):
                    is_named = item.source and item.source in why
                    line = f"failed: {why}" if is_named else f"failed: {name}: {why}"
                    _say_first(line, len(tally.failed) - failed, "more have failed", say)
                for note in record.get("details", {}).get("notes", ()):
                    notes += 1
                    _say_first(note, notes, "more lines of this kind follow, for other inputs", say)
                show(tally.count, len(tally.failed))
        left = 0
        if settings is not None:
            left = _complete(place, current, listed, part, finish, say)
    return Outcome(tally.made - skipped, skipped, dict(tally.failed), left, dict(tally.totals))


def check_complete(out: Path | str) -> None:
    """Checks that a folder's set is complete, or that it has none: :func:`run` never wrote there.

    Raises:
        DiskAway: the folder cannot be read now.
    """
    place = _place(out)
    try:
        current = place.read(_SET)
        complete = current is None or place.read(_COMPLETE) == current
    except OSError as error:
        raise disks.disk_trouble(error, f"cannot read {out}", "make it readable") from error
    if not complete:
        raise InputError(
            f"{out} is incomplete: the command that prepares it was stopped, or some of its parts "
            "have not ended: repeat it, and then start this one again"
        )


def settings_of(out: Path | str) -> dict[str, Any] | None:
    """Returns the settings of a folder's set; None if :func:`run` has not written there.

    Raises:
        DiskAway: the folder cannot be read now.
    """
    try:
        return dict(json.loads(_place(out).read(_SET) or b"")["settings"])
    except OSError as error:
        if disks.is_away(error):
            raise disks.disk_trouble(error, f"cannot read {out}", "make it readable") from error
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _check_distinct(items: Sequence[Item]) -> None:
    names: dict[str, str] = {}
    for item in items:
        other = names.setdefault(item.output, item.name)
        if other is not item.name:
            raise InputError(
                f"the outputs of {other} and {item.name} would both be {item.output}: rename one, "
                "or prepare them in separate folders"
            )
    for item in items:
        above = item.output
        while above := above.rpartition("/")[0]:
            if above in names:
                raise InputError(
                    f"the output {item.output} of {item.name} would be inside that of "
                    f"{names[above]}: rename one, or prepare them in separate folders"
                )


def _chained(
    run: Callable[[list[Item]], Iterable[tuple[Item, Record | None]]], *lists: list[Item]
) -> Iterator[tuple[Item, Record | None]]:
    """Yields the results of one list after the other, which may grow until then."""
    for items in lists:
        yield from run(items)


def _current(place: "_Place", items: Sequence[Item]) -> Iterator[tuple[Item, Record | None]]:
    """Yields each item with its record, if that is of the input as it is now; else with None.

    In place of an item that killed its worker, yields those for its single inputs.
    """
    for item, record in zip(items, place.records(items), strict=True):
        if not _is_current(record, item):
            yield item, None
        elif item.singles and record.get("error") == KILLS:
            for single, of_single in zip(item.singles, place.records(item.singles), strict=True):
                yield single, of_single if _is_current(of_single, single) else None
        else:
            yield item, record


def _is_current(record: Record | None, item: Item) -> TypeGuard[Record]:
    return record is not None and record["identity"] == list(item.identity)


class _Tally:
    """Counts results. Memory grows with the failures only."""

    def __init__(self) -> None:
        self.made = 0
        self.failed: dict[str, str] = {}
        self.totals = collections.Counter[str]()

    @property
    def count(self) -> int:
        return self.made + len(self.failed)

    def add(self, record: Record) -> None:
        if "error" in record:
            self.failed[record["name"]] = record["error"]
            return
        details = record["details"]
        self.failed |= details.get("failed", {})
        self.made += details.get("inputs", 1) - len(details.get("failed", {}))
        more = {name: value for name, value in details.items() if name != "inputs"}
        self.totals.update({k: v for k, v in more.items() if type(v) is int})


def _say_first(line: str, count: int, more: str, say: Say) -> None:
    if count <= _NAMED:
        say(line)
    elif count == _NAMED + 1:
        say(more)


# The set.


def _list_digest(listed: Sequence[Item]) -> str:
    names = hashlib.sha256()
    for item in listed:
        names.update(json.dumps([item.name, *item.identity]).encode())
    return names.hexdigest()


def _check_set(place: "_Place", current: Record, part: Part) -> None:
    """Writes set.json, or checks that this command fits what is there."""
    before_text, text = place.read(_SET), json.dumps(current)
    if before_text == text.encode():
        return
    if before_text is None:
        _refuse_others(place)
    if before_text is not None:
        try:
            before = json.loads(before_text)
            before_settings, before_items = dict(before["settings"]), int(before["items"])
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"OUT {place.location}: {_SET} is damaged: delete that file, and repeat the "
                "command, which keeps what is made"
            ) from None
        differ = [
            f"{name} {before_settings.get(name)}, not {value}"
            for name, value in current["settings"].items()
            if before_settings.get(name) != value
        ]
        # A command that ended before it made anything leaves only its settings.
        is_empty = part.count == 1 and next(iter(place.names_of_records()), None) is None
        if differ and not is_empty:
            raise InputError(
                f"OUT {place.location} has outputs with other settings ({'; '.join(differ)}): use "
                "the same settings, or another OUT"
            )
        if part.count > 1 and place.read(_COMPLETE) != before_text:
            raise InputError(
                f"OUT {place.location}: another part has a list of {before_items:,} inputs, and "
                f"this one has {current['items']:,}, or some have changed: give all parts the same "
                "inputs; to start with other inputs, run the command once without --part"
            )
    place.write(_SET, text)


def _refuse_others(place: "_Place") -> None:
    """Refuses an OUT whose files are not outputs: one of the same name would be replaced."""
    name = place.visible()
    is_set = place.read(_SET) is not None  # another part may have begun since
    if name and not is_set and next(iter(place.names_of_records()), None) is None:
        raise InputError(
            f"OUT {place.location} has files that this command did not write, such as {name}: use "
            "a new or an empty folder"
        )


def _complete(
    place: "_Place",
    current: Record,
    listed: Sequence[Item],
    part: Part,
    finish: Finish | None,
    say: Say,
) -> int:
    """Writes the report and marks the set as complete; else returns how many inputs are left."""
    everything, left = _Tally(), 0
    made = list[tuple[Item, Record]]()
    for item, record in _current(place, listed):
        if record is None:
            left += item.inputs
        else:
            everything.add(record)
            made.append((item, record))
    if left:
        total = sum(item.inputs for item in listed)
        say(f"{part} is done; other parts have {left:,} of {total:,} inputs left")
        return left
    if finish is not None:
        with place.working() as folder:
            finish(folder / FINISHED, [record for _, record in made if "error" not in record])
            records.write(folder / FINISHED, {})
            place.publish(FINISHED, folder / FINISHED)
    stray = place.stray(
        [item for item, _ in made],
        {single.name for item in listed for single in item.singles or (item,)},
    )
    if stray:
        say(
            f"warning: OUT {place.location} has {len(stray):,} outputs of inputs that are no "
            f"longer in the list, such as {stray[0]}: readers still see them; delete what you do "
            "not want"
        )
    report = {
        "settings": current["settings"],
        "inputs": everything.count,
        "made": everything.made,
        **everything.totals,
        "failed": [
            {"name": name, "reason": why} for name, why in sorted(everything.failed.items())
        ],
        "notes": sorted(
            note for _, record in made for note in record.get("details", {}).get("notes", ())
        ),
        "not_in_list": stray,
    }
    place.write(REPORT, json.dumps(report, indent=1) + "\n")
    place.write(_COMPLETE, json.dumps(current))
    return 0


# One item, in a worker.


def _begin(begin: Begin, place: "_Place", mark: Path | None, worker: Worker) -> Any:
    if mark is not None and not mark.is_dir():
        raise InputError(
            f"OUT {place.location} on {socket.gethostname()} is not the folder of this command: "
            "use a folder that all nodes share under the same path"
        )
    return functools.partial(_attempt, begin(worker), place)


def _attempt(make: Make, place: "_Place", item: Item) -> Record:
    with place.working() as folder:
        made = folder / (item.output.rpartition("/")[2] or "output")
        unreadable = False
        try:
            before = _identity(item)
            details = make(item, made)
            if _identity(item) != before or before != item.identity[: len(before)]:
                raise Failed("changed while it was processed")
            if item.is_folder:
                files = records.write(made, details)["files"]
            else:
                files = records.files_of(made)
            record = {**_record(item), "details": details, "files": files}
            if details.get("again"):
                record["final"] = False
            if path := details.get("absent"):
                record["absent"] = [path, socket.gethostname()]
            place.publish(item.output, made)
        except BadExample as bad:
            # The system's errors, such as a missing permission, may be gone the next time.
            unreadable = isinstance(bad.__cause__, OSError)
            record = _failed(item, bad.reason, final=not unreadable)
            if isinstance(bad.__cause__, FileNotFoundError):
                record["absent"] = [bad.path, socket.gethostname()]
        except Failed as failure:
            record = _failed(item, str(failure))
        except (RunAgain, InputError) as error:
            error.args = tuple(_renamed(str(text), place, item, made) for text in error.args)
            if isinstance(error, InputError):
                error.messages = error.args
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            record = _failed(item, f"{type(error).__name__}: {first_line(error)}")
        if "error" in record:
            record["error"] = _renamed(record["error"], place, item, made)
            # An output is kept whose input was deleted, or is on a disk that is not mounted.
            if not unreadable:
                place.remove(item.output)
    place.write_record(item, {name: value for name, value in record.items() if name != "absent"})
    return record


def _renamed(text: str, place: "_Place", item: Item, made: Path) -> str:
    """Names the output instead of the folder in which it is made."""
    return text.replace(str(made), f"{place.location}/{item.output}")


def _identity(item: Item) -> Identity:
    """Returns what is known of the input now: the beginning of its identity; () without a file."""
    if not item.source:
        return ()
    try:
        return identity(item.source)
    except OSError as error:
        raise BadExample(item.source, error.strerror or str(error)) from error


def _record(item: Item) -> Record:
    return {"name": item.name, "identity": list(item.identity), "output": item.output}


def _failed(item: Item, reason: str, *, final: bool = False) -> Record:
    return {**_record(item), "error": reason, "final": final}


def _check_seen(path: str, host: str) -> None:
    """Raises InputError if this machine sees a file that a worker's does not."""
    if host != socket.gethostname() and os.path.exists(path):
        raise InputError(
            f"{path} does not exist on {host}: use a folder that all nodes share under the same "
            "path"
        )


def _parsed(data: bytes | None) -> Record | None:
    """Returns a record; None if it is missing or damaged."""
    try:
        record = json.loads(data or b"")
        intact = isinstance(record["name"], str) and isinstance(record["identity"], list)
        made = "error" in record or records.parsed(data) is not None
        return record if intact and made else None
    except (ValueError, KeyError, TypeError):
        return None


# Where outputs and records are.


@dataclasses.dataclass(frozen=True)
class _Place:
    """The folder OUT on disk; can be pickled.

    Attributes:
        location: the folder or URL, for messages.
        key: the same for commands that make the same items; names what they have half made.
    """

    location: str
    key: str

    @property
    def _top(self) -> Path:
        return Path(self.location)

    @property
    def half(self) -> Path:
        """Returns the folder on disk where outputs are made."""
        return self._top / WORK / "half"

    @contextlib.contextmanager
    def opened(self, say: Say) -> Iterator[None]:
        """Waits until no other command makes the same items here, and turns errors of the disk into
        messages while the block runs.
        """
        if self._top.is_file():
            raise InputError(f"OUT {self.location} is a file: choose a folder")
        try:
            self.half.mkdir(parents=True, exist_ok=True)
            file = self.half.with_name(f"{self.half.name}-{self.key}.lock")
            with lock.locked(file, say, f"preparing data in {self.location}") as mine:
                try:
                    if mine:
                        self._remove_half_made()  # by killed commands
                    yield
                finally:
                    if mine:
                        self._remove_half_made()  # by nodes that were lost, and ended workers
        except OSError as error:
            raise disks.disk_trouble(
                error,
                f"cannot write to {error.filename or self.half}",
                "choose another folder (OUT, or $JAXTRAIN_CACHE), and start "
                "again; finished work is kept",
            ) from error

    def _remove_half_made(self) -> None:
        ours = re.compile(re.escape(self.key) + "-[0-9a-f]{16}")  # of half_made
        for left in filter(ours.fullmatch, os.listdir(self.half)):
            if os.path.isdir(self.half / left):
                shutil.rmtree(self.half / left, ignore_errors=True)
            else:
                (self.half / left).unlink(missing_ok=True)

    def half_made(self) -> Path:
        """Returns a new path in :attr:`half`."""
        return self.half / f"{self.key}-{secrets.token_hex(8)}"

    @contextlib.contextmanager
    def working(self) -> Iterator[Path]:
        """Makes an empty folder on disk, which is removed at the end of the block."""
        folder = self.half_made()
        folder.mkdir(parents=True)  # on a node of a cluster, the first one
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def mark(self) -> Path | None:
        """Makes an empty folder in OUT, which each worker must see; None if OUT is in a bucket."""
        folder = self.half_made()
        folder.mkdir()
        return folder

    def sizes(self) -> Callable[[str], int | None]:
        """Returns a function from the name of a file to its size; None if it does not exist."""

        def size_of(name: str) -> int | None:
            try:
                return (self._top / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

        return size_of

    def visible(self) -> str | None:
        """Returns the name of a file or folder that is not hidden; None if there is none."""
        names = run_marker.content_of(os.listdir(self._top))
        return next((name for name in names if name[0] != "."), None)

    def names_of_records(self) -> Iterable[str]:
        """Returns the names of all records."""
        for path in (self._top / RECORDS).glob("*/[!.]*.json"):
            yield path.relative_to(self._top).as_posix()

    def publish(self, output: str, made: Path) -> None:
        """Replaces an output."""
        records.publish(made, self._top / output, self.half_made())

    def remove(self, output: str) -> None:
        """Removes an output, if it exists."""
        records.remove(self._top / output, self.half_made())

    def read(self, name: str) -> bytes | None:
        """Returns a small file; None if it does not exist."""
        try:
            return (self._top / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """Writes a small file, which appears complete."""
        path, made = self._top / name, self.half_made()  # of a killed command, the next removes it
        path.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(text.encode())
        atomic.sync(made)
        os.replace(made, path)
        atomic.sync(path.parent)

    def records(self, items: Sequence[Item]) -> Iterator[Record | None]:
        """Yields the record of each item; None if it is missing, or files do not match it."""
        size_of = self.sizes()

        def record_of(item: Item) -> Record | None:
            of_folder = f"{item.output}/{records.NAME}"
            name = of_folder if item.is_folder else _record_name(item.digest)
            data = None if size_of(name) is None else self.read(name)
            if item.is_folder:
                made = records.parsed(data)
                record = made and {**_record(item), "details": made, "files": made["files"]}
            else:
                record = _parsed(data)
            if record is None or "error" in record:
                return record
            same = all(
                size_of(f"{record['output']}/{file}".rstrip("/")) == size
                for file, size in records.sizes(record).items()
            )
            return record if same else None

        # A record takes milliseconds on a network disk or in a bucket.
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(items), _AT_ONCE):
                yield from pool.map(record_of, items[start : start + _AT_ONCE])

    def write_record(self, item: Item, record: Record) -> None:
        """Writes the record of an item, unless its output has one."""
        if not item.is_folder:
            self.write(_record_name(item.digest), json.dumps(record))

    def stray(self, items: Iterable[Item], inputs: Set[str]) -> list[str]:
        """Returns the outputs of other items than these, if they exist.

        Removes those whose inputs are now in other items.
        """
        listed = list(items)
        current = {_record_name(item.digest) for item in listed}
        replaced = {item.output for item in listed}
        size_of, outputs = self.sizes(), []
        for name in list(self.names_of_records()):
            record = None if name in current else _parsed(self.read(name))
            if record is None or "error" in record:
                continue
            if record["output"] in replaced:  # by one of a group with more or fewer inputs
                self.remove(name)
                continue
            files = (f"{record['output']}/{file}".rstrip("/") for file in record["files"])
            if not any(size_of(file) is not None for file in files):
                continue
            if set(record["details"].get("members", [""])) <= inputs:
                self.remove(record["output"])
                self.remove(name)
            else:
                outputs.append(record["output"])
        return sorted(outputs)


def _place(out: Path | str, key: str = "") -> _Place:
    text = str(out)
    if is_bucket(text) or addresses.is_address(text):
        return _Bucket(normalized(text, "OUT"), key)
    return _Place(str(atomic.expanded(out).absolute()), key)


def _record_name(digest: str) -> str:
    return f"{RECORDS}/{digest[:2]}/{digest[2:]}.json"


class _Bucket(_Place):
    """A folder of a bucket."""

    @property
    def half(self) -> Path:
        folder = hashlib.sha256(self.location.encode()).hexdigest()[:16]
        return cache.path_of(None) / "scratch" / folder

    @property
    def _store(self) -> Bucket:
        return bucket_folders.opened(self.location)

    def mark(self) -> None:
        return None

    def sizes(self) -> Callable[[str], int | None]:
        return self._store.sizes().get

    def visible(self) -> str | None:
        return min((name for name in self._store.sizes() if name[0] != "."), default=None)

    def names_of_records(self) -> Iterable[str]:
        return self._store.sizes(RECORDS)

    def publish(self, output: str, made: Path) -> None:
        if made.is_file():
            self._store.put(output, made)
            return
        files = {
            f"{output}/{path.relative_to(made).as_posix()}": path
            for path in sorted(made.rglob("*"), key=lambda path: (path.name == records.NAME, path))
            if path.is_file()
        }
        for name, path in files.items():  # its own record is the last
            self._store.put(name, path)
        self._store.delete(sorted(self._store.sizes(output).keys() - files.keys()))

    def remove(self, output: str) -> None:
        self._store.delete([output, *self._store.sizes(output)])

    def read(self, name: str) -> bytes | None:
        content = self._store.get(name)
        return None if content is None else content.data

    def write(self, name: str, text: str) -> None:
        self._store.put(name, text.encode())
