"""Reports the versions of jaxtrain and its dependencies."""

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
    """Returns package -> version, including Python's."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # for example, run from a checkout
            found[package] = "not installed"
    return found


def line() -> str:
    """Returns all versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


_CHECKOUT = Path(__file__).parent.parent / "pyproject.toml"
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
    found = [match for match in map(_OF_EXTRA.match, needed) if match and match["extra"] == extra]
    if _CHECKOUT.is_file() or not found:
        return f"pip install -e '.[{extra}]'"
    return "pip install " + " ".join(shlex.quote(match["package"]) for match in found)
