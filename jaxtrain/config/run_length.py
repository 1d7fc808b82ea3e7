"""How many updates a run has: from steps, epochs or tokens, and from where it goes on."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jaxtrain import config
from jaxtrain.errors import InputError


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
        done: completed updates.
        seen: examples seen, perhaps in batches of another size.
        left_out: those of them that no update has learned from: bad ones, and those of updates
            that a rollback has undone.
    """

    done: int = 0
    seen: int = 0
    left_out: int = 0

    @classmethod
    def of_checkpoint(cls, meta: Mapping[str, Any]) -> Self:
        """That of a checkpoint, by what stands beside its state."""
        return cls(meta["step"], meta["examples_seen"], meta["examples_left_out"])

    def to_meta(self) -> dict[str, int]:
        """What stands beside a state."""
        return {
            "step": self.done,
            "examples_seen": self.seen,
            "examples_left_out": self.left_out,
        }

    @property
    def learned(self) -> int:
        """Examples that went into the completed updates."""
        return self.seen - self.left_out


def resolve_steps(
    run: config.Run,
    *,
    examples: int,
    parameters: int,
    tokens_per_example: int | None,
    position: Position = Position(),
) -> int:
    """Updates of the whole run; whole batches only, so epochs and tokens are rounded down.

    Args:
        run: checked.
        examples: in one epoch of the training split.
        parameters: elements of the model's parameters.
        tokens_per_example: None for a model that has no tokens.
        position: where the run goes on; epochs and tokens count what was learned, so that a run
            has as many updates with a stop as without.

    Raises:
        InputError: the rule gives no step, fewer than the warm-up, or asks for tokens of a model
            that has none.
    """
    loop, batch = run.loop, run.data.batch_size
    if loop.steps is not None:
        steps = loop.steps
    elif loop.epochs is not None:
        steps = position.done + (loop.epochs * examples - position.learned) // batch
    else:
        assert loop.tokens_per_param is not None, "validate() holds that one of the three is set"
        if tokens_per_example is None:
            raise InputError(
                f"loop.tokens_per_param is {loop.tokens_per_param}, but an example of this model "
                "has no tokens: set --loop.steps or --loop.epochs, and "
                "--loop.tokens_per_param None"
            )
        wanted = int(loop.tokens_per_param * parameters) // tokens_per_example
        steps = position.done + (wanted - position.learned) // batch
    if steps < 1:
        raise InputError(
            f"the run has no step: {loop.epochs} epochs of {examples} examples"
            f" (data.batch_size {batch}): lower --data.batch_size or raise --loop.epochs"
            if loop.epochs is not None
            else f"the run has no step: {loop.tokens_per_param} tokens for each of {parameters} "
            f"parameters, {batch} x {tokens_per_example} tokens a batch: raise "
            "--loop.tokens_per_param or lower --data.batch_size"
        )
    config.check_warmup(run.optim, steps)
    return steps


def steps_rule(
    run: config.Run,
    steps: int,
    *,
    examples: int,
    parameters: int,
    tokens_per_example: int | None,
    position: Position = Position(),
) -> str:
    """How :func:`resolve_steps` came to its number, for the console."""
    batch = run.data.batch_size
    if run.loop.epochs is not None:
        how = f"{run.loop.epochs} epochs x {examples} examples / batch {batch}"
    elif run.loop.tokens_per_param is not None:
        how = (
            f"{run.loop.tokens_per_param:g} tokens x {parameters} parameters / "
            f"(batch {batch} x {tokens_per_example} tokens)"
        )
    else:
        how = f"loop.steps, {steps * batch / examples:.2f} epochs of {examples} examples"
    if run.loop.steps is None and position.learned != position.done * batch:
        how += f", of which {position.learned} examples were learned in {position.done} steps"
    return f"{steps} steps ({how})"
