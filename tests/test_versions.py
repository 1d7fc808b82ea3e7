"""Installed versions, and the commands that install missing packages."""

import ast
import importlib.metadata
import importlib.util
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from jaxtrain import versions
from jaxtrain.telemetry import tracker

REQUIRED = [
    "jax>=0.10.2",
    'pyarrow>=18; extra == "parquet"',
    "wandb>=0.31; extra == 'wandb'",
    'requests>=2; python_version >= "3.11" and extra == "wandb"',
    'jax[cuda12]>=0.10.2; extra == "cuda12"',
]


def test_in_a_checkout_the_command_installs_the_extra(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(checkout)
    assert versions.install("parquet") == f"{versions.python()} -m pip install -e '.[parquet]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(versions.install("parquet"))[-1] == f"{checkout}[parquet]"


def test_the_command_is_for_this_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where another environment, or none, is activated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    assert versions.pip("install", "a[b]") == ".venv/bin/python -m pip install 'a[b]'"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env/bin/python"))
    assert versions.pip("install", "a") == "'my env/bin/python' -m pip install a"


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sys, "executable", "/bin/python")
    assert versions.pip("install", "a") == "uv pip install a --python python"


def test_for_a_wheel_the_command_lists_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name jaxtrain may belong to another project on a package index."""
    monkeypatch.setattr(versions, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    pip = f"{versions.python()} -m pip install"
    assert versions.install("parquet") == f"{pip} 'pyarrow>=18'"
    assert versions.install("wandb") == f"{pip} 'wandb>=0.31' 'requests>=2'"
    assert versions.install("cuda12") == f"{pip} 'jax[cuda12]>=0.10.2'"


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
    assert found == {"cuda12", "interop", "parquet", "ray"} | trackers
    assert found <= set(extras)
