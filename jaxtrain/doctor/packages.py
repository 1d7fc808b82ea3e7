"""Checks the wheels of CUDA's libraries against jax's plugin, without importing them."""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator

from packaging.requirements import Requirement

from jaxtrain import versions
from jaxtrain.doctor.finding import Finding, ok, problem, warning

_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_NAMED = {"CUDA": "cuda-runtime", "cuDNN": "cudnn", "NCCL": "nccl"}
_PREFIX = "nvidia-"


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        version: the version in its metadata.
        requires: its ``Requires-Dist`` lines.
    """

    version: str
    requires: tuple[str, ...] = ()


Find = Callable[[str], Package | None]


def installed(name: str) -> Package | None:
    """Finds a package of this environment; None if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def cuda_major(find: Find) -> int | None:
    """Returns the major CUDA version of jax's plugin; None without a plugin."""
    return next((major for major, name in _PLUGINS.items() if find(name)), None)


def plugin(find: Find = installed) -> Iterator[Finding]:
    """Checks jax, its GPU plugin, and the libraries that the plugin's metadata requires."""
    there = [name for name in _PLUGINS.values() if find(name)]
    if not there:
        yield ok("jax has no CUDA plugin installed: it uses only the CPU")
        return
    if len(there) > 1:
        yield problem(
            f"{' and '.join(there)} are both installed: each provides the platform 'cuda'",
            "remove the one that does not fit the driver, for example: "
            f"{versions.pip('uninstall', there[0])}",
        )
        return
    name, extra = there[0], there[0].removeprefix("jax-").removesuffix("-plugin")
    package, jaxlib = find(name), find("jaxlib")
    assert package is not None
    if jaxlib is None or jaxlib.version != package.version:
        yield problem(
            f"{name} is {package.version}, jaxlib is {jaxlib.version if jaxlib else 'missing'}: "
            "jax refuses a plugin of another version",
            versions.pip("install", "--upgrade", f"jax[{extra}]"),
        )
        return
    needed = [Requirement(line) for line in package.requires]
    wanted = {one.name: one.specifier for one in needed if one.name.startswith(_PREFIX)}
    found = {wheel: one.version for wheel in wanted if (one := find(wheel)) is not None}
    if not found:
        yield warning(
            f"{name} {package.version} without NVIDIA's wheels: it uses CUDA, cuDNN, and NCCL from "
            "the library path, in unknown versions",
            f"if this is not intended: {versions.pip('install', f'jax[{extra}]')}",
        )
        return
    missing = [wheel for wheel in wanted if wheel not in found]
    if missing:
        yield problem(
            f"{name} {package.version} requires {', '.join(missing)}, not installed",
            versions.pip("install", f"jax[{extra}]"),
        )
    wrong = {w: v for w, v in found.items() if not wanted[w].contains(v, prereleases=True)}
    for wheel, version in wrong.items():
        yield problem(
            f"{wheel} is {version}, {name} {package.version} requires {wanted[wheel]}",
            versions.pip("install", f"{wheel}{wanted[wheel]}"),
        )
    if not missing and not wrong:
        yield ok(f"{_listed(found)}: as {name} {package.version} requires")


def _listed(found: dict[str, str]) -> str:
    """Lists the versions of the three main libraries."""
    shown = []
    for label, part in _NAMED.items():
        version = next((v for wheel, v in found.items() if wheel.startswith(_PREFIX + part)), None)
        if version is not None:
            shown.append(f"{label} {version}")
    return ", ".join(shown)
