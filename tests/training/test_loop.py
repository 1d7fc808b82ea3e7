"""The order of what the loop does, with parts that only record it."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jaxtrain import config
from jaxtrain.training import loop

STEP = 40


class Loop:
    """A loop that runs one step, or none, and records the saves."""

    def __init__(self, *, runs: bool, validation_due: bool, improves: bool) -> None:
        self.saves: list[tuple[str, bool, bool]] = []
        phases: list[str] = []

        @contextlib.contextmanager
        def paused_for(name: str, **limit: Any) -> Iterator[None]:
            phases.append(name)
            yield
            phases.pop()

        def save(*_: Any, regular: bool = True, best: bool = False) -> None:
            self.saves.append((phases[-1] if phases else "", regular, best))

        setup = self.setup = mock.MagicMock()
        setup.run = config.named("demo").override({"loop.eval_every": STEP})
        setup.total = setup.run.loop.steps
        setup.step.return_value = ("next state", "metrics")
        setup.recorder.step = STEP
        setup.recorder.paused_for = paused_for
        setup.recorder.finished.side_effect = [False, True] if runs else [True]
        setup.recorder.too_many_bad.return_value = False
        setup.replay, setup.stopping.decision, setup.stopping.save_due = None, 0, False
        setup.save_policy.run_progress = SimpleNamespace(validation_due=validation_due, best=None)
        setup.save_policy.judge.return_value = improves
        setup.save_policy.save = save
        setup.save_policy.finish = save

    def train(self) -> None:
        with mock.patch.object(loop.jax, "block_until_ready"):
            loop.train(self.setup)


def test_saves_are_phases_of_their_own_also_after_the_validation_of_a_resume() -> None:
    resumed = Loop(runs=False, validation_due=True, improves=True)
    resumed.train()
    assert resumed.saves == [("save", False, True), ("save", True, False)]


@pytest.mark.parametrize("improves", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_validation_saves_a_state_only_if_it_is_the_best(
    improves: bool, interrupted: bool
) -> None:
    validates = Loop(runs=True, validation_due=False, improves=improves)
    if interrupted:
        validates.setup.evaluator.return_value = None
    validates.train()
    best = [("save", False, True)] if improves and not interrupted else []
    assert validates.saves == [*best, ("save", True, False)]


def test_each_step_is_recorded_with_its_batch_and_the_state_after_it() -> None:
    one_step = Loop(runs=True, validation_due=False, improves=False)
    batch = object()
    one_step.setup.batches.__next__.return_value = batch
    one_step.train()
    ids = one_step.setup.batches.ids
    one_step.setup.recorder.push.assert_called_once_with("metrics", ids, "next state", batch)
