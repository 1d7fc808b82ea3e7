"""Versions of this program and of what it stands on."""

import importlib.metadata
import platform
import re
import shlex
from pathlib import Path

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
    """Package -> version, Python's included."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout, say
            found[package] = "not installed"
    return found


def line() -> str:
    """All versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


_CHECKOUT = Path(__file__).parent.parent / "pyproject.toml"
_OF_EXTRA = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install(extra: str) -> str:
    """The command that installs an extra of this program, for messages.

    From a checkout it names the extra. An installed wheel has the packages themselves named: the
    index may have something else under the name of this program.

    Args:
        extra: as in pyproject.toml, for example ``hf``.
    """
    try:
        needed = importlib.metadata.requires("jaxtrain") or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    found = [match for match in map(_OF_EXTRA.match, needed) if match and match["extra"] == extra]
    if _CHECKOUT.is_file() or not found:
        return f"pip install -e '.[{extra}]'"
    return "pip install " + " ".join(shlex.quote(match["package"]) for match in found)
