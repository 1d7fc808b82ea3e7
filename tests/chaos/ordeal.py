"""Runs real training to its end while injecting faults."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import verdict as verdicts
from chaos.faults import RESTARTING, RUNNING, Fault, Plan
from chaos.isolation import Disk, clear_shared_memory, shared_memory
from chaos.launched import Launched
from chaos.striking import Stored, Striker
from chaos.undisturbed import EVAL_EVERY, STEPS, Undisturbed, arguments
from chaos.watch import PHASES, Watch
from storage.bucket_server import BUCKET, Server

from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.storage import lease
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.file_copies import FileCopies

_POLL_S = 0.004
# Looking at all processes costs more than looking at two files.
_LOOK_AT_PROCESSES_S = 0.05
# More than the 300 s that processes wait for each other at a start (cluster_env.PATIENCE_S): if
# one is stopped during that wait, the others wait that long (seed 2302012). Later, the runtime
# gives up on a silent process after 100 s.
STUCK_S = 400.0
# Time for the last processes to end after their launcher.
_GRACE_S = 5.0
# Launchers give up after five restarts without a new checkpoint: never cause more than this.
_MOST_IN_VAIN = 2
# Saves and validations occur more often; after this many steps, inject the fault anyway.
_UNSEEN_STEPS = 2 * EVAL_EVERY
_KILLING = ("kill-all", "kill-tree", "damage-live", "damage-rest")
_DOWN = ("kill-tree", "term-launcher", "term-tree", "damage-rest")  # the launcher itself ends


@dataclass
class Hit:
    """A fault that struck.

    Attributes:
        step: newest recorded step at that moment.
        at: time on the monotonic clock.
        starts: how often jaxtrain had started.
        alone: whether the run had recovered from all earlier faults.
        recovered_s: seconds until a later step was recorded; None if none was, before the end.
    """

    fault: Fault
    done: str
    phase: str
    step: int
    at: float
    starts: int
    alone: bool
    recovered_s: float | None = None


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        launches: starts of the launcher; each but the first follows a signal that ended it.
        starts: starts of jaxtrain, by the launcher.
    """

    plan: Plan
    hits: list[Hit] = field(default_factory=list)
    verdict: verdicts.Verdict = field(default_factory=verdicts.Verdict)
    launches: int = 0
    starts: int = 0
    seconds: float = 0.0

    def to_json(self, undisturbed_s: float) -> dict[str, Any]:
        """Returns one line of the results."""
        return {
            "seed": self.plan.seed,
            "processes": self.plan.processes,
            "workers": self.plan.workers,
            "faults": [
                {
                    "kind": hit.fault.kind,
                    "moment": hit.fault.moment,
                    "phase": hit.phase,
                    "step": hit.step,
                    "done": hit.done,
                    "recovered_s": None if hit.recovered_s is None else round(hit.recovered_s, 2),
                }
                for hit in self.hits
            ],
            "planned": len(self.plan.faults),
            "lost": self.verdict.lost,
            "repeated": self.verdict.repeated,
            "problems": self.verdict.problems,
            "launches": self.launches,
            "starts": self.starts,
            "seconds": round(self.seconds, 1),
            "lost_s": round(self.seconds - undisturbed_s, 1),
        }


