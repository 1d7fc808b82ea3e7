"""Copies a run's directory to a bucket while it trains, and fetches what a resume needs.

With ``--output-dir s3://...``, the run directory is a folder in the cache, and each process has
one of its own, so that hosts need not share a disk. With ``checkpoint.mirror s3://...``, it is the
``--output-dir`` on disk, which all processes share. In both, a checkpoint is complete on disk
before its upload begins. The run, its rollbacks and its next save never wait for the bucket:

- a save that completes during an upload is not uploaded, with a warning; the next one is;
- an upload that fails is tried again until it works, with a warning;
- at the end, the run waits until the last checkpoint is in the bucket.

Measured for 128 MiB beside other work (benchmarks/RESULTS.md): TensorStore's driver for S3 takes 8
to 11 s; a save on disk takes 3 s, and its upload another 5 s, for which the run does not wait.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax

from jaxtrain import config
from jaxtrain.checkpoint import bucket_checkpoints, files, layout, manifest
from jaxtrain.checkpoint import resume as checkpoint_resume
from jaxtrain.checkpoint.bucket_checkpoints import (
    BucketCheckpoints,
    Incomplete,
    Layout,
    Part,
    Stored,
)
from jaxtrain.checkpoint.layout import BEST, CHECKPOINTS, DAMAGED, UNCERTIFIED
from jaxtrain.data import cache
from jaxtrain.distributed import key_value, process_group
from jaxtrain.errors import InputError, Problem, RunAgain
from jaxtrain.storage import bucket as buckets
from jaxtrain.storage import lease, listing
from jaxtrain.storage.atomic import expanded, parse_json, write_whole
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.telemetry import line_files
from jaxtrain.training import run_directory, run_files

_UPLOADING, _FILES_DUE = run_files.UPLOADING, run_files.FILES_DUE
_UNCERTIFIED_DUE = run_files.UNCERTIFIED_DUE
_FILES_EVERY_S = 60.0  # between uploads of metrics, logs and samples that have changed
_LONGEST_PAUSE_S = 30.0  # between tries
_BETWEEN_MOVES_S = 5.0
_ANNOUNCE_S = 30.0
# At the end: a bucket that takes nothing new for this long is not waited for.
_GIVE_UP_S = 600.0
_PROGRESS = "uploading"  # topic of what the parts of other processes that are under way have sent
_PUBLISH_EVERY_S = 5.0
_OF_PROCESS = re.compile(r"(?:\w+[.-](\d+)\.\w+|profile/process-(\d+)/.*)")
_IN_MEMORY_BYTES = 2**25
_FILES_AT_ONCE = 8  # in a fetch: a long run has thousands of small ones

Say = Callable[[str], None]
_Failures = (InputError, RunAgain, Incomplete, OSError, manifest.Unusable)


@dataclasses.dataclass(frozen=True)
class _Upload:
    """A checkpoint to upload.

    Attributes:
        source: hard links of its files.
        folders: where it is to be complete: ``checkpoints``, ``best``, or both.
        step: completed steps.
        part: what this process has of it.
    """

    source: Path
    folders: tuple[str, ...]
    step: int
    part: Part


def url_of(run: config.Run, output: str | None) -> str | None:
    """Returns the URL that the run directory is copied to, if any.

    Args:
        run: the config.
        output: ``--output-dir``.

    Raises:
        InputError: it is not the URL of a folder in a bucket, or is set in two places.
    """
    mirror = run.checkpoint.mirror
    if output is not None and buckets.is_bucket(output):
        if mirror is not None:
            raise InputError(
                Problem(
                    f"checkpoint.mirror={mirror} and --output-dir {output}: set only one of them "
                    "to a bucket",
                    "checkpoint.mirror",
                )
            )
        return buckets.normalized(output, "--output-dir")
    if mirror is None:
        return None
    if output is None:
        raise InputError(
            Problem(
                f"checkpoint.mirror={mirror} requires --output-dir: a resume compares the two",
                "checkpoint.mirror",
            )
        )
    return buckets.normalized(mirror, "checkpoint.mirror", or_disk=False)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Replaces errors of the disk by errors with a fix."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(
            error,
            f"{error.filename or 'the run directory'} cannot be read or written",
            "make it readable and writable",
        ) from error


class Mirror:
    """The copy of a run in a bucket. All processes create one and make the same calls.

    Args:
        bucket: the run's folder.
        directory: the run directory of this process.
        staged: whether the directory is in the cache, and each process has its own.
        say: prints a line.
        expires_s: see :class:`jaxtrain.storage.lease.Lease`.

    Attributes:
        directory: see above.
        own_disk: whether several processes each have a directory of their own.
    """

    def __init__(
        self,
        bucket: Bucket,
        directory: Path,
        *,
        staged: bool,
        say: Say,
        expires_s: float = lease.EXPIRES_S,
    ) -> None:
        self.directory, self._staged = directory, staged
        self._bucket, self._say = bucket, say
        self._process, self._count = jax.process_index(), jax.process_count()
        self._first = self._process == 0
        self.own_disk = staged and self._count > 1
        self._active = self.own_disk or self._first
        self._remote = BucketCheckpoints(bucket, say)
        self._lease = lease.Lease(bucket, say, expires_s)
        self._keep, self._every, self._replays = 1, 1, True
        self._uploads_first: Path | None = None
        self._part: Part | None = None
        self._saves = 0
        self._changed = threading.Condition()
        self._work: list[_Upload] = []
        self._sent = self._total = 0
        self._most_sent, self._moved_at = 0, 0.0
        self._attempt_at = self._attempt_s = 0.0
        self._published_at = 0.0
        self._others: tuple[int, dict[int, str]] = (0, {})
        self._missed: dict[str, Path] = {}
        self._behind = False
        self._commits = threading.Lock()
        self._rejected = False
        self._stored: dict[str, int] = {}  # data folder in the bucket -> step
        self._unexpected: Exception | None = None
        self._said: set[str] = set()
        self._synced: dict[str, tuple[int, int]] = {}
        self._files_sent: dict[str, int] = {}  # bytes, of the upload that is under way
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, run: config.Run, output: str | None, say: Say) -> Self | None:
        """Returns the copy that a run asks for, if any.

        Raises:
            InputError: the URL, the package, or the environment is wrong.
        """
        url = url_of(run, output)
        if url is None:
            return None
        assert output is not None, "url_of() checks it"
        own = buckets.is_bucket(output)
        if own:
            directory = bucket_checkpoints.stage(
                url, cache.root(run.data.cache_dir), jax.process_index()
            )
        else:
            directory = expanded(output).absolute()
        made = cls(Bucket(url).impatient(), directory, staged=own, say=say)
        made._every = run.checkpoint.every
        made._replays = run.loop.replay_every is not None
        return made

    @property
    def shown(self) -> str | Path:
        """Returns the run directory as a user writes it: the URL, or the folder on disk."""
        return self.url if self._staged else self.directory

    @property
    def both(self) -> str:
        """Describes the run directory and its copy."""
        if self._staged:
            return f"{self.url}, local copies in {self.directory}"
        return f"{self.directory}, copied to {self.url}"

    @property
    def url(self) -> str:
        """Returns the URL of the run's folder."""
        return self._bucket.url

    def claim(self) -> None:
        """Makes sure that no other run writes to the bucket.

        Raises:
            RunAgain: a live run does, or the bucket is unavailable; in all processes alike.
            InputError: the bucket does not exist.
        """

        def acquire() -> str:
            self._lease.acquire()
            return ""

        process_group.process_zero_decides(acquire)

    @_explained()
    def fetch(self, resume: str | None, mesh: jax.sharding.Mesh, shard: str) -> None:
        """Makes the run directory have the newest complete checkpoint of disk and bucket.

        Also fetches the best checkpoint, and the metrics, samples and lists of a run that is not on
        this disk.

        Args:
            resume: ``--resume``: None, ``latest`` or a step; the path or URL of another run is
                allowed if the bucket has no checkpoints, and fetches nothing.
            mesh: of the run.
            shard: ``mesh.shard``.

        Raises:
            InputError: the bucket has checkpoints, from which this run would not resume.
            RunAgain: the bucket or the disk is unavailable.
        """
        if self.own_disk:
            parts, held = _layout(mesh, shard)
            save = process_group.process_zero_decides(lambda: self._lease.name)
            own = parts.of_part[self._process]
            self._part = Part(save, parts, self._process, own)
        if self._active and (self._staged or resume is not None):
            self.directory.mkdir(parents=True, exist_ok=True)
            run_directory.take(self.directory, self._say)
        if resume is None:
            process_group.process_zero_decides(self._refuse_existing)
            return
        process_group.process_zero_decides(self._set_aside_due)
        if resume != "latest" and not resume.isdecimal():
            process_group.process_zero_decides(lambda: self._refuse_other(resume))
            return
        only = None if resume == "latest" else int(resume)
        if self.own_disk:
            needs = parts.shards, held[self._process]
            start = self._fetch_parts(only, *needs)
        else:
            needs = 0, ()  # all shards
            start = process_group.process_zero_decides(lambda: self._fetch_all(only))
        if start:
            self._fetch_best(self.directory / start, *needs)
        # The files come with the checkpoint, even if a start was interrupted between the two:
        # otherwise the run would upload metrics that begin at its resumed step.
        due = self.directory / _FILES_DUE
        log = self.directory / line_files.log_name(self._process)
        if self._active and (due.exists() or not log.exists()):
            due.touch()
            self._fetch_files()
            due.unlink()

    def start(self, keep: int, every: int) -> None:
        """Begins to copy, in a thread: first what an earlier start of the run left on disk.

        Args:
            keep: ``checkpoint.keep``.
            every: ``checkpoint.every``.
        """
        self._keep, self._every = keep, every
        if not self._active:
            return
        shutil.rmtree(self.directory / _UPLOADING, ignore_errors=True)
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        first = self._uploads_first or self._missed.pop(BEST, None)
        if first is not None:
            self.begin(first, self.prepare(first), also_best=False)

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

    # The interface of saver.CheckpointMirror.

    def files_of_save(self) -> dict[str, bytes]:
        """Returns name -> content of the file that describes this process's part, if it is one.

        Each save has its own name, which all processes compute. One start can save a step twice, to
        ``best/`` and to ``checkpoints/`` or after a rollback: parts of the two must not be mixed.
        """
        if self._part is None:
            return {}
        self._saves += 1
        name = hashlib.sha256(f"{self._part.save} {self._saves}".encode()).hexdigest()[:12]
        return {bucket_checkpoints.PART: dataclasses.replace(self._part, save=name).to_json()}

    def prepare(self, target: Path) -> str:
        """Returns why a checkpoint cannot be uploaded now; "" if it can, which keeps its files."""
        if not self._active:
            return ""
        with self._changed:
            if self._work:
                return f"{_BUSY} ({self._progress()})"
        try:
            for one in (target, *self._missed_best(target)):
                files.link(one, self._link(one))
        except OSError as error:
            return f"{target} cannot be linked ({error.strerror})"
        return ""

    def begin(self, target: Path, problem: str, *, also_best: bool) -> None:
        """Begins to upload a checkpoint, unless some process cannot."""
        if not self._active:
            return
        folder = target.parent.name
        folders = (folder, BEST) if also_best else (folder,)
        if problem:
            link = self._link(target)
            if all(one.source != link for one in self._work):  # an earlier save of the step
                shutil.rmtree(link, ignore_errors=True)
            self._missed |= dict.fromkeys(folders, target)
            if not self._behind and self._first:
                self._say(
                    f"warning: checkpoint {target.name} is not uploaded to {self.url} ({problem}): "
                    "a later one will be; for more uploads, raise --checkpoint.every"
                )
            self._behind = True
            return
        missed = self._missed_best(target)
        self._missed, self._behind = {}, False
        work = [
            self._upload_of(target, folders),
            *(self._upload_of(one, (BEST,)) for one in missed),
        ]
        with self._changed:
            self._work = [one for one in work if one is not None]
            self._sent, self._total = 0, sum(_bytes(one.source) for one in self._work)
            self._most_sent, self._attempt_s = 0, 0.0
            self._attempt_at = self._moved_at = time.monotonic()
            self._changed.notify_all()

    def finish(self, still_alive: Callable[[], None]) -> None:
        """Waits until the newest checkpoint is in the bucket, with the parts of all processes.

        Raises:
            RunAgain: in all processes, if the bucket took nothing new for ten minutes, or the
                disk of one is full.
        """
        wrong = ""
        self._wait_for_all(still_alive)
        for _ in range(2):  # the newest, then the best, unless they are uploaded together
            best = self._missed.get(BEST)
            target = self._missed.pop(CHECKPOINTS, None)
            if target is None:
                target = best and self.directory / BEST / best.name
                self._missed = {}
            elif target == best:
                del self._missed[BEST]
            if target is not None and target.exists():
                if problem := self.prepare(target):
                    wrong = (
                        f"checkpoint {target.name} is complete in {self.directory}, but not in "
                        f"{self.url} ({problem}): free space on that disk, then resume on this "
                        "machine with --resume latest"
                    )
                else:
                    self.begin(target, "", also_best=target == best)
            self._wait_for_all(still_alive, wrong)

    def _wait_for_all(self, still_alive: Callable[[], None], wrong: str = "") -> None:
        """Waits until no process uploads anything.

        A process that ended before the others would look lost to them. One that began another
        upload would lose its files: process 0 deletes what no manifest lists after its commit.
        """
        try:
            if self._active and not wrong:
                self._wait(still_alive)
        except RunAgain as error:
            wrong = str(error)
        problems = [one for one in process_group.gather("uploads", wrong) if one]
        if problems:
            raise RunAgain(problems[0])

    def set_aside_after(self, step: int) -> str:
        """Moves later checkpoints in the bucket to ``uncertified/``; completes no more. Process 0.

        If the process is killed meanwhile, the next start does it; before the bucket has taken
        the list of them, only one in this directory.

        Returns:
            Why that has failed for ten minutes; "" if it is done.

        Raises:
            lease.Lost: another run has taken over.
        """
        self.check()
        began, problem = time.monotonic(), ""
        with self._commits:
            self._rejected = True
        # By save: the same steps may be saved again, with right results.
        due = json.dumps([data for data, saved in self._stored.items() if saved > step])
        while not problem or time.monotonic() - began < _GIVE_UP_S:
            try:
                write_whole(self.directory / _UNCERTIFIED_DUE, due)
                self._lease.check()
                self._bucket.put(_UNCERTIFIED_DUE, due.encode())
                return self._set_aside_due()
            except lease.Lost:  # the other run decides
                (self.directory / _UNCERTIFIED_DUE).unlink(missing_ok=True)
                raise
            except _Failures as error:
                problem = str(error)
                self._warn(f"checkpoints after step {step} are not moved yet: {problem}")
            time.sleep(_BETWEEN_MOVES_S)
        return problem

    def _set_aside_due(self) -> str:
        """Moves the saves that a start has rejected, and notes the others. Process 0."""
        here, found = self.directory / _UNCERTIFIED_DUE, self._bucket.get(_UNCERTIFIED_DUE)
        lists = [here.read_bytes()] if here.exists() else []
        lists += [found.data] if found is not None else []
        try:
            due = {str(data) for one in lists for data in parse_json(one)}
        except (ValueError, TypeError):
            raise InputError(
                f"{here} or {self.url}/{_UNCERTIFIED_DUE} is damaged: the newest checkpoints may "
                "be wrong; delete those that you do not trust, then this list, and resume"
            ) from None
        if due:
            self._remote.set_aside_uncertified(due)
        if lists:
            self._drop_due()
        for folder in (CHECKPOINTS, BEST) if self._replays else ():
            saves = self._remote.saves(folder)
            self._stored |= {data: step for step, data in saves.items() if data}
        return ""

    def _drop_due(self) -> None:
        self._bucket.delete([_UNCERTIFIED_DUE])
        (self.directory / _UNCERTIFIED_DUE).unlink(missing_ok=True)

    def close(self) -> None:
        """Copies the last lines of the files, and releases the lease."""
        if self._thread is not None:
            self._over.set()
            with self._changed:
                self._changed.notify_all()
            self._thread.join(_LONGEST_PAUSE_S)
            with self._commits:  # what is still under way must not complete without the lease
                self._rejected = True
            if not self._lease.lost:
                self._sync_files()
            shutil.rmtree(self.directory / _UPLOADING, ignore_errors=True)
        self._lease.release()

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
                if self._is_stuck():
                    raise RunAgain(
                        f"checkpoint {self._work[0].step} is complete in {self.directory}, but not "
                        f"in {self.url}, which took nothing new for {now - self._moved_at:.0f} s: "
                        "fix what the warnings name, then resume on this machine with --resume "
                        "latest"
                    )
                self._changed.wait(0.5)
        self.check()  # an upload also ends if another run has taken over

    def _is_stuck(self) -> bool:
        """Whether the bucket takes nothing new for too long, from any process that this waits for.

        An attempt after a failure may first take as long as the one that came furthest.
        """
        return time.monotonic() - self._moved_at > _GIVE_UP_S + self._attempt_s

    def _progress(self) -> str:
        step = self._work[0].step if self._work else 0
        sent = min(self._sent, self._total)  # files of the run follow
        return f"checkpoint {step}: {sent / 2**20:.1f} of {self._total / 2**20:.1f} MiB"

    def _missed_best(self, target: Path) -> list[Path]:
        best = self._missed.get(BEST)
        if best is None:
            return []
        kept = self.directory / BEST / best.name
        return [kept] if kept != target and kept.exists() else []

    def _link(self, target: Path) -> Path:
        place = self.directory / _UPLOADING / target.parent.name
        place.mkdir(parents=True, exist_ok=True)
        return place / target.name

    def _upload_of(self, target: Path, folders: tuple[str, ...]) -> _Upload | None:
        source = self._link(target)
        try:
            return _Upload(source, folders, int(target.name), bucket_checkpoints.part_of(source))
        except (Incomplete, OSError) as error:
            self._say(f"warning: checkpoint {target} is not uploaded ({error})")
            return None

    def _run(self) -> None:
        try:
            self._upload_until_over()
        except Exception as error:  # without the thread, the run would wait for ten minutes
            with self._changed:
                self._unexpected = error
                self._changed.notify_all()

    def _upload_until_over(self) -> None:
        """Uploads in a thread until the run is over."""
        while not self._over.is_set():
            with self._changed:
                if not self._work:
                    self._changed.wait(_FILES_EVERY_S)
                work = self._work
            for upload in work:
                self._try_until_done(upload)
                shutil.rmtree(upload.source, ignore_errors=True)
            if not work and not self._over.is_set():
                self._sync_files()
            with self._changed:
                if work:
                    self._work = []
                self._changed.notify_all()

    def _try_until_done(self, upload: _Upload) -> None:
        pause_s = 1.0
        self._files_sent = {}
        with self._changed:
            self._most_sent, self._attempt_s, self._moved_at = 0, 0.0, time.monotonic()
        self._publish()
        while not (self._over.is_set() or self._lease.lost):
            moved_at = self._moved_at
            try:
                self._upload(upload)
                self._said.clear()
                return
            except lease.Lost:
                return
            except manifest.Unusable as error:
                self._say(f"warning: checkpoint {upload.step} is not uploaded ({error})")
                return
            except _Failures as error:
                self._warn(f"checkpoint {upload.step} is not uploaded yet: {error}")
            self._over.wait(pause_s)
            pause_s = 1.0 if self._moved_at > moved_at else min(2 * pause_s, _LONGEST_PAUSE_S)

    def _upload(self, upload: _Upload) -> None:
        part, data = upload.part, bucket_checkpoints.data_of(upload.step, upload.part)
        # Before the files: on another machine, a resume reads the copy, which is not older.
        certified = layout.certified_step(self.directory)
        with self._changed:
            self._sent, self._attempt_at = sum(self._files_sent.values()), time.monotonic()
        if part.number in part.layout.complete():
            self._remote.upload(upload.source, data, part.number or 0, self._count_checkpoint)
        if self._first:
            self._lease.check()
        # A resume on new machines continues these files: none may be older than the checkpoint.
        self._upload_files()
        if not self._first:
            self._remote.mark_files(data, self._process)
            return
        others = range(1, self._count) if self.own_disk else ()
        while True:
            missing, there = self._remote.missing(data, part.layout, others)
            if not missing:
                break
            self._look_at_others(there)
            if self._is_stuck():
                raise Incomplete(f"process {missing[0]} has not uploaded its part and its files")
            if self._over.wait(1.0):
                return
        self._lease.check()
        with self._commits:
            if self._rejected:
                return
            superseded = (CHECKPOINTS, BEST) if CHECKPOINTS in upload.folders else (BEST,)
            self._remote.supersede(upload.step, superseded)
            self._stored[data] = upload.step
            for folder in upload.folders:
                self._remote.commit(folder, upload.step, data, part.layout)
                kept = (self._keep, self._every, certified) if folder == CHECKPOINTS else (1,)
                self._remote.delete_oldest(folder, *kept)
            uploading = [bucket_checkpoints.data_of(one.step, one.part) for one in self._work]
            self._remote.collect(uploading)

    def _count_checkpoint(self, count: int) -> None:
        if self._rejected:  # otherwise the process could not exit before its files are sent
            raise lease.Lost("the upload is abandoned")
        self._count_sent(count)

    def _count_sent(self, count: int) -> None:
        with self._changed:
            self._sent += count
            if self._sent > self._most_sent:
                self._most_sent, self._moved_at = self._sent, time.monotonic()
                self._attempt_s = self._moved_at - self._attempt_at
        if time.monotonic() - self._published_at > _PUBLISH_EVERY_S:
            self._publish()

    def _publish(self) -> None:
        """Lets process 0, which waits for all parts, know how far this one is."""
        store = key_value.of_run()
        if self._first or not self.own_disk or store.client is None:
            return
        self._published_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the service is gone, which ends the run anyway
            store.publish(_PROGRESS, f"{self._most_sent} {self._attempt_s:.1f}", again=True)

    def _look_at_others(self, there: int) -> None:
        """Counts what other processes upload as progress of the checkpoint.

        Args:
            there: bytes of all files of the checkpoint that are in the bucket.
        """
        store, sent = key_value.of_run(), self._others[1]
        if store.client is not None:
            with contextlib.suppress(RuntimeError):
                sent = store.published(_PROGRESS)
        with self._changed:
            if (there, sent) != self._others:
                self._others, self._moved_at = (there, sent), time.monotonic()
            attempts = [float(text.split()[1]) for text in sent.values()]
            self._attempt_s = max([self._attempt_s, *attempts])

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(f"warning: {line}")

    def _fetch_best(self, start: Path, shards: int, wanted: tuple[int, ...]) -> None:
        """Fetches the best checkpoint so far, or plans its upload if the bucket lacks it.

        Without it on disk, the next validation would count as the best, and replace it.

        Args:
            start: the checkpoint that the run resumes from, which names the best one.
            shards: see :func:`_parts_of`.
            wanted: see :func:`_parts_of`.
        """
        path, own = None, ""
        if self._active and (best := layout.read_meta(start)["best"]) is not None:
            path = self.directory / BEST / str(best["step"])
            if path.name == start.name and not layout.is_complete(path):
                files.link(start, path)  # the run was killed before it was linked
            with contextlib.suppress(Incomplete):
                part = bucket_checkpoints.part_of(path) if layout.is_complete(path) else None
                if part is not None and (not self.own_disk or part.number == self._process):
                    own = part.save
        held = process_group.gather("best", own)
        stored = process_group.process_zero_decides(
            lambda: "yes" if path and int(path.name) in self._remote.steps(BEST) else ""
        )
        if path is None:
            return
        if not stored and own and (not self.own_disk or len(set(held)) == 1):
            self._missed = {BEST: path}
        if stored and not layout.is_complete(path):
            try:
                found = self._remote.read(BEST, int(path.name))
                self._get(found, _parts_of(found, shards, wanted, self._process), BEST)
            except Incomplete as why:
                if self._first:
                    self._remote.set_aside(BEST, int(path.name), str(why))
                else:
                    self._say(f"warning: {self.url}/{BEST}/{path.name} cannot be used: {why}")

    def _refuse_existing(self) -> str:
        if there := self._remote.steps():
            raise InputError(
                f"{self.url} already contains checkpoints (newest: {there[-1]}): resume with "
                "--resume latest, or choose another folder"
            )
        self._drop_due()  # of an earlier run
        return ""

    def _refuse_other(self, resume: str) -> str:
        """Refuses another run, as :func:`jaxtrain.checkpoint.resume.check_directory` does."""
        if not buckets.is_bucket(resume):
            path, own = expanded(resume).resolve(), self.directory.resolve()
            if own in (path, *path.parents):
                return ""
        if there := self._remote.steps():
            raise InputError(
                f"{self.url} already contains checkpoints (newest: {there[-1]}), and --resume "
                f"{resume} is another run: use --resume latest, or choose another folder"
            )
        return ""

    def _fetch_all(self, only: int | None) -> str:
        """Fetches a complete checkpoint if the bucket has a newer one than the disk. Process 0.

        Returns:
            The checkpoint to resume from, as a path in the run directory; "" if there is none.
        """
        for folder in (CHECKPOINTS, BEST):
            files.give_back(self.directory / folder)
        on_disk = self._on_disk(only)
        stored = [(CHECKPOINTS, step) for step in self._remote.steps()[::-1]]
        if only is not None or on_disk is None:
            stored += [(BEST, step) for step in self._remote.steps(BEST)]
        damaged: dict[tuple[str, int], str] = {}
        first: dict[str, tuple[str, int]] = {}  # of those that list the same files
        fetched = ""
        for folder, step in stored:
            if only in (None, step):
                try:
                    found = self._remote.read(folder, step)
                    if on_disk is not None and not self._is_newer(found, on_disk):
                        break
                    if (same := first.setdefault(found.data, (folder, step))) in damaged:
                        raise Incomplete(damaged[same])
                    (self.directory / _FILES_DUE).touch()
                    self._get(found, found.layout.complete(), folder)
                    fetched = f"{folder}/{step}"
                    break
                except Incomplete as why:
                    damaged[folder, step] = str(why)
        if not fetched and on_disk is None:
            self._refuse_loss(only, damaged)
        for (folder, step), wrong in damaged.items():
            self._remote.set_aside(folder, step, wrong)
        if fetched and on_disk is not None and int(on_disk.name) >= found.step:
            for folder in (CHECKPOINTS, BEST):
                files.supersede(self.directory / folder, found.step, self._say)
        if fetched or on_disk is None:
            return fetched
        place = on_disk.parent.name, int(on_disk.name)
        if (place not in stored or place in damaged) and place[0] == CHECKPOINTS:
            self._uploads_first = on_disk
        return f"{on_disk.parent.name}/{on_disk.name}"

    def _is_newer(self, found: Stored, on_disk: Path) -> bool:
        """Whether a checkpoint in the bucket counts as newer than one on this disk.

        Not only by its step: if another machine has resumed from an earlier one and saved since
        then, what is on this disk is abandoned.
        """
        if found.step > int(on_disk.name):
            return True
        newer = found.saved > manifest.read(on_disk).saved
        if newer:
            self._say(
                f"warning: another machine has resumed {self.url} from an earlier step and saved "
                f"checkpoint {found.step} after {on_disk}, which is not used"
            )
        return newer

    def _refuse_loss(self, only: int | None, damaged: Mapping[tuple[str, int], str]) -> str:
        """Refuses to start fresh if checkpoints exist but none is intact, as a run on disk does.

        Args:
            only: the step to resume from; None for the newest.
            damaged: folder and step -> the damage of a checkpoint in the bucket.

        Raises:
            InputError: the step is missing, or more steps would be lost than between two saves.
        """
        there = {name: self._remote.steps(name) for name in (CHECKPOINTS, BEST)}
        wrong = next((f" ({name}/{step}: {why})" for (name, step), why in damaged.items()), "")
        if only is not None:
            raise InputError(
                f"--resume {only}: {self.url} has no complete checkpoint {only}{wrong}; "
                f"{layout.others(there, only)}; pass one of these steps, or --resume latest"
            )
        places = [f"{place}/{name}" for place in (DAMAGED, UNCERTIFIED) for name in there]
        aside = map(self._remote.steps, places)
        if max((step for steps in (*there.values(), *aside) for step in steps), default=0) > (
            self._every
        ):
            raise InputError(
                f"--resume latest: no checkpoint in {self.url} can be used{wrong}, and more than "
                f"{self._every} steps would be lost: to start from scratch, choose another "
                "--output-dir"
            )
        return ""

    def _on_disk(self, only: int | None) -> Path | None:
        """Returns the intact checkpoint that a resume would use without the bucket."""
        if only is None:
            return checkpoint_resume.latest_of(self.directory, 0).start
        for folder in (CHECKPOINTS, BEST):
            path = self.directory / folder / str(only)
            if path.exists() and not manifest.verify(path):
                return path
        return None

    def _get(self, found: Stored, parts: list[int], folder: str) -> None:
        size = sum(count for count, _ in found.of_parts(parts).values())
        which = "" if len(found.layout.complete()) == 1 else f", parts {', '.join(map(str, parts))}"
        best = "best " if folder == BEST else ""
        target = self.directory / folder / str(found.step)
        if target.exists() and (wrong := manifest.verify(target)):
            self._say(f"warning: checkpoint {target} is damaged ({wrong}): fetching it again")
        self._say(
            f"fetching {best}checkpoint {found.step} from {self.url} "
            f"({size / 2**20:.1f} MiB{which})"
        )
        self._remote.fetch(found, parts, self.directory, target)

    def _fetch_parts(self, only: int | None, shards: int, wanted: tuple[int, ...]) -> str:
        """Makes each process have its part of the same checkpoint, the newest that all can have.

        Returns:
            Its path in the run directory; "" if there is none.
        """
        have, unusable = self._parts_on_disk(shards, wanted)
        gathered = process_group.gather("unusable", json.dumps(unusable))
        damaged: dict[tuple[str, int], str] = {}
        for _ in range(1000):  # each time, a checkpoint turned out to be damaged
            own = {step: (one.save, one.number, fits) for step, (one, fits) in have.items()}
            everywhere = [
                {int(step): tuple(one) for step, one in json.loads(text).items()}
                for text in process_group.gather("parts", json.dumps(own))
            ]
            decision = process_group.process_zero_decides(
                functools.partial(self._decide, everywhere, only)
            )
            if not decision:
                self._say_unusable(gathered, -1, only)
                process_group.process_zero_decides(
                    functools.partial(self._refuse_loss, only, damaged)
                )
                self._start_fresh()
                return ""
            how, folder, step = decision.split()
            wrong = self._make_there(how, folder, int(step), have, shards, wanted)
            failed = [one for one in process_group.gather("fetched", wrong) if one]
            if how == "upload":
                if failed:
                    self._say(f"warning: checkpoint {step} cannot be used: {failed[0]}")
                self._commit(int(step), have, failed)
                continue
            if not failed:
                self._uploads_first = self.directory / CHECKPOINTS / step if how == "disk" else None
                break
            have.pop(int(step), None)
            self._say(f"warning: checkpoint {step} cannot be used: {failed[0]}")
            if how == "bucket":
                damaged[folder, int(step)] = failed[0]
            if how == "bucket" and self._first:
                self._remote.set_aside(folder, int(step), failed[0])
        self._say_unusable(gathered, int(step), only)
        for one in (CHECKPOINTS, BEST):  # later ones, which other processes lack
            files.supersede(self.directory / one, int(step), self._say)
        return f"{folder}/{step}"

    def _start_fresh(self) -> None:
        """Moves aside the first checkpoint that some process lacks, if the bucket has none.

        Otherwise some processes would resume from them and others start from scratch. After more
        steps they stay, and the run refuses to start (:func:`jaxtrain.checkpoint.resume.choose`).
        """
        folders = [self.directory / folder for folder in (CHECKPOINTS, BEST)]
        own = max((step for folder in folders for step in layout.numbered(folder)), default=0)
        if max(map(int, process_group.gather("newest", str(own)))) <= self._every:
            for folder in folders:
                files.supersede(folder, -1, self._say)

    def _say_unusable(self, gathered: list[str], step: int, only: int | None) -> None:
        """Reports later checkpoints than the chosen one that are incomplete on some disk."""
        wrong: dict[int, str] = {}
        for process, text in enumerate(gathered):
            for number, why in json.loads(text).items():
                wrong.setdefault(int(number), f"process {process}: {why}")
        for number in sorted(wrong):
            if number > step and only in (None, number):
                self._say(f"warning: checkpoint {number} cannot be used: {wrong[number]}")

    def _parts_on_disk(
        self, shards: int, wanted: tuple[int, ...]
    ) -> tuple[dict[int, tuple[Part, bool]], dict[int, str]]:
        """Returns what this disk has of each checkpoint.

        Returns:
            Step -> its part, and whether that is all this process needs; step -> why it is none.
        """
        found, unusable = {}, {}
        for folder in (CHECKPOINTS, BEST):
            files.give_back(self.directory / folder)
        for step in layout.numbered(self.directory / CHECKPOINTS):
            path = self.directory / CHECKPOINTS / str(step)
            if wrong := layout.missing(path):
                unusable[step] = wrong
                continue
            try:
                part = bucket_checkpoints.part_of(path)
            except Incomplete as why:
                unusable[step] = str(why)
                continue
            found[step] = part, part.has(shards, wanted)
        return found, unusable

    def _decide(self, everywhere: list[dict[int, Any]], only: int | None) -> str:
        """Returns where to get a checkpoint from, its folder and step. Process 0.

        Returns:
            Such as ``bucket checkpoints 4``; "" if there is none.
        """
        stored = set(self._remote.steps())
        on_disk, to_upload = set(), set()
        for step in set().union(*everywhere):
            held = [own.get(step) for own in everywhere]
            saves = {one[0] for one in held if one}
            if len(saves) == 1 and all(one and one[2] for one in held):
                on_disk.add(step)
            elif len(saves) == 1 and step not in stored:
                path = self.directory / CHECKPOINTS / str(step)
                part = bucket_checkpoints.part_of(path) if held[0] else None
                numbers = {one[1] for one in held if one}
                if part is not None and numbers.issuperset(part.layout.complete()):
                    to_upload.add(step)
        able = [one for one in stored | on_disk | to_upload if only in (None, one)]
        if not able:
            return f"bucket {BEST} {only}" if only in self._remote.steps(BEST) else ""
        step = max(able)
        kept = max(stored.intersection(able), default=step)
        with contextlib.suppress(Incomplete, manifest.Unusable):
            path = self.directory / CHECKPOINTS / str(step)
            if kept < step and self._is_newer(self._remote.read(CHECKPOINTS, kept), path):
                step = kept
        how = "bucket" if step in stored else "disk" if step in on_disk else "upload"
        return f"{how} {CHECKPOINTS} {step}"

    def _make_there(
        self,
        how: str,
        folder: str,
        step: int,
        have: dict[int, Any],
        shards: int,
        wanted: tuple[int, ...],
    ) -> str:
        """Carries out a decision in this process; returns why it cannot."""
        path = self.directory / folder / str(step)
        part, fits = have.get(step, (None, False))
        try:
            if how == "upload":
                if part is not None and part.number is not None:
                    wrong = manifest.verify(path)
                    if wrong:
                        return wrong
                    data = bucket_checkpoints.data_of(step, part)
                    self._remote.upload(path, data, part.number, lambda count: None)
                return ""
            if how == "disk":
                return manifest.verify(path)
            found = self._remote.read(folder, step)
            same = part is not None and bucket_checkpoints.data_of(step, part) == found.data
            if same and fits and not manifest.verify(path):
                return ""
            (self.directory / _FILES_DUE).touch()
            self._get(found, _parts_of(found, shards, wanted, self._process), folder)
            have[step] = bucket_checkpoints.part_of(path), True
            return ""
        except Incomplete as why:
            return str(why)

    def _commit(self, step: int, have: dict[int, Any], failed: list[str]) -> None:
        """Completes a checkpoint that all processes have uploaded, or forgets it."""

        def commit() -> str:
            if not failed:
                part = have[step][0]
                try:
                    data = bucket_checkpoints.data_of(step, part)
                    self._remote.commit(CHECKPOINTS, step, data, part.layout)
                    return "done"
                except Incomplete:
                    pass
            return ""

        if not process_group.process_zero_decides(commit):
            have.pop(step, None)

    def _fetch_files(self) -> None:
        """Fetches metrics, samples, lists and logs, which the run continues."""
        found = {
            name: version
            for name, version in self._bucket.versions().items()
            if self._is_file_of_run(name) and listing.is_inside(name)
        }
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            for _ in pool.map(self._fetch_file, found, found.values()):
                pass

    def _fetch_file(self, name: str, version: tuple[int, str]) -> None:
        path = self.directory / name
        for folder in path.relative_to(self.directory).parents:
            if (self.directory / folder).is_symlink() and folder != Path():
                raise InputError(
                    f"the run directory {self.directory} contains a symbolic link, {folder}, "
                    f"and a run must not write outside its directory: remove the link"
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.partial")
        beside.unlink(missing_ok=True)
        if self._bucket.download(name, beside, version=version) is not None:
            beside.replace(path)
            self._synced[name] = _state(path)

    def _sync_files(self) -> None:
        """Uploads the files that have changed; failures are tried again the next time."""
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

        Raises:
            InputError, RunAgain: the bucket does not take them.
        """
        for path in self._files_of_run():
            name = path.relative_to(self.directory).as_posix()
            try:
                if not self._is_file_of_run(name) or path.is_symlink() or not path.is_file():
                    continue
                state = _state(path)
                if self._synced.get(name) != state:
                    small = state[0] <= _IN_MEMORY_BYTES  # a file that grows is read once
                    content = path.read_bytes() if small else path
                    # The log of a failing upload grows, which does not count as progress.
                    again = name in self._files_sent
                    self._bucket.put(name, content, _ignore if again else self._count_sent)
                    self._files_sent.setdefault(name, state[0])
                    self._synced[name] = state
            except OSError as error:  # an unreadable file must not stop the uploads of checkpoints
                self._warn(f"files of the run are not uploaded yet: {error}")

    def _files_of_run(self) -> Iterator[Path]:
        """Yields the files in the run directory, except below the folders of checkpoints.

        Saves rename and delete folders there at any time.
        """

        def warn(error: OSError) -> None:
            self._warn(f"files of the run are not uploaded yet: {error}")

        for folder, inner, names in os.walk(self.directory, onerror=warn):
            if Path(folder) == self.directory:
                inner[:] = filter(run_files.is_own, inner)
            yield from (Path(folder, name) for name in names)

    def _is_file_of_run(self, name: str) -> bool:
        """Whether this process copies a file of the run directory."""
        if not run_files.is_own(name):
            return False
        if not self.own_disk:
            return True
        match = _OF_PROCESS.fullmatch(name)
        number = int(match[1] or match[2]) if match else 0
        return self._process == (number if number < self._count else 0)


_BUSY = "an upload is still running"


def _layout(mesh: jax.sharding.Mesh, shard: str) -> tuple[Layout, list[tuple[int, ...]]]:
    """Returns which shards each process saves, and which ones its devices have.

    They differ if a process has shards of several replicas: it saves those of its first device's
    (Orbax, ``get_replica_slices``).
    """
    count = jax.process_count()
    if shard == "none" or mesh.shape["fsdp"] == 1:
        return Layout(1, ((0,),) * count), [(0,)] * count
    saved: list[set[int]] = [set() for _ in range(count)]
    held: list[set[int]] = [set() for _ in range(count)]
    replica: dict[int, int] = {}
    for data, row in enumerate(mesh.devices):
        for number, device in enumerate(row):
            process = device.process_index
            held[process].add(number)
            if replica.setdefault(process, data) == data:
                saved[process].add(number)
    found = tuple(tuple(sorted(one)) for one in saved)
    return Layout(mesh.shape["fsdp"], found), [tuple(sorted(one)) for one in held]


def _parts_of(found: Stored, shards: int, wanted: tuple[int, ...], process: int) -> list[int]:
    """Returns the parts of a checkpoint that a process needs.

    Args:
        found: the checkpoint.
        shards: number of pieces that this run divides arrays into. If the checkpoint has another
            number, all its shards are needed.
        wanted: numbers of those that the process needs.
        process: its number.
    """
    needed = wanted if found.layout.shards == shards else range(found.layout.shards)
    return found.layout.parts_with(needed, first=process)


def _state(file: Path) -> tuple[int, int]:
    """Returns what changes with the content of a file."""
    about = file.stat()
    return about.st_size, about.st_mtime_ns


def _ignore(count: int) -> None:
    pass


def _bytes(checkpoint: Path) -> int:
    try:
        return manifest.read(checkpoint).size()
    except (manifest.Unusable, OSError):
        return 0
