"""Best checkpoints, early stopping, and retries of failed saves."""

import dataclasses
import math
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.checkpoint import saver
from jaxtrain.config.metrics import METRICS, Metric
from jaxtrain.config.run_length import Position
from jaxtrain.errors import RunAgain
from jaxtrain.models.contract import ModelConfig
from jaxtrain.training import save_policy
from jaxtrain.training.run_progress import Criterion, RunProgress
from jaxtrain.training.state import State

RUN = config.named("demo_mlm")
# By definition of each metric; not read from the table that is tested.
LARGER_IS_BETTER = {
    **dict.fromkeys(("accuracy", "psnr", "ssim"), "max"),
    **dict.fromkeys(("loss", "lpips", "pseudo_perplexity", "bits_per_byte"), "min"),
    **dict.fromkeys(("encoder_loss", "reconstruction_loss", "perceptual_loss"), "min"),
    **dict.fromkeys(("encoder_feature_loss", "feature_loss"), "min"),
}
SETTINGS = config.Checkpoint(every=1, keep=1, best_metric="val/psnr")


STATE: Any = State(step=0, examples_seen=0, params={}, extras={}, opt=(), skip_step={})  # type: ignore[arg-type]


class CheckpointSaver:
    """Records which steps were saved. Some saves fail at once, and some in the background.

    Args:
        at_once: numbers of the saves, from 1.
    """

    def __init__(self, at_once: Container[int] = (), later: Container[int] = ()) -> None:
        self.best: list[int] = []
        self.regular: list[int] = []
        self.metas: list[Any] = []
        self._at_once, self._later = at_once, later
        self._failure: saver.SaveFailed | None = None

    def save(self, state: Any, meta: Any, kinds: tuple[str, ...]) -> None:
        self._begin(meta)
        if "checkpoints" in kinds:
            self.regular.append(meta["step"])
        if "best" in kinds:
            self.best.append(meta["step"])

    def _begin(self, meta: Any) -> None:
        assert meta["examples_seen"] - meta["examples_skipped"] == 8 * meta["step"]
        assert self._failure is None, "nobody waited"
        self.metas.append(meta)
        number = len(self.metas)
        failure = saver.SaveFailed(f"save {number} failed", "full", reported=number in self._later)
        if number in self._at_once:
            raise failure
        self._failure = failure if number in self._later else None

    def wait(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            raise failure


def at(step: int) -> Position:
    return Position(step, examples_seen=8 * step)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def progress_of(run: config.Run, directory: Path = Path()) -> RunProgress:
    criterion = Criterion(run.checkpoint.best_metric, config.best_mode(run), "5 clips")
    return RunProgress(directory, criterion)


def policy_of(
    run: config.Run, checkpoints: CheckpointSaver, said: list[str], saved: Any = lambda: None
) -> save_policy.SavePolicy:
    meta = save_policy.describe(run, "fingerprint")
    return save_policy.SavePolicy(checkpoints, meta, progress_of(run), said.append, saved)  # type: ignore[arg-type]


def failing(
    at_once: Container[int] = (), later: Container[int] = ()
) -> tuple[save_policy.SavePolicy, CheckpointSaver, list[str], RunProgress]:
    """Returns a saver with failing saves, its checkpoints, the printed lines, and its progress."""
    run = dataclasses.replace(RUN, checkpoint=SETTINGS)
    checkpoints, said = CheckpointSaver(at_once, later), list[str]()
    one = policy_of(run, checkpoints, said)
    return one, checkpoints, said, one.run_progress


def saver_with(**settings: Any) -> tuple[save_policy.SavePolicy, CheckpointSaver]:
    run = dataclasses.replace(RUN, checkpoint=dataclasses.replace(SETTINGS, **settings))
    checkpoints = CheckpointSaver()
    return policy_of(run, checkpoints, []), checkpoints


def best_of(values: list[float], **settings: Any) -> list[int]:
    """Returns the steps kept as best, with validations at 1, 2, ... and saves at 2 and 4."""
    one, checkpoints = saver_with(**settings)
    for step, value in enumerate(values, 1):
        best = one.judge(at(step), {settings.get("best_metric", "val/psnr"): value})
        one.save(at(step), STATE, regular=step in (2, 4), best=best)
    assert checkpoints.regular == [step for step in (2, 4) if step <= len(values)]
    return checkpoints.best


def best_step(progress: RunProgress) -> int:
    assert progress.best is not None
    return progress.best.validated.done


def test_each_complete_save_is_reported() -> None:
    """Then output/latest is the run that saved last, even if two run at the same time."""
    run = dataclasses.replace(RUN, checkpoint=SETTINGS)
    said: list[str] = []
    one = policy_of(run, CheckpointSaver({1}, {2}), said, lambda: said.append("!"))
    for step in (10, 20, 30):
        one.save(at(step), STATE)
        assert "!" not in said  # 10 and 20 fail; 30 was not waited for
    one.save(at(40), STATE)
    assert said.count("!") == 1
    one.save(at(50), STATE)
    assert said.count("!") == 2
    one.finish(at(60), STATE)
    assert said.count("!") == 4


def test_the_best_value_is_the_largest_or_the_smallest_and_never_nan_or_inf() -> None:
    assert best_of([20, 19, 21, 21, 22]) == [1, 3, 5]
    assert best_of([20, 19, 21, 18, 18], best_metric="val/loss") == [1, 2, 4]
    assert best_of([math.nan, 20, math.nan, 10, math.inf, 21]) == [2, 6]
    assert best_of([-math.inf, 20], best_metric="val/loss") == [2]


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.better])
def test_only_the_metric_is_set_and_the_best_step_is_kept(name: str) -> None:
    """Five histories: rising, falling, with a peak, with a trough, and without order."""
    worst_first = {"max": 1, "min": -1}[LARGER_IS_BETTER[name]]
    for history in ([1, 2, 3, 4], [4, 3, 2, 1], [1, 4, 2, 3], [3, 1, 2, 4], [2, 4, 1, 3]):
        kept = best_of([float(value) for value in history], best_metric=f"val/{name}")
        assert kept[-1] == 1 + max(range(4), key=lambda at: worst_first * history[at])


