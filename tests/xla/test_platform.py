"""Machines that have jax's CUDA plugin, but no NVIDIA driver."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.xla import platform


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_PLUGINS", ("json",))  # any installed module
    monkeypatch.setattr(platform, "_DRIVER_FILES", ("/nowhere",))
    monkeypatch.setattr(platform, "_DRIVER_LIBRARY", "libnowhere.so.1")


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_the_cpu_is_chosen() -> None:
    for environment in ({}, {"JAX_PLATFORMS": ""}):
        platform.use_cpu_without_driver(environment)
        assert environment == {"JAX_PLATFORMS": "cpu"}


@pytest.mark.usefixtures("no_driver")
def test_a_choice_of_the_user_and_a_driver_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"JAX_PLATFORMS": "cuda"}
    platform.use_cpu_without_driver(environment)
    assert environment == {"JAX_PLATFORMS": "cuda"}
    for name, value in (
        ("_DRIVER_FILES", ("/nowhere", str(tmp_path))),
        ("_DRIVER_LIBRARY", "libc.so.6"),
        ("_PLUGINS", ("jax_cuda99_plugin",)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(platform, name, value)
            environment = {}
            platform.use_cpu_without_driver(environment)
            assert environment == {}, name


CHOSEN = """
import os, sys
from jaxtrain.xla import platform
assert "jax" not in sys.modules
platform._PLUGINS, platform._DRIVER_FILES, platform._DRIVER_LIBRARY = ("json",), (), "nowhere"
{prepare}
{call}
import jax
print(jax.config.jax_platforms, os.environ["JAX_PLATFORMS"])
"""


@pytest.mark.parametrize(
    ("prepare", "call"),
    [
        ("", "from jaxtrain import main; main.main(['configs', 'show', 'nowhere'])"),
        ("", "import jaxtrain\ntry: jaxtrain.train('nowhere')\nexcept jaxtrain.InputError: pass"),
        (
            "import jax",
            "import jaxtrain\ntry: jaxtrain.load_model('nowhere')\n"
            "except jaxtrain.InputError: pass",
        ),
    ],
)
def test_commands_and_functions_choose_before_jax_looks(prepare: str, call: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHOSEN.format(prepare=prepare, call=call)],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "cpu cpu\n", ended.stderr
