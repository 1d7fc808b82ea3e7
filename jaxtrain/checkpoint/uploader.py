"""Keeps a run in a bucket: fetches what a start needs, and uploads while the run trains.

With ``--output-dir s3://...``, the bucket is the run directory. Each process has a folder in its
cache, for one process as for several, so that hosts need not share a disk: what is there and not in
the bucket does not count, and the next start deletes it. So a start on another machine gives what
one on this machine gives. A checkpoint whose upload was interrupted is not complete.

One thread uploads: first the files of a new checkpoint, then the run's files, then the pointer,
which completes it. The run and its next save do not wait for the bucket:

- a save that completes during an upload is not uploaded, with a warning; the next one is;
- an upload that fails is tried again, with a warning; after three failures, a newer checkpoint
  replaces it;
- before a rollback and at the end, the run waits until the last checkpoint is in the bucket.

Each process uploads the files of its shards and then a list of them; process 0 waits for all lists
and writes the pointer with all files.

Measured for 128 MiB beside other work (benchmarks/RESULTS.md): TensorStore's driver for S3 takes 8
to 11 s; a save on disk takes 3 s, and its upload another 5 s, for which the run does not wait.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, Self

import jax

from jaxtrain.checkpoint import own_files, pointer, remote, start
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.checkpoint.pointer import BAD_STEP, BEST, DAMAGED, KINDS, SUSPECT, Damaged, Pointer
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.saver import Save
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place, claim, mark_copy
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import bucket as buckets
from jaxtrain.storage import lease, run_marker
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.storage.file_copies import FileCopies
from jaxtrain.terminal import Say

# Between uploads of metrics, logs and samples that have changed: 9,000 parts of each log a month.
_FILES_EVERY_S = 300.0
_LONGEST_PAUSE_S = 30.0  # between tries
_FAILURES = 3  # after which a newer checkpoint replaces one that cannot be uploaded
_ANNOUNCE_S = 30.0
# At the end: a bucket that takes nothing new for this long is not waited for.
_GIVE_UP_S = 600.0
_BETWEEN_TRIES_S = 5.0
_STALLED_S = 60.0  # to see that another process has uploaded something
_AT_ONCE = 8  # files
_BUSY = "an upload is still running"

_Failures = (InputError, RunAgain, Damaged, OSError)


class _Sent:
    def __init__(self) -> None:
        self._count = self._most = 0
        self._began = self._took = 0.0
        self.moved_at = time.monotonic()

    def begin(self, *, again: bool) -> None:
        """Begins an attempt: what an earlier one has sent does not count as new."""
        self._count, self._began = 0, time.monotonic()
        if not again:
            self._most, self._took, self.moved_at = 0, 0.0, time.monotonic()

    def __call__(self, count: int) -> None:
        """Counts bytes."""
        self._count += count
        if self._count > self._most:
            self._most, self.moved_at = self._count, time.monotonic()
            self._took = self.moved_at - self._began

    def is_stuck(self) -> bool:
        """Whether the bucket takes nothing new for too long.

        An attempt after a failure may first take as long as the one that came furthest.
        """
        return time.monotonic() - self.moved_at > _GIVE_UP_S + self._took

    @property
    def mib(self) -> float:
        """Returns the MiB that this attempt has sent."""
        return self._count / 2**20


class Uploader:
    """A run in a bucket. All processes create one and make the same calls."""

    def __init__(
        self, bucket: Bucket, directory: Path, *, say: Say, expires_s: float = lease.EXPIRES_S
    ) -> None:
        self.directory = directory
        self._bucket, self._say = bucket, say
        self._process, self._count = jax.process_index(), jax.process_count()
        self._first = self._process == 0
        self._remote = RemoteRun(bucket, say)
        self._lease = lease.Lease(bucket, say, expires_s)
        self._keep, self._every = 1, 1
        self._milestones: int | None = None
        self._changed = threading.Condition()
        self._work: list[Save] = []
        self._missed: dict[str, Save] = {}  # kind -> the newest that is not uploaded
        self._failures = 0  # of the upload that is under way
        self._sent = _Sent()
        self._skipping = False
        self._commits = threading.Lock()
        self._stopped = False  # nothing is completed in the bucket any more
        self._unexpected: Exception | None = None
        self._reported: set[str] = set()
        self._files = FileCopies(bucket, directory, self._sent)
        self._files_follow = False  # whether those on disk are those of the bucket, or newer
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, output: str | None, cache_root: Path, say: Say) -> Self | None:
        """Returns that of the run in ``--output-dir``; None if it is not the URL of a bucket."""
        if output is None or not buckets.is_bucket(output):
            return None
        url = buckets.normalized(output, "--output-dir")
        directory = remote.stage(url, cache_root, jax.process_index())
        return cls(Bucket(url).impatient(), directory, say=say)

    @property
    def url(self) -> str:
        """Returns the URL of the run's folder."""
        return self._bucket.url

    @property
    def place(self) -> Place:
        """Returns the run's folder as the place of its checkpoints."""
        return self._remote.store.place

    def claim(self) -> None:
        """Makes sure that the bucket is this run's, and that no other run writes to it.

        Raises:
            RunAgain: a live run does, or the bucket or the disk is unavailable; in all processes
                alike.
            InputError: the bucket does not exist, or has files of a user.
        """

        def acquire() -> str:
            claim(self._remote.store.place, "--output-dir")
            self._lease.acquire()
            content = self._remote.store.place.get(run_marker.NAME)
            return "" if content is None else content.decode()

        marker = process_group.process_zero_decides(acquire)
        try:
            mark_copy(self.directory, marker)
        except OSError as error:
            raise disk_trouble(
                error,
                f"{self.directory} cannot be written",
                "free space there, or set $JAXTRAIN_CACHE to another folder",
            ) from error

    def candidates(self, say: Say | None = None) -> CheckpointCandidates:
        """Returns the checkpoints in the bucket, which become intact on disk when they are chosen.

        Raises:
            lease.Lost: another run has taken over.
        """
        self.check()
        return CheckpointCandidates(self.directory, say or self._say, self._remote)

    def fetch(self, start_from: Path | None) -> None:
        """Fetches what this process lacks of a checkpoint. All processes.

        Args:
            start_from: the checkpoint that process 0 has chosen; None for a fresh start.
        """
        if start_from is None or not start.is_in(self.directory, start_from):
            return
        name = start_from.relative_to(self.directory).as_posix()
        damage = failure = ""
        try:
            if not self._first:
                damage = self._remote.fetch(name, self.directory)
        except (InputError, RunAgain) as error:  # the others would wait for this process
            failure = str(error)
        # Process 0 may have an intact copy of a file that is damaged in the bucket.
        if damages := list(filter(None, process_group.gather("damage", damage))):
            self._reject(name, damages[0])
        if failures := list(filter(None, process_group.gather("fetch", failure))):
            raise RunAgain(failures[0])

    def fetch_files(self) -> None:
        """Makes the run's other files on disk, such as its metrics, those of the bucket.

        All processes; otherwise the run would continue the files of another start, or upload
        metrics that begin at its resumed step. A log may have more on disk: the last lines of a
        process that was killed.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._files.fetch(self._is_mine, ahead=True)
            self._files_follow = True
        except OSError as error:
            raise disk_trouble(
                error, f"{error.filename} cannot be written", "make it writable"
            ) from error

    def _reject(self, name: str, damage: str) -> NoReturn:
        """Moves a damaged checkpoint in the bucket aside, so that the next start uses another."""

        def move() -> str:
            kind, step = name.partition("/")[0], pointer.step_in(name)
            return self._remote.store.set_aside(kind, step, DAMAGED, damage)

        moved = process_group.process_zero_decides(move)
        url = f"{self.url}/{name.removesuffix('.json')}"
        raise RunAgain(
            f"checkpoint {url} is damaged ({damage}) and moved to {moved}: resume with --resume "
            "latest"
        )

    def has_best(self, step: int) -> bool:
        """Whether the best checkpoint is of this step, and complete. Process 0.

        Raises:
            InputError, RunAgain: it is unknown.
        """
        return self._remote.is_complete(BEST, step)

    def start(
        self, keep: int, every: int, resumed: Path | None, milestones: int | None = None
    ) -> None:
        """Begins to upload, in a thread, and deletes what the bucket does not have from the disk.

        Args:
            resumed: the checkpoint that the run continues from, if it is in its directory.
        """
        self._keep, self._every, self._milestones = keep, every, milestones
        try:
            if self._first and resumed is not None:
                store, name = self._remote.store, f"{resumed.parent.name}/{resumed.name}"
                _tried(lambda: store.go_back_to(name))  # or the first upload does it
                _tried(store.collect)  # a kill may have interrupted the last upload
            _tried(lambda: self._remote.forget(self.directory))
        except OSError as error:
            raise disk_trouble(
                error, f"{self.directory} cannot be read or written", "choose another --output-dir"
            ) from error
        self._sent.begin(again=False)
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that no other run has taken over, and that the thread that uploads has not failed.

        Raises:
            lease.Lost: one has.
            Exception: an error in that thread that no try again fixes, such as a defect.
        """
        if self._unexpected is not None:
            raise self._unexpected
        if self._lease.lost:
            raise lease.Lost(self._lease.lost)

    # The interface of saver.Uploads.

    def busy(self) -> str:
        """Returns why another checkpoint cannot be uploaded now; "" if it can."""
        with self._changed:
            if not self._work or self._failures >= _FAILURES:
                return ""
            return f"{_BUSY} ({self._progress()})"

    def offer(self, save: Save, problem: str) -> None:
        """Begins to upload a checkpoint, unless some process is busy."""
        with self._changed:
            self._missed |= dict.fromkeys(save.kinds, save)
            if problem:
                if self._first and not self._skipping:
                    self._say(
                        f"warning: checkpoint {save.step} is not uploaded to {self.url} "
                        f"({problem}): a later one will be; for more uploads, raise "
                        "--checkpoint.every"
                    )
                self._skipping = True
                return
            self._take_missed()

    def in_use(self) -> set[str]:
        """Returns the folders of files that are uploaded, or will be."""
        with self._changed:
            return {save.data for save in (*self._work, *self._missed.values())}

    def finish(self, still_alive: Callable[[], None]) -> None:
        """Waits until the newest checkpoint is in the bucket, with the files of all processes.

        Raises:
            RunAgain: in all processes, if the bucket took nothing new for ten minutes.
        """
        for _ in range(2):  # what is under way, then what was missed meanwhile
            problem = ""
            try:
                self._wait(still_alive)
            except RunAgain as error:
                problem = str(error)
            # A process that ended before the others would look lost to them.
            if problems := [
                problem_of_process
                for problem_of_process in process_group.gather("uploads", problem)
                if problem_of_process
            ]:
                raise RunAgain(problems[0])
            with self._changed:
                self._take_missed()

    def suspect_after(self, step: int, why: str) -> str:
        """Moves later checkpoints in the bucket to ``aside/``; completes no more. Process 0.

        Returns:
            Why that has failed for ten minutes; "" if it is done.

        Raises:
            lease.Lost: another run has taken over, which decides.
        """
        self.check()
        began = time.monotonic()
        with self._commits:
            self._stopped = True
        while True:
            try:
                self._lease.check()
                self._remote.store.set_aside_after(step, SUSPECT, why)
                return ""
            except lease.Lost:
                raise
            except _Failures as error:
                problem = f"checkpoints after step {step} in {self.url} are not moved: {error}"
                self._warn(problem)
                if time.monotonic() - began > _GIVE_UP_S:
                    return problem
            time.sleep(_BETWEEN_TRIES_S)

    def close(self) -> None:
        """Uploads the last lines of the files, and releases the lease."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LONGEST_PAUSE_S)
        with self._commits:  # what is still under way must not complete without the lease
            self._stopped = True
        still_uploads = self._thread is not None and self._thread.is_alive()
        if self._files_follow and not self._lease.lost and not still_uploads:
            self._sync_files()
        self._lease.release()

    def _take_missed(self) -> None:
        """Makes what was missed the next to upload; what cannot be uploaded is replaced."""
        saves: dict[str, Save] = {}
        if self._missed:  # of what they replace, the best one may still be the best
            self._missed = {kind: save for save in self._work for kind in save.kinds} | self._missed
        for kind in (*KINDS, BAD_STEP):
            if kind in self._missed:
                save = self._missed[kind]
                kinds = (*(saves[save.data].kinds if save.data in saves else ()), kind)
                saves[save.data] = dataclasses.replace(save, kinds=kinds)
        self._missed, self._skipping = {}, False
        if saves:
            self._work, self._failures = list(saves.values()), 0
            self._sent.begin(again=False)
            self._changed.notify_all()

    def _wait(self, still_alive: Callable[[], None]) -> None:
        announced = time.monotonic() - _ANNOUNCE_S + 2
        with self._changed:
            while self._work:
                self.check()
                still_alive()
                now = time.monotonic()
                if now - announced > _ANNOUNCE_S:
                    announced = now
                    self._say(f"waiting for the upload to {self.url} ({self._progress()})")
                if self._sent.is_stuck():
                    raise RunAgain(
                        f"checkpoint {self._work[0].step} is not in {self.url}, which took nothing "
                        f"new for {now - self._sent.moved_at:.0f} s: fix what the warnings name, "
                        "then resume with --resume latest"
                    )
                self._changed.wait(0.5)
        self.check()  # an upload also ends if another run has taken over

    def _progress(self) -> str:
        step = self._work[0].step if self._work else 0
        return f"checkpoint {step}: {self._sent.mib:.1f} MiB sent"

    def _run(self) -> None:
        try:
            self._upload_until_over()
        except Exception as error:  # without the thread, the run would wait for ten minutes
            with self._changed:
                self._unexpected = error
                self._changed.notify_all()

    def _upload_until_over(self) -> None:
        pause_s = 1.0
        self._sync_files()
        while not self._over.is_set():
            with self._changed:
                if not self._work:
                    self._changed.wait(_FILES_EVERY_S)
                save = self._work[0] if self._work else None
            if save is None:
                if not self._over.is_set():
                    self._sync_files()
                continue
            moved_at = self._sent.moved_at
            self._sent.begin(again=self._failures > 0)
            failed = self._failure_of(save)
            with self._changed:
                if self._work and self._work[0] is save:
                    self._failures += failed
                    if not failed:
                        self._work, self._failures = self._work[1:], 0
                        self._sent.begin(again=False)
                self._changed.notify_all()
            if failed:
                self._over.wait(pause_s)
            moved = not failed or self._sent.moved_at > moved_at
            pause_s = 1.0 if moved else min(2 * pause_s, _LONGEST_PAUSE_S)

    def _failure_of(self, save: Save) -> bool:
        """Tries to upload a checkpoint; returns whether that failed, which is reported."""
        try:
            self._upload(save)
            self._reported.clear()
            return False
        except lease.Lost:
            return False  # the bucket has the checkpoints of another run
        except _Failures as error:
            self._warn(f"checkpoint {save.step} is not uploaded yet: {error}")
            return True

    def _upload(self, save: Save) -> None:
        described = Pointer.parse(save.content, save.step)
        # The index of the arrays is made where they are fetched. Process 0 has its own of the other
        # files that describe them.
        state = f"{pointer.STATE}/"
        index = (f"{state}{pointer.INDEX}", f"{state}{pointer.INDEX_DATA}/")
        files = {
            name: about
            for name, about in described.files.items()
            if not name.startswith(index)
            and (self._first or (name.startswith(state) and "/" in name.removeprefix(state)))
        }
        described = dataclasses.replace(described, files=files)
        stored = self._bucket.sizes(described.data)

        def send(name: str) -> None:
            path, size = f"{described.data}/{name}", described.files[name][0]
            if self._stopped:
                raise lease.Lost("the upload is abandoned")
            if stored.get(path) != size:
                self._bucket.put(path, self.directory / path, self._sent)
            else:
                self._sent(size)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(
                send, sorted(described.files, key=lambda name: -described.files[name][0])
            ):
                pass
        if self._first:
            self._lease.check()
        # A resume on new machines continues these files: none may be older than the checkpoint.
        self._upload_files()
        self._bucket.put(_list_of(described.data, self._process), described.to_json())
        if not self._first:
            return
        described = self._pointer_of_all(described)
        self._lease.check()
        with self._commits:
            if self._stopped:
                return
            store = self._remote.store
            store.commit(save.kinds, save.step, described.to_json())
            store.retain(self._keep, self._every, save.last_equal, self._milestones)
            store.collect(self.in_use())
            if BAD_STEP in save.kinds:
                return
            # On the disk, only this checkpoint stays: the next start here need not fetch it.
            disk = CheckpointStore(Folder(self.directory))
            for kind in save.kinds:
                disk.place.put(pointer.name_of(kind, save.step), described.to_json())
            for name in list(disk.pointers()):
                if disk.folder_of(name) != described.data:
                    disk.place.delete(name)

    def _pointer_of_all(self, described: Pointer) -> Pointer:
        """Waits for the lists of all processes; returns a pointer with the files of all.

        Raises:
            Damaged: a process has uploaded nothing for a minute.
        """
        names = {_list_of(described.data, process) for process in range(self._count)}
        last_total, changed_at = -1, time.monotonic()
        while missing := names - (stored := self._bucket.sizes(described.data)).keys():
            total = sum(stored.values())
            if total != last_total:
                last_total, changed_at = total, time.monotonic()
                self._sent.moved_at = changed_at
            if time.monotonic() - changed_at > _STALLED_S:
                process = min(missing).rpartition("-")[2].partition(".")[0]
                raise Damaged(f"process {process} has not uploaded its files")
            if self._over.wait(1.0) or self._stopped:
                raise lease.Lost("the upload is abandoned")
        files: pointer.FileList = {}
        for name in sorted(names):
            content = self._remote.store.place.get(name)
            files |= Pointer.parse(content or b"", described.step).files
        for name, (size, _) in files.items():
            if stored.get(f"{described.data}/{name}") != size:
                raise Damaged(f"{described.data}/{name} is missing or has another size")
        return dataclasses.replace(described, files=files)

    def _warn(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._say(f"warning: {line}")

    def _sync_files(self) -> None:
        try:
            if self._first:
                self._lease.check()
            self._upload_files()
        except lease.Lost:
            pass  # the bucket has the files of another run
        except _Failures as error:
            self._warn(f"files of the run are not uploaded yet: {error}")

    def _upload_files(self) -> None:
        """Uploads the files that have changed, except those that the disk does not give.

        Samples of steps that were abandoned, which the run has deleted, are deleted there, too.

        Raises:
            InputError, RunAgain: the bucket does not take them.
        """
        for path in self._files_of_run():
            name = path.relative_to(self.directory).as_posix()
            if not self._is_mine(name) or not path.is_file():
                continue
            try:
                self._files.upload(name)
            except FileNotFoundError:  # replaced or removed meanwhile
                continue
            except OSError as error:  # an unreadable file must not stop the uploads of checkpoints
                self._warn(f"files of the run are not uploaded yet: {error}")
        self._files.delete_missing("samples")

    def _files_of_run(self) -> Iterator[Path]:
        def warn(error: OSError) -> None:
            self._warn(f"files of the run are not uploaded yet: {error}")

        for folder, inner, names in os.walk(self.directory, onerror=warn):
            if Path(folder) == self.directory:
                inner[:] = [name for name in inner if name in own_files.FOLDERS]
            yield from (Path(folder, name) for name in names)

    def _is_mine(self, name: str) -> bool:
        number = own_files.process_of(name)
        return own_files.is_own(name) and self._process == (number if number < self._count else 0)


def _tried(action: Callable[[], None]) -> None:
    """Tries what a bucket that does not respond must not end the start for; a later one does it."""
    for _ in range(_FAILURES):
        with contextlib.suppress(InputError, RunAgain):
            action()
            return


def _list_of(data: str, process: int) -> str:
    return f"{data}/files-{process}.json"
