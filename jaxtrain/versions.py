"""Versions of this program and of what it stands on."""

import importlib.metadata
import platform

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
