"""CUDA's libraries as wheels: what jax's plugin wants, and a torch that wants something else."""

from collections.abc import Iterator

from jaxtrain.doctor import requirements
from jaxtrain.doctor.finding import Finding, ok, problem, warning
from jaxtrain.doctor.requirements import Find

_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_NAMED = {"CUDA": "cuda-runtime", "cuDNN": "cudnn", "NCCL": "nccl"}
_PREFIX = "nvidia-"
# Wheels of both CUDA versions put these libraries in the same folder (nvidia/nccl, nvidia/cudnn).
_SAME_FOLDER = ("nccl", "cudnn", "nvshmem")


def cuda_major(find: Find) -> int | None:
    """CUDA's major version that jax's plugin is for; None without a plugin."""
    return next((major for major, name in _PLUGINS.items() if find(name)), None)


def plugin(find: Find = requirements.installed) -> Iterator[Finding]:
    """jax, its plugin for GPUs, and the libraries that the plugin's own metadata asks for."""
    there = [name for name in _PLUGINS.values() if find(name)]
    if not there:
        yield ok("no CUDA plugin of jax is installed: the CPU only")
        return
    if len(there) > 1:
        yield problem(
            f"{' and '.join(there)} are both installed: each brings the same platform 'cuda'",
            f"remove the one that does not fit the driver, as: pip uninstall {there[0]}",
        )
        return
    name, extra = there[0], there[0].removeprefix("jax-").removesuffix("-plugin")
    package, jaxlib = find(name), find("jaxlib")
    assert package is not None
    if jaxlib is None or jaxlib.version != package.version:
        yield problem(
            f"{name} is {package.version}, jaxlib is {jaxlib.version if jaxlib else 'missing'}: "
            "jax refuses a plugin of another version",
            f"pip install --upgrade 'jax[{extra}]'",
        )
        return
    wanted = package.pins(_PREFIX)
    found = {wheel: one.version for wheel in wanted if (one := find(wheel)) is not None}
    if not found:
        yield warning(
            f"{name} {package.version} without NVIDIA's wheels: it takes the CUDA, cuDNN and NCCL "
            "that lie on the library path, of versions unknown here",
            f"if that is not meant: pip install 'jax[{extra}]'",
        )
        return
    missing = [wheel for wheel in wanted if wheel not in found]
    if missing:
        yield problem(
            f"{name} {package.version} wants {', '.join(missing)}, not installed",
            f"pip install 'jax[{extra}]'",
        )
    wrong = {w: v for w, v in found.items() if not requirements.satisfies(v, wanted[w])}
    for wheel, version in wrong.items():
        yield problem(
            f"{wheel} is {version}, {name} {package.version} wants {wanted[wheel]}",
            f"pip install '{wheel}{wanted[wheel]}'",
        )
    if not missing and not wrong:
        yield ok(f"{_said(found)}: as {name} {package.version} wants")


def torch(find: Find = requirements.installed) -> Iterator[Finding]:
    """Whether a torch in the same environment pins NVIDIA's wheels to what jax cannot use."""
    package, major = find("torch"), cuda_major(find)
    if package is None:
        yield ok("no torch in this environment")
        return
    pins = package.pins(_PREFIX)
    if not pins or major is None:
        why = "it brings no NVIDIA wheels" if not pins else "jax uses no CUDA here"
        yield ok(f"torch {package.version} does not clash: {why}")
        return
    apart = "give torch an environment of its own (python -m venv), or its build for the CPU"
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
            f"torch {package.version} is for another CUDA than {name}: {', '.join(shared)} write "
            "the same files",
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
        f"{wheel} is {one.version}, torch wants {pin}"
        for wheel, pin in pins.items()
        if (one := find(wheel)) is not None and not requirements.satisfies(one.version, pin)
    ]
    if drifted and not clashing:
        shown = "; ".join(drifted[:2]) + (f"; {len(drifted) - 2} more" if drifted[2:] else "")
        yield warning(
            f"torch {package.version} may not work, jax does: {shown}", apart + ", if it is used"
        )
    if not (shared or clashing or drifted):
        yield ok(
            f"torch {package.version} pins the NVIDIA wheels that are here, and jax takes them"
        )


def _pinned(clauses: str) -> str:
    """The version of "==9.1.0.70"; empty for any other clause."""
    return clauses.removeprefix("==").strip() if clauses.startswith("==") else ""


def _said(found: dict[str, str]) -> str:
    """The three libraries that people ask for."""
    shown = []
    for label, part in _NAMED.items():
        version = next((v for wheel, v in found.items() if wheel.startswith(_PREFIX + part)), None)
        if version is not None:
            shown.append(f"{label} {version}")
    return ", ".join(shown)
