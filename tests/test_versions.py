"""Installed versions, and the commands that install missing packages."""

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest

from jaxtrain import versions
from jaxtrain.telemetry import tracker

REQUIRED = [
    "jax>=0.10.2",
    'datasets>=5.2; extra == "hf"',
    "fsspec>=2025.2; extra == 'cloud'",
    'aiohttp>=3.11; python_version >= "3.11" and extra == "cloud"',
    'jax[cuda12]>=0.10.2; extra == "cuda12"',
]


def test_in_a_checkout_the_command_installs_the_extra() -> None:
    assert versions.install("hf") == "pip install -e '.[hf]'"


def test_for_a_wheel_the_command_lists_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name jaxtrain may belong to another project on a package index."""
    monkeypatch.setattr(versions, "_CHECKOUT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    assert versions.install("hf") == "pip install 'datasets>=5.2'"
    assert versions.install("cloud") == "pip install 'fsspec>=2025.2' 'aiohttp>=3.11'"
    assert versions.install("cuda12") == "pip install 'jax[cuda12]>=0.10.2'"


def test_the_extras_in_messages_exist(checkout: Path) -> None:
    found = set()
    for path in (checkout / "jaxtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("versions.install"):
                extra = node.args[0]
                named = isinstance(extra, ast.Constant)  # otherwise by the name of a tracker
                found |= {ast.literal_eval(extra)} if named else set(tracker.TRACKERS)
    extras = importlib.metadata.metadata("jaxtrain").get_all("Provides-Extra") or []
    trackers = {"wandb", "trackio", "mlflow"}
    assert found == {"hf", "cloud", "cuda12", "interop", "parquet"} | trackers
    assert found <= set(extras)


def test_only_versions_writes_these_commands(checkout: Path) -> None:
    for path in (checkout / "jaxtrain").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"pip install[^\n]*jaxtrain", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr) and path.name != "versions.py":
                assert "pip install -e" not in ast.unparse(node), path
