"""What a run has recorded of its validations counts again when it is resumed."""

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training import first_state, run_progress, save_policy
from jaxtrain.training.run_progress import Criterion, RunProgress, unmet_gate

PSNR = Criterion("val/psnr", "max", "5 clips")


def at(step: int, seen: int | None = None) -> Position:
    return Position(step, examples_seen=8 * step if seen is None else seen)


def recorded(directory: Path, *values: float, criterion: Criterion = PSNR) -> RunProgress:
    """Validations at steps 10, 20, ..."""
    progress = RunProgress(directory, criterion)
    for number, value in enumerate(values, 1):
        progress.add(at(10 * number), {"val/psnr": value, "val/ssim": 1 - value / 100})
    progress.write()
    return progress


def best_of(progress: RunProgress) -> tuple[int, int] | None:
    """Returns the step of the best validation and the number of later ones."""
    best = progress.best
    return None if best is None else (best.validated.done, best.validations_since)


def loop(*gates: str, patience: int | None = None) -> config.Loop:
    return dataclasses.replace(config.named("demo").loop, gates=gates, early_stop_patience=patience)


@pytest.mark.parametrize(
    ("done", "expected"), [(0, None), (15, (10, 0)), (20, (20, 0)), (35, (20, 1)), (50, (50, 0))]
)
def test_a_resume_counts_what_belongs_to_its_position(
    tmp_path: Path, done: int, expected: object
) -> None:
    recorded(tmp_path, 20, 25, 24, 23, 26)
    assert best_of(RunProgress.read(tmp_path, PSNR, at(done))) == expected


