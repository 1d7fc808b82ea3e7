"""The reference pages are what docs/reference.py writes, and describe all that there is."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from jaxtrain import main
from jaxtrain.cli import commands
from jaxtrain.config.metrics import METRICS


@pytest.fixture(scope="module")
def reference(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", checkout / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert reference.pages()
    for page in reference.pages():
        text = page.read_text()
        assert text == reference.written(text), f"{page}: run python docs/reference.py"


def test_the_core_can_be_read_in_one_sitting(reference: ModuleType, checkout: Path) -> None:
    lines = sum(
        len((checkout / "jaxtrain" / name).read_text().splitlines()) for name in reference.CORE
    )
    assert lines <= 6000, "move what is not the core out of it"


def test_a_field_that_is_added_pays_with_one_that_goes(reference: ModuleType) -> None:
    assert len(re.findall(r"^\| `", reference.config_fields(), re.MULTILINE)) <= 200


def test_every_generated_part_has_its_place(reference: ModuleType) -> None:
    placed = re.findall(
        r"<!-- ([\w-]+): generated", "".join(page.read_text() for page in reference.pages())
    )
    assert sorted(placed) == sorted(reference.GENERATED)


def test_the_site_has_the_help_of_every_command(reference: ModuleType) -> None:
    page = (reference.DOCS / "reference" / "commands.md").read_text()
    headings = re.findall(r"^## (.+)$", reference.written(page, site=True), re.MULTILINE)
    assert {*main.COMMANDS, *commands.TABLE} <= {*headings}


def test_every_metric_that_the_code_names_is_described(checkout: Path) -> None:
    named = {
        name
        for path in (checkout / "jaxtrain").rglob("*.py")
        for name in re.findall(r'"(?:train|val)/(\w+)"', path.read_text())
    }
    assert len(named) > 15
    assert named <= set(METRICS)
