"""Reports the versions of jaxtrain and its dependencies, and how to install missing ones."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
from pathlib import Path

from jaxtrain.errors import shortest_path

PACKAGES = (
    "jaxtrain",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "av",
    "tokenizers",
    "numpy",
)


def versions() -> dict[str, str]:
    """Returns package -> version, including Python's."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # for example, run from a checkout
            by_package[package] = "not installed"
    return by_package


def line() -> str:
    """Returns all versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


_CHECKOUT = Path(__file__).resolve().parent.parent
_OF_EXTRA = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install(extra: str) -> str:
    """Returns the command that installs an extra, for messages.

    From a checkout, it installs the extra. For an installed wheel, it lists the packages, because
    the package index may have another project under the name of jaxtrain.

    Args:
        extra: as in pyproject.toml, for example ``hf``.
    """
    try:
        needed = importlib.metadata.requires("jaxtrain") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    of_extra = [
        match for match in map(_OF_EXTRA.match, needed) if match and match["extra"] == extra
    ]
    if (_CHECKOUT / "pyproject.toml").is_file() or not of_extra:
        checkout = "." if Path.cwd() == _CHECKOUT else shortest_path(str(_CHECKOUT))
        return pip("install", "-e", f"{checkout}[{extra}]")
    return pip("install", *(match["package"] for match in of_extra))


def pip(command: str, *arguments: str) -> str:
    """Returns a command of pip for this environment, which need not be activated.

    Args:
        command: such as ``install``.
        arguments: of the command, not quoted.
    """
    words = shlex.join((command, *arguments))
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):  # made by uv
        return f"uv pip {words} --python {python()}"
    return f"{python()} -m pip {words}"


def python() -> str:
    """Returns the shortest name by which a shell finds this Python, quoted."""
    on_path = shutil.which("python")
    if on_path and os.path.abspath(on_path) == sys.executable:
        return "python"
    return shlex.quote(shortest_path(sys.executable))
