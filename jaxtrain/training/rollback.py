"""Restores the newest checkpoint after too many bad steps in a row, and skips their examples."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import candidates, pointer, resume, start
from jaxtrain.checkpoint.restore import restore
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import BadSteps
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.training.state import State, saved_part

# Rollbacks to the same checkpoint: after this many, the run is at fault, not a few examples.
_MAX_ROLLBACKS = 3


class Rollback:
    """Restores a run's newest checkpoint; examples seen since then are not repeated."""

    def __init__(
        self,
        directory: Path,
        interval: int,
        target: State,
        say: Callable[[str], None],
        advice: Callable[[State], str],
        uploader: Uploader | None = None,
        rewound: Callable[[Position], None] = lambda position: None,
    ) -> None:
        self._directory, self._uploader = directory, uploader
        self._interval = interval
        self._target = target
        self._say, self._advice, self._rewound = say, advice, rewound
        self._last: tuple[int, int] | None = None  # (step of a checkpoint, rollbacks to it)

    def __call__(
        self, state: State, still_alive: Callable[[], None] = lambda: None
    ) -> tuple[State, Position]:
        """Returns the restored state and its position.

        Args:
            state: the current state; all of its examples count as seen. Its arrays are deleted
                before the checkpoint is read: a device may not have the memory for two states.
            still_alive: called regularly while the last save is uploaded to a bucket: which
                checkpoint is restored must not depend on how fast that is.

        Raises:
            InputError: no checkpoint exists, it cannot be read, or earlier rollbacks to it did
                not help.
            RunAgain: the disk or the bucket does not respond.
        """
        step, examples_seen = int(state.step), int(state.examples_seen)
        bad = int(state.skip_step["bad_in_a_row"])
        trouble = f"{bad} bad steps in a row at step {step + 1} (see bad_steps.jsonl)"
        if self._uploader is not None:
            self._uploader.finish(still_alive)
        chosen = process_group.process_zero_decides(lambda: self._choose(step))
        if not chosen:
            raise BadSteps(
                f"{trouble}, and there is no checkpoint to restore: {self._advice(state)}"
            )
        back_to = int(chosen)
        times = self._last[1] + 1 if self._last and self._last[0] == back_to else 1
        if times > _MAX_ROLLBACKS:
            raise BadSteps(
                f"{trouble}, although checkpoint {back_to} was restored {_MAX_ROLLBACKS} times: "
                f"{self._advice(state)}"
            )
        self._last = back_to, times
        self._say(
            f"{trouble}: restoring checkpoint {back_to}; skipping ahead to example {examples_seen}"
        )
        path = self._directory / pointer.name_of(pointer.CHECKPOINTS, back_to)
        if self._uploader is not None:
            self._uploader.fetch(path)
        file_weights = {
            name: array for name, array in state.extras.items() if name not in self._target.extras
        }
        for array in jax.tree.leaves(saved_part(state, file_weights)):
            array.delete()
        restored: State = restore(path, self._target, verified=True)
        placed = jnp.asarray(examples_seen, jnp.uint32, device=self._target.examples_seen.sharding)
        detector_state = restored.skip_step
        no_bad_steps = {"bad_in_a_row": jnp.zeros_like(detector_state["bad_in_a_row"])}
        state = dataclasses.replace(
            restored,
            examples_seen=placed,
            skip_step=detector_state | no_bad_steps,
            extras=file_weights | restored.extras,
        )
        position = Position.of_checkpoint(pointer.read_meta(path))
        self._rewound(position)
        return state, position

    def _choose(self, step: int) -> str:
        """Returns the step of the checkpoint to restore; "" if there is none. Process 0 only."""
        if self._uploader is None:
            saved = candidates.CheckpointCandidates(self._directory, self._say)
        else:
            saved = self._uploader.candidates()
        path = resume.rollback_checkpoint(saved, step, self._interval)
        if path is None:
            return ""
        # A kill before the next save must not resume from a newer one, such as one that a stop
        # saved. Those in best/ stay: their validations still count.
        try:
            start.follow_rollback(saved.place, path)
            saved.set_aside_after(int(path.stem))
        except OSError as error:
            raise disk_trouble(
                error, f"cannot write in {self._directory}", "make it writable"
            ) from error
        return path.stem
