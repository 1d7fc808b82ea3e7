"""The diagrams of docs/architecture.md show what the code is."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def diagrams(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams", checkout / "docs" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_drawn_from_this_code(diagrams: ModuleType, checkout: Path) -> None:
    for name, draw in diagrams.DRAWN.items():
        drawn = (checkout / "docs" / name).read_text()
        assert drawn == draw(), f"docs/{name} is out of date: run python docs/diagrams.py"


def test_the_modules_of_the_flow_exist(diagrams: ModuleType, checkout: Path) -> None:
    modules = [module for stage in diagrams.FLOW for module, _ in stage]
    assert all((checkout / "jaxtrain" / module).is_file() for module in modules)


def test_the_mesh_is_drawn_as_the_rule_shards(diagrams: ModuleType) -> None:
    assert diagrams.stored() == {"params": 4, "optimizer": 4, "none": 1}
