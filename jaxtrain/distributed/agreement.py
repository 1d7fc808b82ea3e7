"""How the processes of a run agree on whether a save worked, in threads beside the training.

A save that fails in one process must fail in all of them: else one would try again, or end, while
another waits for it for ever. A collective cannot tell them (the training uses those), so they
write notes into jax's coordination service. Process 0 counts the votes and publishes the outcome:
were each process to count, one could give up waiting for what another still sees come.
"""

import itertools
import time
from typing import Protocol, Self

from jaxtrain.distributed import process_group

_WELL, _FAILED = "+", "-"
_POLL_S = (0.01, 0.5)  # at first, and at most


class Store(Protocol):
    """The part of the client of jax's coordination service that is used here."""

    def key_value_set(self, key: str, value: str) -> None:
        """Sets a key for all processes."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys that begin with this one, and their values."""

    def key_value_delete(self, key: str) -> None:
        """Deletes all keys that begin with this one."""


class FailedElsewhere(Exception):
    """Another process has failed in what this one waits for; says which, and why."""


class Votes:
    """What each process says about the parts of a save; all call the methods alike.

    Args:
        process: number of this process.
        processes: of the run.
        store: shared by all of them; None in a run of one process, where nobody is waited for.
        timeout_s: longest time for process 0 to wait for a vote. The others wait for process 0 as
            long as it takes, which hashes a large checkpoint meanwhile: if it is gone or stuck,
            :mod:`jaxtrain.distributed.heartbeat` or the watchdog ends them.
    """

    _made = itertools.count()  # alike in all processes

    def __init__(self, process: int, processes: int, store: Store | None, timeout_s: float) -> None:
        self._keys = f"jaxtrain/save/{next(self._made)}/"
        self._process = process
        self._processes = processes
        self._store = store
        self._timeout_s = timeout_s
        self._save = 0

    @classmethod
    def of_run(cls, timeout_s: float) -> Self:
        """Those of the processes of this run."""
        run = process_group.members()
        return cls(run.index, run.count, run.service, timeout_s)

    def begin(self) -> None:
        """A save begins: votes of the one before no longer count."""
        self._save += 1
        if self._store is not None and self._process == 0:
            # Nobody can still read these: all have voted at the beginning of the save after them.
            self._store.key_value_delete(f"{self._keys}{self._save - 2}/")

    def agree(self, part: str, failure: str) -> str:
        """Says how a part went here, and returns how it went altogether.

        Args:
            part: name of this part of the save, the same in all processes.
            failure: why it failed in this process; "" where it worked.

        Returns:
            The failure of the first process that has one; "" where it worked everywhere.
        """
        if self._store is None:
            return failure
        self._vote(part, failure)
        folder = f"{self._keys}{self._save}/"
        key = f"{folder}{part}/outcome"
        if self._process == 0:
            outcome = self._outcome(part, give_up_early=False)
            self._store.key_value_set(key, f"{_FAILED}{outcome}" if outcome else _WELL)
            return outcome
        pause_s = _POLL_S[0]
        while not (note := dict(self._store.key_value_dir_get(folder)).get(key)):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return note.removeprefix(_FAILED) if note.startswith(_FAILED) else ""

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """For Orbax, which waits here for the other processes in its own thread.

        Raises:
            FailedElsewhere: a process says that it has failed, so it will not come.
        """
        del timeout_ms
        if self._store is None:
            return
        self._vote(key, "")
        failure = self._outcome(key, give_up_early=True)
        if failure:
            raise FailedElsewhere(failure)

    def _vote(self, part: str, failure: str) -> None:
        assert self._store is not None
        if failure and not failure.startswith("process "):
            failure = f"process {self._process}: {failure}"
        note = f"{_FAILED}{failure}" if failure else _WELL
        self._store.key_value_set(f"{self._keys}{self._save}/{part}/{self._process}", note)

    def _outcome(self, part: str, *, give_up_early: bool) -> str:
        assert self._store is not None
        folder = f"{self._keys}{self._save}/"
        deadline, pause_s = time.monotonic() + self._timeout_s, _POLL_S[0]
        while True:
            notes = dict(self._store.key_value_dir_get(folder))
            votes = {
                process: note
                for process in range(self._processes)
                if (note := notes.get(f"{folder}{part}/{process}"))
            }
            complete = len(votes) == self._processes
            # Who failed in an earlier part leaves out what the others wait for here.
            counted = notes if give_up_early else votes if complete else {}
            failed = [note for note in counted.values() if note.startswith(_FAILED)]
            if failed:
                return failed[0].removeprefix(_FAILED)
            if complete:
                return ""
            if time.monotonic() > deadline:
                silent = sorted(set(range(self._processes)) - votes.keys())
                return f"process {silent[0]} did not answer within {self._timeout_s:g} s"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