def test_a_resumed_run_decides_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Random validations, with stops at any step and resumes from any checkpoint before it."""
    for seed in range(100):
        rng = random.Random(seed)
        steps = sorted(rng.sample(range(1, 60), rng.randint(1, 12)))
        values = {
            step: {
                "val/psnr": rng.choice([20 + rng.random(), 25.0, math.nan, math.inf]),
                "val/loss": rng.random(),
            }
            for step in steps
        }
        gates = [f"val/loss < {rng.random():.3f} at {rng.randint(1, 60)}" for _ in range(3)]
        settings = loop(*gates, patience=rng.randint(1, 4))

        def decisions(progress: RunProgress, settings: config.Loop = settings) -> Any:
            best, over = best_of(progress), save_policy.patience_over(settings, progress)
            return best, over, unmet_gate(settings, progress)

        straight, expected = RunProgress(tmp_path, PSNR), {}
        for step in steps:
            straight.add(at(step), values[step])
            expected[step] = decisions(straight)

        directory = tmp_path / str(seed)
        directory.mkdir()
        position, progress = 0, RunProgress(directory, PSNR)
        while position < 60:
            stop = rng.randint(position + 1, 60)
            for step in [step for step in steps if position < step <= stop]:
                progress.add(at(step), values[step])
                progress.write()
                assert decisions(progress) == expected[step], (seed, step)
            if stop == 60:
                break
            position = rng.randint(0, stop) if rng.random() < 0.5 else stop
            progress = RunProgress.read(directory, PSNR, at(position))
            before = [step for step in steps if step <= position]
            if before:
                assert decisions(progress) == expected[before[-1]], (seed, position)
            progress.write()  # as each start does
        assert progress.validations == straight.validations, seed


def test_after_a_rollback_the_same_step_is_another_validation(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, PSNR)
    progress.add(at(20), {"val/psnr": 25.0})
    assert not progress.add(at(20, seen=216), {"val/psnr": 24.0})
    assert best_of(progress) == (20, 1)
    assert progress.has(at(20))
    assert progress.has(at(20, seen=216))
    assert not progress.has(at(20, seen=300))


def test_validations_are_compared_by_the_metric_of_this_start(tmp_path: Path) -> None:
    recorded(tmp_path, 20, 25, 22)
    for criterion, best in (
        (Criterion("val/ssim", "max", "5 clips"), (10, 2)),
        (Criterion("val/ssim", "min", "5 clips"), (20, 1)),
        (Criterion("val/lpips", "min", "5 clips"), None),  # which no validation had
        (Criterion(None, None, "5 clips"), None),
    ):
        progress = RunProgress.read(tmp_path, criterion, at(30))
        assert best_of(progress) == best
        assert not progress.last_was_on_other_examples


def test_the_best_one_of_another_metric_must_have_a_checkpoint(tmp_path: Path) -> None:
    """Only the best one of the metric before has one in ``best/``."""
    recorded(tmp_path, 20, 25, 22)
    said: list[str] = []
    run = config.named("demo").override(
        {"checkpoint.best_metric": "val/ssim", "loop.eval_every": 10, "loop.steps": 100}
    )
    setup: Any = SimpleNamespace(run=run, total=100)
    progress = first_state.progress_of(
        setup,
        tmp_path,
        at(30),
        "5 clips",
        said.append,
        resumed=True,
        has_best=lambda step: step == 20,
    )
    assert best_of(progress) == (20, 0)
    assert not progress.validation_due
    assert said == []
    assert progress.add(at(40), {"val/psnr": 19.0, "val/ssim": 0.76})


def test_validations_on_other_examples_do_not_count(tmp_path: Path) -> None:
    recorded(tmp_path, 20, 25)
    gates = loop("val/psnr > 30 at 15")
    progress = RunProgress.read(tmp_path, Criterion("val/psnr", "max", "1 clip"), at(20))
    assert progress.best is None
    assert unmet_gate(gates, progress) is None
    assert progress.last_was_on_other_examples
    assert progress.add(at(30), {"val/psnr": 0.1})
    assert not progress.last_was_on_other_examples
    assert unmet_gate(gates, progress) is not None
    assert best_of(RunProgress.read(tmp_path, PSNR, at(20))) == (20, 0)


def test_gates_are_values_and_belong_to_the_position(tmp_path: Path) -> None:
    recorded(tmp_path, 20, 25, math.nan)
    for text in ("val/psnr>26.0 at 1_5", "val/psnr >= 2.6e1 at 20", "val/psnr > 026 at 11"):
        progress = RunProgress.read(tmp_path, PSNR, at(20))
        unmet = unmet_gate(loop("val/psnr > 19.0 at 5", text), progress)
        assert unmet is not None
        assert (unmet.step, unmet.value) == (20, 25.0)
        assert unmet_gate(loop(text), RunProgress.read(tmp_path, PSNR, at(19))) is None
    assert unmet_gate(loop("val/psnr > 24 at 15"), RunProgress.read(tmp_path, PSNR, at(30))) is None
    never = unmet_gate(loop("val/psnr < 90 at 21"), RunProgress.read(tmp_path, PSNR, at(30)))
    assert never is not None
    assert math.isnan(never.value)


def test_the_last_equal_step_is_not_after_the_position(tmp_path: Path) -> None:
    progress = recorded(tmp_path, 20)
    progress.last_equal = 12
    progress.write()
    assert RunProgress.read(tmp_path, PSNR, at(15)).last_equal == 12
    assert RunProgress.read(tmp_path, PSNR, at(10)).last_equal == 10


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    recorded(tmp_path, math.nan)
    text = (tmp_path / run_progress.NAME).read_text()
    (entry,) = json.loads(text, parse_constant=pytest.fail)["validations"]
    assert entry["values"] == {"val/psnr": None, "val/ssim": None}


GOOD: dict[str, Any] = {
    "done": 10,
    "seen": 80,
    "examples": "5 clips",
    "values": {"val/psnr": 25.0},
    "kept": True,
}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("{}", "it lacks the validations"),
        ('{"validations": []}', "it lacks the last equal step"),
        ('{"validations": [], "last_equal": "4"}', "it lacks the last equal step"),
        ({name: GOOD[name] for name in GOOD if name != "seen"}, "a validation lacks a field"),
        (GOOD | {"done": True}, "a validation lacks a field"),
        (GOOD | {"values": [25.0]}, "a validation lacks a field"),
        (GOOD | {"values": {"val/psnr": "25"}}, "a value of a validation is not a number"),
        ([], "a validation lacks a field"),
    ],
)
def test_a_damaged_file_means_that_nothing_is_known(tmp_path: Path, text: Any, why: str) -> None:
    if not isinstance(text, str):
        text = json.dumps({"last_equal": None, "validations": [GOOD, text]})
    (tmp_path / run_progress.NAME).write_text(text)
    said: list[str] = []
    progress = RunProgress.read(tmp_path, PSNR, at(10), said.append)
    assert progress.best is None
    (line,) = said
    assert f"progress.json is damaged ({why}): earlier validations do not count" in line


def test_a_missing_file_is_silent_and_an_unreadable_one_is_an_error(tmp_path: Path) -> None:
    assert RunProgress.read(tmp_path, PSNR, at(10), pytest.fail).best is None
    (tmp_path / run_progress.NAME).mkdir()
    with pytest.raises((InputError, RunAgain), match=r"progress\.json cannot be read"):
        RunProgress.read(tmp_path, PSNR, at(10))