class Ordeal:
    """Executes a plan.

    Args:
        place: an empty folder for the run and its caches.
        server: keep the run in its bucket, with a disk of its own for each process, some of which
            are lost while the run is down.
    """

    def __init__(
        self,
        plan: Plan,
        place: Path,
        undisturbed: Undisturbed,
        variables: dict[str, str],
        server: Server | None = None,
    ) -> None:
        self._plan, self._place, self._undisturbed = plan, place, undisturbed
        self._server = server
        self._outcome = Outcome(plan)
        self._problems = self._outcome.verdict.problems
        self._disk = Disk(place / "disk") if _fills(plan) else None
        on_disk = self._disk.directory if self._disk else place
        cache = (on_disk if server else place) / "cache"
        self._variables = variables | {"JAXTRAIN_CACHE": str(cache)}
        self._output = str(on_disk / "run")
        self._directory = on_disk / "run"
        if server is not None:
            self._output = f"s3://{BUCKET}/{plan.seed}-{plan.processes}"
            self._directory = remote.stage(self._output, cache)
        self._watch = Watch(self._directory, STEPS, EVAL_EVERY)
        self._stored = None
        if server is not None:  # its checkpoints count, not those in the caches
            run = self._output.rpartition("/")[2]
            self._stored = Stored(server, run, place / "damaged")
        self._striker = Striker(self._watch, self._disk, self._stored)
        self._pids: set[int] = set()  # of process 0, one per start
        self._known: set[int] = set()  # the processes at the last fault
        self._looked_at, self._moved_at, self._size = 0.0, 0.0, (0, 0)
        self._waits_for_down: Fault | None = None
        self._silent = 0  # starts in the log before the newest process 0
        self._in_vain, self._newest = 0, 0
        self._copies: list[Path] = []
        self._over = False
        clear_shared_memory()
        self._launched = self._launch()

    def run(self) -> Outcome:
        """Executes the run and returns its result."""
        began = time.monotonic()
        try:
            for fault in self._plan.faults:
                if not self._reach(fault) or not self._strike(fault):
                    break
            while not self._over:
                self._poll()
            self._outcome.seconds = time.monotonic() - began
            self._outcome.starts = len(self._pids)
            self._judge()
        finally:
            self._launched.close()
            if self._disk:
                if self._problems:  # keep the evidence
                    shutil.copytree(self._directory, self._place / "run", dirs_exist_ok=True)
                self._disk.close()
        return self._outcome

    def _launch(self) -> Launched:
        self._outcome.launches += 1
        self._moved_at = time.monotonic()
        flags = arguments(self._plan.processes, self._plan.workers, self._output)
        mark = f"{self._plan.seed}-{self._plan.processes}"
        return Launched(self._plan.processes, flags, self._place, mark, self._variables)

    def _poll(self) -> None:
        """Polls the run once, ends temporary faults, and handles the end of the launcher."""
        time.sleep(_POLL_S)
        now = time.monotonic()
        self._watch.look()
        for hit in self._outcome.hits:
            ended = hit.fault.kind in RESTARTING
            moves = not ended or (self._watch.starts > hit.starts and self._watch.steps_again())
            if hit.recovered_s is None and moves and self._watch.step > hit.step:
                hit.recovered_s = now - hit.at
                self._expect_saved(hit)
        if self._striker.about_to_be_freed():
            self._copy_newest()
        self._striker.take_back()
        if now - self._looked_at > _LOOK_AT_PROCESSES_S:
            self._looked_at = now
            self._look_at_processes()
        code = self._launched.code()
        if code is not None:
            self._ended(code)
        elif now - self._moved_at > STUCK_S:
            phase, tail = self._watch.phase(), self._watch.log_tail()
            self._problems.append(f"stuck for {STUCK_S:g} s in phase {phase!r}:\n{tail}")
            self._over = True

    def _look_at_processes(self) -> None:
        pid = self._launched.training().get(0)
        if pid is not None and pid not in self._pids:
            self._in_vain += bool(self._pids)
            self._pids.add(pid)
            self._silent = self._watch.starts
            self._moved_at = time.monotonic()
        newest = max(self._watch.complete(), default=0)
        if newest != self._newest:
            self._newest, self._in_vain = newest, 0
        if self._watch.size() != self._size:
            self._size, self._moved_at = self._watch.size(), time.monotonic()

    def _ended(self, code: int) -> None:
        """Handles the end of the launcher: a signal, the end of the run, or a failure."""
        fault, self._waits_for_down = self._waits_for_down, None
        if code == 0:
            self._over = True
            return
        if fault is None:
            self._problems.append(
                f"the launcher ended with {code}: a manual step is needed\n{self._launcher_tail()}"
            )
            self._over = True
            return
        if fault.kind.startswith("term") and code != 75:
            self._problems.append(f"SIGTERM ended the launcher with {code} instead of 75")
        self._nothing_runs()
        self._launched.close()
        self._watch.look()
        if fault.kind == "damage-rest":
            self._outcome.hits[-1].done += f"; {self._striker.damage_at_rest(fault)}"
        if self._server is not None:
            self._lose_disks(fault)
        self._launched = self._launch()

    def _lose_disks(self, fault: Fault) -> None:
        """Replaces the machine of one process, or all of them, after two thirds of the faults."""
        lost = {0: [], 1: [fault.target], 2: range(self._plan.processes)}[fault.seed % 3]
        for process in lost:
            disk = remote.stage(self._output, Path(self._variables["JAXTRAIN_CACHE"]), process)
            if disk.exists():  # it was killed before it had written anything
                shutil.rmtree(disk)
            self._outcome.hits[-1].done += f"; disk of process {process} lost"

    def _reach(self, fault: Fault) -> bool:
        """Waits for the fault's moment; returns False if the run ends first."""
        hits = self._outcome.hits
        last = hits[-1] if hits else None
        stale = last.starts if last and last.fault.kind in RESTARTING else 0
        armed_at, armed_step = time.monotonic(), self._watch.step
        wait_s = fault.within_s(self._undisturbed.seconds)
        began: float | None = None
        while not self._over:
            self._poll()
            if began is not None:
                if time.monotonic() - began >= wait_s and self._launched.training():
                    return True
                continue
            if fault.kind.startswith("damage") and not self._striker.damageable():
                continue
            if fault.moment in RUNNING and self._in_vain >= _MOST_IN_VAIN:
                continue
            if fault.moment == "anywhere":
                # By time, or by steps if the machine is faster than in the undisturbed run.
                left = (STEPS - armed_step) * fault.share
                nearly_over = self._watch.starts > stale and self._watch.step > STEPS - left
                if nearly_over or time.monotonic() - armed_at >= wait_s:
                    began = armed_at - wait_s
            elif fault.moment == "start":
                pid = self._launched.training().get(fault.target)
                began = time.monotonic() if pid and pid not in self._known else None
            elif self._watch.starts > stale and self._reached(fault, armed_step):
                began = time.monotonic()
        return False

    def _reached(self, fault: Fault, armed_step: int) -> bool:
        """Whether the moment is reached, or was too short to be observed."""
        phase, step = self._watch.phase(), self._watch.step
        if fault.moment == "end" or fault.moment not in RUNNING:
            return PHASES.index(phase) >= PHASES.index(fault.moment)
        soonest = armed_step + fault.later
        return step >= soonest + _UNSEEN_STEPS or (phase == fault.moment and step >= soonest)

    def _strike(self, fault: Fault) -> bool:
        """Injects the fault; returns False if no process was left."""
        hit = Hit(
            fault,
            done="",
            phase=self._watch.phase(),
            step=self._watch.step,
            at=time.monotonic(),
            starts=self._watch.starts,
            # A start that met a full disk may end with it soon after: its last saves have failed.
            alone=all(
                hit.recovered_s is not None
                and (hit.fault.kind != "full" or hit.starts < self._watch.starts)
                for hit in self._outcome.hits
            ),
        )
        if hit.starts == self._silent:
            hit.phase = "start"  # the log is still that of the previous start
        done = self._striker.strike(fault, self._launched)
        if done is None:
            return False
        hit.done = done
        if fault.kind in _DOWN:
            self._waits_for_down = fault
        self._outcome.hits.append(hit)
        self._known = set(self._launched.training().values()) | self._pids
        if not fault.kind.startswith("damage"):
            self._copy_newest()
        return True

    def _expect_saved(self, hit: Hit) -> None:
        """Checks that no recorded step is repeated after a SIGTERM to a healthy run."""
        resumed = self._watch.resumed_from()
        alone = hit.alone and hit is self._outcome.hits[-1]
        if hit.fault.kind.startswith("term") and alone and resumed < hit.step:
            self._problems.append(
                f"SIGTERM after step {hit.step} lost steps: resumed from {resumed}"
            )

    def _copy_newest(self) -> None:
        """Copies the newest complete checkpoint, to compare it at the end."""
        if self._stored is not None:
            return  # the bucket is judged at the end
        for step in reversed(self._watch.complete()):
            if step in self._striker.damaged:
                continue
            copy = self._place / "copies" / f"{len(self._copies)}"
            kept = self._watch.checkpoints / f"{step}.json"
            # The run may be deleting it.
            with contextlib.suppress(OSError, shutil.Error, ValueError):
                data = json.loads(kept.read_text())["data"]
                shutil.copytree(self._directory / data, copy / data)
                self._copies.append(Path(shutil.copy(kept, copy / "checkpoints")))
                return

    def _nothing_runs(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while (left := self._launched.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self._problems.append(f"{len(left)} processes are running after the launcher ended")

    def _judge(self) -> None:
        if self._launched.code() == 0:
            self._nothing_runs()
            kept = shared_memory()
            # After a kill of all processes, none is left to free it.
            killed = any(hit.fault.kind in _KILLING for hit in self._outcome.hits)
            if kept and not killed:
                self._problems.append(f"shared memory is left after the run: {', '.join(kept)}")
            if self._server is not None:
                self._judge_bucket()
                return
            found = verdicts.compare(self._undisturbed.directory, self._directory)
            self._problems += found.problems
            self._outcome.verdict.lost, self._outcome.verdict.repeated = found.lost, found.repeated
            for folder in (self._directory, self._place / "tmp"):
                left = verdicts.leftovers(folder)
                if left:
                    self._problems.append(f"temporary files in {folder.name}: {', '.join(left)}")
            store = CheckpointStore(Folder(self._directory))
            if unused := store.unused():
                self._problems.append(f"nothing points to {', '.join(unused)}")
            detected = {int(name.partition("-")[0]) for name in verdicts.damaged(store)}
            for step in sorted(self._striker.to_be_found - detected):
                self._problems.append(f"the damage to checkpoint {step} was not detected")
            steps = self._watch.complete()
            if STEPS not in steps:
                self._problems.append(f"no checkpoint of the last step, only {steps}")
            for step in steps:
                if step not in self._striker.damaged:
                    self._compare_arrays(self._watch.checkpoints / f"{step}.json")
            # The best checkpoint may have been damaged, or not saved on a full disk.
            if not self._striker.damaged and not _fills(self._plan):
                self._compare_best()
        for copy in self._copies:
            self._compare_arrays(copy)

    def _judge_bucket(self) -> None:
        """Judges the files in the bucket, as if all machines of the run were gone."""
        assert self._server is not None
        copy = self._place / "copy"
        os.environ |= self._server.variables
        stored = RemoteRun(Bucket(self._output), print)
        copy.mkdir()
        FileCopies(stored.bucket, copy).fetch(lambda name: "/" not in name)
        found = verdicts.compare(self._undisturbed.directory, copy)
        self._problems += found.problems
        self._outcome.verdict.lost, self._outcome.verdict.repeated = found.lost, found.repeated
        for process in range(self._plan.processes):
            own = remote.stage(self._output, Path(self._variables["JAXTRAIN_CACHE"]), process)
            if left := verdicts.leftovers(own):
                self._problems.append(f"temporary files of process {process}: {', '.join(left)}")
        if stored.bucket.get(lease.NAME):
            self._problems.append("the lease is left")
        if unused := stored.store.unused():
            self._problems.append(f"nothing points to {', '.join(unused)} in the bucket")
        steps, best = stored.store.steps(), stored.store.steps("best")
        wanted = pointer.steps(self._undisturbed.directory / "best")
        if STEPS not in steps:
            self._problems.append(f"no checkpoint of the last step, only {steps}")
        damaged = self._striker.damaged
        if best != wanted and not damaged and not _fills(self._plan):
            self._problems.append(f"the best checkpoint is {best} instead of {wanted}")
        for kind, numbers in (("checkpoints", steps), ("best", best)):
            for step in set(numbers) - damaged:
                if why := stored.fetch(pointer.name_of(kind, step), copy / "fetched"):
                    self._problems.append(f"{kind}/{step} in the bucket is damaged: {why}")
                else:
                    self._compare_arrays(copy / "fetched" / kind / f"{step}.json")
        # A start that ended before it uploaded its log has reported on the console only.
        log = (self._place / "launcher.txt").read_text(errors="replace")
        found_damaged = set(re.findall(r"checkpoint (?:\S*/)?(\d+) (?:is damaged|cannot be)", log))
        for step in self._striker.to_be_found:
            if str(step) not in found_damaged:
                self._problems.append(f"the damage to checkpoint {step} was not reported")

    def _compare_best(self) -> None:
        wanted, found = (
            sorted(path.name for path in (directory / "best").iterdir())
            for directory in (self._undisturbed.directory, self._directory)
        )
        if found != wanted:
            self._problems.append(f"the best checkpoint is {found} instead of {wanted}")
        for name in found:
            self._compare_arrays(self._directory / "best" / name)

    def _compare_arrays(self, checkpoint: Path) -> None:
        reference = self._undisturbed.checkpoint(int(checkpoint.stem))
        # A SIGTERM saves between two regular checkpoints: such a checkpoint is only read.
        difference = verdicts.same_arrays(reference or checkpoint, checkpoint)
        if difference:
            self._problems.append(difference)

    def _launcher_tail(self) -> str:
        output = self._place / "launcher.txt"
        return "\n".join(output.read_text(errors="replace").splitlines()[-12:])


def _fills(plan: Plan) -> bool:
    return any(fault.kind == "full" for fault in plan.faults)
