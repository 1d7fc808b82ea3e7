"""Checks the wheels of CUDA's libraries against jax's plugin, and against an installed torch."""

from collections.abc import Iterator

from jaxtrain import versions
from jaxtrain.doctor import requirements
from jaxtrain.doctor.finding import Finding, ok, problem, warning
from jaxtrain.doctor.requirements import Find

_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_NAMED = {"CUDA": "cuda-runtime", "cuDNN": "cudnn", "NCCL": "nccl"}
_PREFIX = "nvidia-"
# Wheels of both CUDA versions put these libraries in the same folder (nvidia/nccl, nvidia/cudnn).
_SAME_FOLDER = ("nccl", "cudnn", "nvshmem")


def cuda_major(find: Find) -> int | None:
    """Returns the major CUDA version of jax's plugin; None without a plugin."""
    return next((major for major, name in _PLUGINS.items() if find(name)), None)


def plugin(find: Find = requirements.installed) -> Iterator[Finding]:
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
    wanted = package.pins(_PREFIX)
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
    wrong = {w: v for w, v in found.items() if not requirements.satisfies(v, wanted[w])}
    for wheel, version in wrong.items():
        yield problem(
            f"{wheel} is {version}, {name} {package.version} requires {wanted[wheel]}",
            versions.pip("install", f"{wheel}{wanted[wheel]}"),
        )
    if not missing and not wrong:
        yield ok(f"{_listed(found)}: as {name} {package.version} requires")


def torch(find: Find = requirements.installed) -> Iterator[Finding]:
    """Checks whether a torch in this environment pins NVIDIA wheels that jax cannot use."""
    package, major = find("torch"), cuda_major(find)
    if package is None:
        yield ok("no torch in this environment")
        return
    pins = package.pins(_PREFIX)
    if not pins or major is None:
        why = "it requires no NVIDIA wheels" if not pins else "jax does not use CUDA here"
        yield ok(f"torch {package.version} does not conflict with jax: {why}")
        return
    apart = "install torch in a separate environment (python -m venv), or its CPU build"
    name = _PLUGINS[major]
    plugin = find(name)
    assert plugin is not None
    wanted = plugin.pins(_PREFIX)
    shared = [
        f"{_PREFIX}{one}-cu{major} and {_PREFIX}{one}-cu{other}"
        for one in _SAME_FOLDER
        for other in _PLUGINS
        if other != major and all(find(f"{_PREFIX}{one}-cu{m}") for m in (major, other))
    ]
    if shared:
        yield problem(
            f"torch {package.version} is for another CUDA version than {name}: "
            f"{', '.join(shared)} install the same files",
            apart,
        )
    clashing = [
        f"{wheel}{pin} (jax: {wanted[wheel]})"
        for wheel, pin in pins.items()
        if wheel in wanted
        and _pinned(pin)
        and not requirements.satisfies(_pinned(pin), wanted[wheel])
    ]
    if clashing:
        yield problem(
            f"torch {package.version} pins what {name} {plugin.version} cannot use: "
            f"{', '.join(clashing)}",
            apart,
        )
    drifted = [
        f"{wheel} is {one.version}, torch requires {pin}"
        for wheel, pin in pins.items()
        if (one := find(wheel)) is not None and not requirements.satisfies(one.version, pin)
    ]
    if drifted and not clashing:
        shown = "; ".join(drifted[:2]) + (f"; {len(drifted) - 2} more" if drifted[2:] else "")
        yield warning(
            f"torch {package.version} may not work, but jax does: {shown}",
            apart + ", if you use it",
        )
    if not (shared or clashing or drifted):
        yield ok(f"torch {package.version} pins the installed NVIDIA wheels, and jax accepts them")


def _pinned(clauses: str) -> str:
    """Returns the version of "==9.1.0.70"; empty for any other clause."""
    return clauses.removeprefix("==").strip() if clauses.startswith("==") else ""


def _listed(found: dict[str, str]) -> str:
    """Lists the versions of the three main libraries."""
    shown = []
    for label, part in _NAMED.items():
        version = next((v for wheel, v in found.items() if wheel.startswith(_PREFIX + part)), None)
        if version is not None:
            shown.append(f"{label} {version}")
    return ", ".join(shown)
