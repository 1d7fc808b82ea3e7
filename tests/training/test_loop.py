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
    setup.progress.paused_for = paused_for
    setup.progress.finished.return_value = True
    setup.stopping.decision = 0
    setup.saver.run_progress = SimpleNamespace(evaluation_due=True, best=None)
    setup.saver.judge.return_value = True
    setup.saver.save = save
    setup.saver.finish = save
    with mock.patch.object(loop.jax, "block_until_ready"):
        loop.train(setup)
    assert saves == [("save", True), ("save", False)]
