"""What belongs to the identity of a side, and what is recorded of it."""

from pathlib import Path

from jaxtrain import config
from jaxtrain.comparison import fit_time, side
from jaxtrain.comparison.identities import Identities

PARTS = {"the config": "1", "the program of the step": "2", "the data": "3"}


def test_what_is_measured_stays(tmp_path: Path) -> None:
    known = Identities(tmp_path / "identities")
    assert known.step_s("a") is None
    assert known.codes("a") == frozenset()
    known.measured("a", 0.25)
    known.examined("a", PARTS, "c1")
    known.examined("a", PARTS, "c2")
    again = Identities(tmp_path / "identities")
    assert again.step_s("a") == 0.25
    assert again.codes("a") == {"c1", "c2"}


def test_what_has_changed_is_named_for_the_same_config(tmp_path: Path) -> None:
    known = Identities(tmp_path)
    known.examined("a", PARTS, "c1")
    assert not known.changed("a", PARTS)
    assert not known.changed("b", PARTS | {"the config": "9"})
    changed = PARTS | {"the data": "4"}
    assert known.changed("b", changed) == ["the data"]


def test_docstrings_and_comments_are_no_code_of_the_data(tmp_path: Path) -> None:
    run = config.load("demo_mlm", [])
    path = tmp_path / "own.py"

    def digest(text: str) -> str:
        path.write_text(text)
        return side._code_of_data({"jaxtrain/data/own.py": path}, run)

    first = digest('"""Loads."""\n\ndef load():\n    """Loads."""\n    return 1\n')
    assert digest('"""Reads."""\n# so\ndef load():\n    """Reads it."""\n    return 1\n') == first
    assert digest('"""Loads."""\n\ndef load():\n    """Loads."""\n    return 2\n') != first


def test_a_run_of_other_length_keeps_the_shape_of_its_schedule() -> None:
    typed = ["--loop.steps", "100", "--loop.epochs", "None"]
    run = config.load("demo_mlm", typed)
    length = fit_time.fitted(run, 100, 250.4)
    assert config.load("demo_mlm", [*typed, *length]).loop.steps == 250
    warm = [*typed, "--optim.warmup_steps", "10", "--optim.warmup_fraction", "None"]
    length = fit_time.fitted(config.load("demo_mlm", warm), 100, 250.4)
    changed = config.load("demo_mlm", [*warm, *length])
    assert (changed.loop.steps, changed.optim.warmup_steps) == (250, 25)
