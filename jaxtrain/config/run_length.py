"""The length of a run in steps: from steps, epochs, or tokens, and from where it resumes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jaxtrain import config
from jaxtrain.errors import InputError

_MOST_EXAMPLES = 2**32 - 1  # the state on the devices counts them in uint32


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: completed steps.
        examples_seen: perhaps in batches of another size.
        skipped: those of them that no step has learned from: those of skipped steps and of steps
            that a rollback has undone.
    """

    step: int = 0
    examples_seen: int = 0
    skipped: int = 0

    @classmethod
    def of_checkpoint(cls, meta: Mapping[str, Any]) -> Self:
        """Reads the position from the metadata of a checkpoint."""
        return cls(meta["step"], meta["examples_seen"], meta["examples_skipped"])

    def to_meta(self) -> dict[str, int]:
        """Returns the position as metadata of a checkpoint."""
        return {
            "step": self.step,
            "examples_seen": self.examples_seen,
            "examples_skipped": self.skipped,
        }

    @property
    def learned(self) -> int:
        """Examples that the completed steps have learned from."""
        return self.examples_seen - self.skipped


def resolve_steps(
    run: config.Run,
    *,
    examples: int,
    parameters: int,
    tokens_per_example: int | None,
    position: Position = Position(),
) -> int:
    """Returns the total steps of a run; epochs and tokens are rounded down to full batches.

    Args:
        run: the config, checked.
        examples: training examples in an epoch.
        parameters: number of parameters of the model.
        tokens_per_example: None for a model without tokens.
        position: where the run resumes; epochs and tokens count learned examples, so that an
            interrupted run has as many steps as an uninterrupted one.

    Raises:
        InputError: there would be no step, more examples than the state can count, fewer steps
            than the warm-up, too few validations for early stopping, or tokens are counted for a
            model without tokens.
    """
    loop, batch = run.loop, run.data.batch_size
    if loop.steps is not None:
        steps = loop.steps
    elif loop.epochs is not None:
        steps = position.step + (loop.epochs * examples - position.learned) // batch
    else:
        assert loop.tokens_per_param is not None, "validate() ensures that one of the three is set"
        if tokens_per_example is None:
            raise InputError(
                f"loop.tokens_per_param is {loop.tokens_per_param}, but this model has no tokens: "
                "set --loop.steps or --loop.epochs, and --loop.tokens_per_param None"
            )
        wanted = int(loop.tokens_per_param * parameters) // tokens_per_example
        steps = position.step + (wanted - position.learned) // batch
    if steps < 1:
        raise InputError(
            f"the run has no steps: loop.epochs {loop.epochs} x {examples} examples is less than "
            f"data.batch_size {batch}: lower --data.batch_size or raise --loop.epochs"
            if loop.epochs is not None
            else f"the run has no steps: loop.tokens_per_param {loop.tokens_per_param} x "
            f"{parameters} parameters is less than a batch of {batch} x {tokens_per_example} "
            "tokens: raise --loop.tokens_per_param or lower --data.batch_size"
        )
    last = position.examples_seen + (steps - position.step) * batch
    if last > _MOST_EXAMPLES:
        raise InputError(
            f"{steps:,} steps of {batch:,} examples are more than the {_MOST_EXAMPLES:,} examples "
            "that a run can count: lower the number of steps or --data.batch_size"
        )
    config.check_warmup(run.optim, steps)
    config.check_patience(run.loop, steps)
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
    """Explains the number of :func:`resolve_steps`, for the console."""
    batch = run.data.batch_size
    if run.loop.epochs is not None:
        rule = f"{run.loop.epochs} epochs x {examples} examples / batch {batch}"
    elif run.loop.tokens_per_param is not None:
        rule = (
            f"{run.loop.tokens_per_param:g} tokens x {parameters} parameters / "
            f"(batch {batch} x {tokens_per_example} tokens)"
        )
    else:
        rule = f"loop.steps, {steps * batch / examples:.2f} epochs of {examples} examples"
    if run.loop.steps is None and position.learned != position.step * batch:
        rule += f", of which {position.learned} examples were learned in {position.step} steps"
    return f"{steps} steps ({rule})"
