"""Which state counts as the best, and when a run has waited long enough for a better one."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import checkpoint, config, saving
from jaxtrain.errors import InputError

RUN = config.named("demo_mlm")
SETTINGS = config.Checkpoint(every=1, keep=1, best_metric="val/psnr", best_mode="max")


class State:
    """Stands in for a state, of which only the examples seen are read."""

    examples_seen = 8


class Checkpoints:
    """Keeps which steps were saved."""

    def __init__(self) -> None:
        self.best: list[int] = []
        self.regular: list[int] = []

    def save(self, state: Any, meta: Any, *, best: bool) -> None:
        self.regular.append(meta["step"])
        if best:
            self.save_best(state, meta)

    def save_best(self, state: Any, meta: Any) -> None:
        assert meta["examples_seen"] == 8
        self.best.append(meta["step"])


def saver(**settings: Any) -> tuple[saving.Saver, Checkpoints]:
    run = dataclasses.replace(RUN, checkpoint=dataclasses.replace(SETTINGS, **settings))
    checkpoints = Checkpoints()
    meta = saving.describe(run, "fingerprint")
    return saving.Saver(run, checkpoints, meta), checkpoints  # type: ignore[arg-type]


def best_of(values: list[float], **settings: Any) -> list[int]:
    """The steps that were kept as best, of validations at steps 1, 2, ...; 2 and 4 are saved."""
    one, checkpoints = saver(**settings)
    for step, value in enumerate(values, 1):
        best = one.judge(step, {"val/psnr": value})
        one.save(step, State(), regular=step in (2, 4), best=best)  # type: ignore[arg-type]
    assert checkpoints.regular == [step for step in (2, 4) if step <= len(values)]
    return checkpoints.best


def test_the_best_is_the_largest_or_the_smallest() -> None:
    assert best_of([20, 19, 21, 21, 22]) == [1, 3, 5]
    assert best_of([20, 19, 21, 18, 18], best_mode="min") == [1, 2, 4]


def test_what_is_not_finite_is_never_best() -> None:
    assert best_of([math.nan, 20, math.nan, 10, math.inf, 21]) == [2, 6]
    assert best_of([-math.inf, 20], best_mode="min") == [2]


def test_without_a_metric_nothing_is_best() -> None:
    assert best_of([20, 21], best_metric=None) == []


def test_patience_counts_validations_without_a_better_one() -> None:
    run = dataclasses.replace(RUN, checkpoint=dataclasses.replace(SETTINGS))
    loop = dataclasses.replace(RUN.loop, early_stop_patience=2)
    meta = saving.describe(run, "fingerprint")
    assert not saving.patience_over(loop, meta)
    one = saving.Saver(run, Checkpoints(), meta)  # type: ignore[arg-type]
    over = []
    for step, value in enumerate([20, 19, 21, 20, math.nan], 1):
        one.judge(step, {"val/psnr": value})
        over.append(saving.patience_over(loop, meta))
    assert over == [False, False, False, False, True]


def test_a_resumed_run_goes_on_with_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {tmp_path / "run" / "best" / "3"}
    monkeypatch.setattr(checkpoint, "is_complete", there.__contains__)
    best = {"metric": "val/psnr", "mode": "max", "value": 25.0, "step": 3, "validations_since": 1}
    start = tmp_path / "run/checkpoints/4"
    assert saving.carried_best(best, SETTINGS, start, tmp_path / "run") == best
    assert saving.carried_best(best, SETTINGS, start, tmp_path / "other") is None
    for other in ({"best_metric": "val/ssim"}, {"best_mode": "min"}, {"best_metric": None}):
        settings = dataclasses.replace(SETTINGS, **other)
        assert saving.carried_best(best, settings, start, tmp_path / "run") is None
    assert saving.carried_best(None, SETTINGS, start, tmp_path / "run") is None
    there.clear()  # the folder is lost
    assert saving.carried_best(best, SETTINGS, start, tmp_path / "run") is None


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 7}, "seed 7"), ({}, "fingerprint other"), (None, None)]
)
def test_what_a_resume_refuses(change: dict[str, Any] | None, named: str | None) -> None:
    saved = saving.describe(RUN, "other" if change == {} else "same")
    now = saving.describe(dataclasses.replace(RUN, **(change or {})), "same")
    if named is None:
        saving.check_resume(saved, now, Path("4"), print)
        return
    with pytest.raises(InputError, match=named):
        saving.check_resume(saved, now, Path("4"), print)


def test_other_versions_are_said() -> None:
    saved, now = saving.describe(RUN, "same"), saving.describe(RUN, "same")
    saved["versions"] = saved["versions"] | {"grain": "0.0.1"}
    said: list[str] = []
    saving.check_resume(saved, now, Path("4"), said.append)
    assert [line.partition(" -> ")[0] for line in said] == [
        "version differs from the checkpoint: grain: 0.0.1"
    ]