def test_a_model_names_the_direction_of_its_own_metric() -> None:
    class Model(ModelConfig):
        def metrics(self) -> dict[str, Metric]:
            return {"overlap": Metric(better="max")}

    settings = dataclasses.replace(SETTINGS, best_metric="val/overlap")
    run = dataclasses.replace(RUN, checkpoint=settings, model=Model())
    assert config.best_mode(run) == "max"
    unknown = dataclasses.replace(run, model=RUN.model)
    assert config.best_mode(unknown) is None


def test_patience_counts_validations_without_improvement() -> None:
    run = dataclasses.replace(RUN, checkpoint=SETTINGS)
    loop = dataclasses.replace(RUN.loop, early_stop_patience=2)
    one = policy_of(run, CheckpointSaver(), [])
    assert not save_policy.patience_over(loop, one.run_progress)
    over = []
    for step, value in enumerate([20, 19, 21, 20, math.nan], 1):
        one.judge(at(step), {"val/psnr": value})
        over.append(save_policy.patience_over(loop, one.run_progress))
    assert over == [False, False, False, False, True]


def test_a_failed_save_is_reported_once_and_the_next_one_is_tried() -> None:
    one, checkpoints, said, _ = failing(at_once={1, 4}, later={2, 5})
    for step in (10, 20, 30, 40, 50, 60):  # 30 succeeds
        one.save(at(step), STATE)
    assert [meta["step"] for meta in checkpoints.metas] == [10, 20, 30, 40, 50, 60]
    # The background thread has already reported its failure.
    assert said == ["warning: save 1 failed", "warning: save 4 failed"]


@pytest.mark.parametrize(
    ("at_once", "later", "raised_by", "saves"),
    [({1, 2, 3}, (), 30, 3), ((), {1, 2, 3}, 40, 3), ({1, 3}, {2}, 30, 3)],
)
def test_three_failures_in_a_row_end_the_run(
    at_once: Container[int], later: Container[int], raised_by: int, saves: int
) -> None:
    one, checkpoints, _, _ = failing(at_once, later)
    for step in range(10, raised_by, 10):
        one.save(at(step), STATE)
    with pytest.raises(RunAgain, match=r"^3 saves in a row have failed: save 3 failed; .*latest"):
        one.save(at(raised_by), STATE)
    assert len(checkpoints.metas) == saves  # no other save begins


@pytest.mark.parametrize(("at_once", "later"), [({1, 2}, ()), ((), {1, 2})])
def test_the_last_save_is_tried_three_times(
    monkeypatch: pytest.MonkeyPatch, at_once: Container[int], later: Container[int]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(sleep=slept.append))
    one, checkpoints, said, _ = failing(at_once, later)
    one.finish(at(10), STATE)
    assert [meta["step"] for meta in checkpoints.metas] == [10, 10, 10]
    assert slept == [5.0, 5.0]
    assert said.count("retrying the last save in 5 s") == 2


def test_a_last_save_that_always_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(sleep=lambda seconds: None))
    one, checkpoints, _, _ = failing(later={2, 3, 4})
    one.save(at(5), STATE)
    with pytest.raises(RunAgain, match=r"^the last state is not saved: save 4 failed; .*latest$"):
        one.finish(at(10), STATE)
    assert len(checkpoints.metas) == 4


def test_a_best_state_that_was_not_saved_does_not_count() -> None:
    one, _, _, progress = failing(later={2})
    for step, value in ((1, 20.0), (2, 25.0)):
        one.save(at(step), STATE, best=one.judge(at(step), {"val/psnr": value}))
    assert best_step(progress) == 2
    one.save(at(3), STATE)
    assert best_step(progress) == 1  # the one on the disk
    assert one.judge(at(4), {"val/psnr": 22.0})


def test_a_retry_of_the_best_state_saves_it_as_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(sleep=lambda seconds: None))
    one, checkpoints, _, progress = failing(later={2, 3})
    for step, value in ((6, 19.0), (7, 20.0)):
        one.save(at(step), STATE, best=one.judge(at(step), {"val/psnr": value}))
    one.finish(at(7), STATE)
    assert checkpoints.best == [6, 7, 7, 7]
    assert best_step(progress) == 7


def test_another_state_of_the_same_step_is_not_the_best() -> None:
    """After a rollback, the same step is reached again with a worse validation."""
    one, checkpoints = saver_with()
    one.save(at(20), STATE, regular=False, best=one.judge(at(20), {"val/psnr": 25.0}))
    again = Position(20, examples_seen=8 * 27, skipped=8 * 7)
    assert not one.judge(again, {"val/psnr": 20.0})
    one.finish(again, STATE)
    assert checkpoints.best == [20]
    assert best_step(one.run_progress) == 20
    assert one.run_progress.best is not None
    assert one.run_progress.best.validated.values == {"val/psnr": 25.0}
    assert checkpoints.metas[-1]["examples_skipped"] == 8 * 7
