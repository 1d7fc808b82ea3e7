"""Injects a fault into a run."""

import random
import signal
import time

from chaos.damage import damage
from chaos.faults import Fault
from chaos.isolation import Disk
from chaos.launched import Launched, send
from chaos.watch import Watch


class Striker:
    """Injects faults, and ends the temporary ones.

    Args:
        watch: observes the run.
        disk: contains the run directory; required only for a full disk.

    Attributes:
        damaged: steps of the checkpoints that a fault has damaged.
        to_be_found: the damaged ones that were the newest when the run restarted.
    """

    def __init__(self, watch: Watch, disk: Disk | None) -> None:
        self._watch, self._disk = watch, disk
        self._paused: dict[int, float] = {}  # PID -> time to continue it
        self._freed_at: float | None = None
        self.damaged: set[int] = set()
        self._struck: set[tuple[int, int]] = set()  # step and inode, as a step may be saved again
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
            self._disk.fill([process.pid for process in launched.processes()])
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
            done.append(damage(self._watch.checkpoints / f"{step}.json", kind, rng))
            self._struck.add((step, self._state(step)))
            self.damaged.add(step)
        return "; ".join(done) or None

    def damageable(self) -> list[int]:
        """Returns the steps of checkpoints that may be damaged.

        These are the intact ones without the oldest.
        """
        steps = self._watch.complete()
        return [step for step in steps if (step, self._state(step)) not in self._struck][1:]

    def _state(self, step: int) -> bytes:
        """Returns a checkpoint's pointer; empty if the run is deleting it."""
        try:
            return (self._watch.checkpoints / f"{step}.json").read_bytes()
        except FileNotFoundError:
            return b""

    def _expect_found(self) -> None:
        newest = max(self._watch.complete(), default=None)
        if newest in self.damaged:
            self.to_be_found.add(newest)

    def about_to_be_freed(self) -> bool:
        """Whether the disk is full and should be freed now."""
        return self._freed_at is not None and time.monotonic() >= self._freed_at

    def take_back(self, launched: Launched) -> None:
        """Ends temporary faults whose time is over."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._paused.items() if now >= until]:
            del self._paused[pid]
            send(pid, signal.SIGCONT)
        if self._disk and self.about_to_be_freed():
            self._freed_at = None
            self._disk.free([process.pid for process in launched.processes()])


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
