"""What belongs to the identity of a side, and what is recorded of it."""

from pathlib import Path

import program
import pytest
from comparison.own_config import OWN

from jaxtrain import config
from jaxtrain.comparison import side
from jaxtrain.comparison.identities import Identities

PARTS = {"the config": "1", "the program of the step": "2", "the data": "3"}


def test_what_is_measured_stays(tmp_path: Path) -> None:
    known = Identities(tmp_path / "identities")
    assert known.step_s("p") is None
    assert known.codes("a") == frozenset()
    known.measured("p", 0.25)
    known.examined("a", PARTS, "c1")
    known.examined("a", PARTS, "c2")
    again = Identities(tmp_path / "identities")
    assert again.step_s("p") == 0.25
    assert again.codes("a") == {"c1", "c2"}


def test_what_has_changed_is_named_for_the_same_config(tmp_path: Path) -> None:
    known = Identities(tmp_path)
    known.examined("a", PARTS, "c1")
    assert not known.changed("a", PARTS)
    assert not known.changed("b", PARTS | {"the config": "9"})
    changed = PARTS | {"the data": "4"}
    assert known.changed("b", changed) == ["the data"]


@pytest.mark.long
def test_what_changes_a_run_changes_its_identity_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_corpus(tmp_path)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "own.py"
    typed = [*program.TINY_MLM[2:], "--loop.steps", "4", "--mesh.fsdp", "8", "--loop.eval_every"]
    typed += ["4", "--data.path", str(tmp_path / "corpus")]

    def probed(text: str, *more: str) -> side._Probe:
        own.write_text(text)
        return side._Probe(config.load(str(own), [*typed, *more]), lambda line: None)

    def changed(probe: side._Probe) -> list[str]:
        return [name for name in first.parts if first.parts[name] != probe.parts[name]]

    first = probed(OWN)
    edited = probed(OWN.replace("Builds it.", "Builds the module.\n\n        Of a model."))
    assert not changed(edited)
    assert edited.code != first.code  # of the files, which are read again
    assert not changed(probed(OWN, "--seed", "7"))  # it varies between pairs
    programs = [f"the program of the {name}" for name in ("step", "first state", "validation")]
    assert changed(probed(OWN.replace("FF = 64", "FF = 48"))) == programs
    rate = probed(OWN, "--optim.peak_lr", "0.02")
    assert changed(rate) == ["the config", "the schedule"]
    assert rate.program == first.program  # its steps take as long
    assert probed(OWN, "--optim.b2", "0.9").program != first.program
    for path in (tmp_path / "corpus").rglob("*.txt"):
        path.write_text(path.read_text().upper())
    assert changed(probed(OWN)) == ["the data"]


def test_docstrings_and_comments_of_the_data_do_not_count(tmp_path: Path) -> None:
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
    length = side.fitted(run, 100, 250.4)
    assert config.load("demo_mlm", [*typed, *length]).loop.steps == 250
    warm = [*typed, "--optim.warmup_steps", "10", "--optim.warmup_fraction", "None"]
    length = side.fitted(config.load("demo_mlm", warm), 100, 250.4)
    changed = config.load("demo_mlm", [*warm, *length])
    assert (changed.loop.steps, changed.optim.warmup_steps) == (250, 25)
