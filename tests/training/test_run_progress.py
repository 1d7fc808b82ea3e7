"""What a run has recorded of its validations counts again when it is resumed."""

from pathlib import Path

import pytest

from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training import run_progress
from jaxtrain.training.run_progress import Criterion, RunProgress

PSNR = Criterion("val/psnr", "max", "5 clips")


def at(step: int, seen: int | None = None) -> Position:
    return Position(step, seen=8 * step if seen is None else seen)


def recorded(directory: Path, *values: float, criterion: Criterion = PSNR) -> RunProgress:
    """Validations at steps 10, 20, ..."""
    progress = RunProgress(directory, criterion)
    for number, value in enumerate(values, 1):
        progress.add(at(10 * number), value)
    progress.write()
    return progress


def best_of(progress: RunProgress) -> tuple[int, int] | None:
    """Returns the step of the best validation and the number of later ones."""
    best = progress.best
    return None if best is None else (best.validated.done, best.validations_since)


@pytest.mark.parametrize(
    ("done", "expected"), [(0, None), (15, (10, 0)), (20, (20, 0)), (35, (20, 1)), (50, (50, 0))]
)
def test_a_resume_counts_what_belongs_to_its_position(
    tmp_path: Path, done: int, expected: object
) -> None:
    recorded(tmp_path, 20, 25, 24, 23, 26)
    assert best_of(RunProgress.read(tmp_path, PSNR, at(done))) == expected


def test_a_resumed_run_is_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    values = [20.1, 25, 24, float("nan"), 26, 1e-3, 26]
    straight = recorded(tmp_path, *values)
    for stop in range(len(values)):
        directory = tmp_path / str(stop)
        directory.mkdir()
        recorded(directory, *values)  # the file may be newer than the checkpoint
        resumed = RunProgress.read(directory, PSNR, at(10 * stop))
        for number, value in enumerate(values[stop:], stop + 1):
            resumed.add(at(10 * number), value)
        assert resumed.best == straight.best


def test_after_a_rollback_the_same_step_is_another_validation(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, PSNR)
    progress.add(at(20), 25.0)
    assert not progress.add(at(20, seen=216), 24.0)
    assert best_of(progress) == (20, 1)
    assert progress.has(at(20))
    assert progress.has(at(20, seen=216))
    assert not progress.has(at(20, seen=300))


def test_other_validations_do_not_count(tmp_path: Path) -> None:
    recorded(tmp_path, 20, 25)
    for other in (
        Criterion("val/ssim", "max", "5 clips"),
        Criterion("val/psnr", "min", "5 clips"),
        Criterion("val/psnr", "max", "1 clip"),
    ):
        progress = RunProgress.read(tmp_path, other, at(20))
        assert progress.best is None
        assert progress.last_by_another_criterion is not None
        assert progress.add(at(30), 0.1)
        assert progress.last_by_another_criterion is None
    back = RunProgress.read(tmp_path, PSNR, at(20))
    assert best_of(back) == (20, 0)


def test_the_last_equal_step_is_not_after_the_position(tmp_path: Path) -> None:
    progress = recorded(tmp_path, 20)
    progress.last_equal = 12
    progress.write()
    assert RunProgress.read(tmp_path, PSNR, at(15)).last_equal == 12
    assert RunProgress.read(tmp_path, PSNR, at(10)).last_equal == 10


def test_a_missing_or_damaged_file_means_that_nothing_is_known(tmp_path: Path) -> None:
    assert RunProgress.read(tmp_path, PSNR, at(10)).best is None
    (tmp_path / run_progress.NAME).write_text("{")
    said: list[str] = []
    assert RunProgress.read(tmp_path, PSNR, at(10), said.append).best is None
    assert "progress.json is damaged (it is not JSON)" in said[0]
    (tmp_path / run_progress.NAME).unlink()
    (tmp_path / run_progress.NAME).mkdir()
    with pytest.raises((InputError, RunAgain), match=r"progress\.json cannot be read"):
        RunProgress.read(tmp_path, PSNR, at(10))
