"""The order of what the loop does, with parts that only record it."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jaxtrain import config
from jaxtrain.training import loop


def test_saves_are_phases_of_their_own_also_after_the_validation_of_a_resume() -> None:
    phases: list[str] = []
    saves: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def paused_for(name: str, **limit: Any) -> Iterator[None]:
        phases.append(name)
        yield
        phases.pop()

    def save(*_: Any, regular: bool = True, best: bool = False) -> None:
        saves.append((phases[-1] if phases else "", best))

    setup = mock.MagicMock()
    setup.run = config.named("demo")
    setup.recorder.paused_for = paused_for
    setup.recorder.finished.return_value = True
    setup.stopping.decision = 0
    setup.save_policy.run_progress = SimpleNamespace(evaluation_due=True, best=None)
    setup.save_policy.judge.return_value = True
    setup.save_policy.save = save
    setup.save_policy.finish = save
    with mock.patch.object(loop.jax, "block_until_ready"):
        loop.train(setup)
    assert saves == [("save", True), ("save", False)]
