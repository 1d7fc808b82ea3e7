"""Injects a fault into a run."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

from chaos.damage import damage
from chaos.faults import Fault
from chaos.isolation import Disk
from chaos.launched import Launched, send
from chaos.watch import Watch
from storage.bucket_server import Server

from jaxtrain.checkpoint.pointer import step_of

_LIST_EVERY_S = 0.5


class Stored:
    """The checkpoints of a run in a bucket, to damage them there."""

    def __init__(self, server: Server, run: str, place: Path) -> None:
        self._server, self._run, self._place = server, run, place
        self._listed_at, self._steps = -_LIST_EVERY_S, list[int]()

    def complete(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        if time.monotonic() - self._listed_at >= _LIST_EVERY_S:
            steps = map(step_of, self._server.sizes(f"{self._run}/checkpoints"))
            self._steps = sorted(step for step in steps if step is not None)
            self._listed_at = time.monotonic()
        return self._steps

    def pointer(self, step: int) -> bytes:
        """Returns a pointer; empty if the run has deleted it."""
        try:
            return self._server.read(f"{self._run}/checkpoints/{step}.json")
        except Exception as error:
            if type(error).__name__ != "NoSuchKey":  # of boto3, which makes its classes at run time
                raise
            return b""

    def damage(self, step: int, kind: str, rng: random.Random) -> str:
        """Damages a checkpoint; see :func:`chaos.damage.damage`."""
        shutil.rmtree(self._place, ignore_errors=True)
        content = self.pointer(step)
        data = json.loads(content)["data"]
        self._server.download(f"{self._run}/{data}", self._place / data)
        copy = self._place / f"checkpoints/{step}.json"
        copy.write_bytes(content)
        before = _contents(self._place)
        done = damage(copy, kind, rng)
        after = _contents(self._place)
        for name in before:
            if name not in after:
                self._server.delete(f"{self._run}/{name}")
            elif after[name] != before[name]:
                self._server.write(f"{self._run}/{name}", after[name])
        return f"in the bucket, {done}"


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Striker:
    """Injects faults, and ends the temporary ones.

    Args:
        stored: damages are done there; None for the run directory.

    Attributes:
        damaged: steps of the checkpoints that a fault has damaged.
        to_be_found: the damaged ones that were the newest when the run restarted.
    """

    def __init__(self, watch: Watch, disk: Disk | None, stored: Stored | None = None) -> None:
        self._watch, self._disk, self._stored = watch, disk, stored
        self._paused: dict[int, float] = {}  # PID -> time to continue it
        self._freed_at: float | None = None
        self.damaged: set[int] = set()
        self._struck: set[tuple[int, bytes]] = set()  # step and pointer: it may be saved again
        self.to_be_found: set[int] = set()

    def strike(self, fault: Fault, launched: Launched) -> str | None:
        """Injects a fault immediately.

        Returns:
            A description of the fault; None if no process was left.
        """
        kind, _, manner = fault.kind.partition("-")
        if kind in ("kill", "term"):
            number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
            return _signalled(manner, number, fault.target, launched)
        if kind in ("stop", "pause"):
            pid = launched.training().get(fault.target)
            if pid is None or not send(pid, signal.SIGSTOP):
                return None
            if kind == "pause":
                self._paused[pid] = time.monotonic() + fault.lasts_s
            return f"SIGSTOP to process {fault.target}" + (
                f", SIGCONT after {fault.lasts_s} s" if kind == "pause" else ""
            )
        if kind == "full":
            assert self._disk is not None, "a disk is made for every plan with a full disk"
            if not launched.training():
                return None
            self._disk.fill()
            self._freed_at = time.monotonic() + fault.lasts_s
            return f"disk full for {fault.lasts_s} s"
        if manner == "live":
            done = self._damage(fault)
            if done is None:
                return None
            killed = _signalled("all", signal.SIGKILL, 0, launched)
            self._expect_found()
            return killed and f"{done}; {killed}"
        # At rest: first take the run down.
        if fault.seed % 2:
            return _signalled("tree", signal.SIGKILL, 0, launched)
        return _signalled("launcher", signal.SIGTERM, 0, launched)

    def damage_at_rest(self, fault: Fault) -> str:
        """Completes a fault that requires the run to be down. Returns a description."""
        done = self._damage(fault)
        self._expect_found()
        return done or "no checkpoint may be damaged"

    def _damage(self, fault: Fault) -> str | None:
        """Damages the newest checkpoints, one for each of the fault's damages.

        One checkpoint stays intact: a run with only damaged ones refuses to resume.
        """
        rng = random.Random(fault.seed)
        done = []
        for step, kind in zip(reversed(self.damageable()), fault.damages, strict=False):
            if self._stored is not None:
                done.append(self._stored.damage(step, kind, rng))
            else:
                done.append(damage(self._watch.checkpoints / f"{step}.json", kind, rng))
            self._struck.add((step, self._state(step)))
            self.damaged.add(step)
        return "; ".join(done) or None

    def damageable(self) -> list[int]:
        """Returns the steps of checkpoints that may be damaged.

        These are the intact ones without the oldest.
        """
        steps = self._complete()
        if len(steps) < 2:
            return []
        return [step for step in steps if (step, self._state(step)) not in self._struck][1:]

    def _complete(self) -> list[int]:
        return (self._stored or self._watch).complete()

    def _state(self, step: int) -> bytes:
        """Returns a checkpoint's pointer; empty if the run is deleting it."""
        if self._stored is not None:
            return self._stored.pointer(step)
        try:
            return (self._watch.checkpoints / f"{step}.json").read_bytes()
        except FileNotFoundError:
            return b""

    def _expect_found(self) -> None:
        newest = max(self._complete(), default=None)
        if newest in self.damaged:
            self.to_be_found.add(newest)

    def about_to_be_freed(self) -> bool:
        """Whether the disk is full and should be freed now."""
        return self._freed_at is not None and time.monotonic() >= self._freed_at

    def take_back(self) -> None:
        """Ends temporary faults whose time is over."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._paused.items() if now >= until]:
            del self._paused[pid]
            send(pid, signal.SIGCONT)
        if self._disk and self.about_to_be_freed():
            self._freed_at = None
            self._disk.free()


def _signalled(manner: str, number: signal.Signals, target: int, launched: Launched) -> str | None:
    name = signal.Signals(number).name
    if manner == "launcher":
        return f"{name} to the launcher" if launched.signal_launcher(number) else None
    if manner == "one":
        pid = launched.training().get(target)
        hit = pid is not None and send(pid, number)
        return f"{name} to process {target}" if hit else None
    processes = [process for process in launched.processes() if process.trains]
    if not any(process.index is not None for process in processes):
        return None
    if manner == "tree":
        if number == signal.SIGKILL:
            launched.kill_everything()
            return f"{name} to the launcher and all its processes"
        launched.signal_launcher(number)
    hit = sum(send(process.pid, number) for process in processes)
    return f"{name} to {hit} processes" if hit else None
