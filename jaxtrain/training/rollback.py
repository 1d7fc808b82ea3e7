"""Back to the newest checkpoint when too many updates in a row are bad, and on behind them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from jaxtrain.checkpoint import layout, resume
from jaxtrain.checkpoint.restore import restore
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.training.state import State

# So often without a new checkpoint between: then it is the run that is wrong, not some examples.
_MOST = 3


class Rollback:
    """Restores a run's newest checkpoint; examples seen since then are not seen again.

    Args:
        directory: of the run.
        every: steps between checkpoints.
        target: shapes and shardings of the state.
        say: takes a line.
    """

    def __init__(
        self, directory: Path, every: int, target: State, say: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._every = every
        self._target = target
        self._say = say
        self._last: tuple[int, int] | None = None  # step gone back to, how often in a row

    def __call__(self, state: State) -> tuple[State, Position]:
        """The state to go on with, and where its checkpoint was saved.

        Args:
            state: of now; all of its examples count as seen.

        Raises:
            InputError: there is no checkpoint, or going back did not help.
        """
        done, seen = int(state.step), int(state.examples_seen)
        bad = int(state.guard["bad_in_a_row"])
        trouble = f"{bad} updates in a row after update {done} are bad (bad_steps.jsonl)"
        told = process_group.told_by_process_zero(lambda: self._choose(done))
        if not told:
            raise InputError(
                f"{trouble}, and there is no checkpoint to go back to: lower --optim.peak_lr, or "
                "look with --debug"
            )
        back_to = int(told)
        times = self._last[1] + 1 if self._last and self._last[0] == back_to else 1
        if times > _MOST:
            raise InputError(
                f"{trouble}, also after going back to update {back_to} {_MOST} times: lower "
                "--optim.peak_lr, or look with --debug"
            )
        self._last = back_to, times
        self._say(
            f"{trouble}: back to checkpoint {back_to}, and on behind these examples (from example "
            f"{seen} on)"
        )
        path = self._directory / layout.CHECKPOINTS / told
        restored: State = restore(path, self._target, verified=True)
        placed = jnp.asarray(seen, jnp.uint32, device=self._target.examples_seen.sharding)
        guarding = restored.guard | {"bad_in_a_row": jnp.zeros_like(restored.guard["bad_in_a_row"])}
        state = dataclasses.replace(restored, examples_seen=placed, guard=guarding)
        return state, Position.of_checkpoint(layout.read_meta(path))

    def _choose(self, done: int) -> str:
        """The step to go back to; "" if there is none. Process 0 decides."""
        path = resume.to_roll_back_to(self._directory, done, self._every, self._say)
        return "" if path is None else path.name
