"""The shape of the package: which way imports point, and how long a file may be."""

import ast
import tomllib
from pathlib import Path

import pytest

MAX_LINES = 400
SHORTER = {"jaxtrain/main.py": 119}

# module -> the modules of the package that it must not reach, directly or through others.
FORBIDDEN = {
    "jaxtrain.config": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.mesh": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.optim": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.layers": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.mesh"},
    "jaxtrain.models": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.mesh"},
    "jaxtrain.data": {"jaxtrain.step", "jaxtrain.state", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.state": {"jaxtrain.step", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.step": {"jaxtrain.loop", "jaxtrain.models", "jaxtrain.data"},
    "jaxtrain.checkpoint": {"jaxtrain.step", "jaxtrain.loop", "jaxtrain.models"},
    "jaxtrain.metrics": {"jaxtrain.step", "jaxtrain.loop", "jaxtrain.models"},
}
# What worker processes and the parsing of a command line must not pay for.
LIGHT = {"jaxtrain.main": {"jax", "flax", "optax", "orbax", "grain", "numpy", "tyro"}}


def modules(checkout: Path) -> dict[str, Path]:
    found = {}
    for path in sorted((checkout / "jaxtrain").rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Names that a file imports: everywhere in it, or only where importing it runs them."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_imports_point_one_way(checkout: Path) -> None:
    files = modules(checkout)
    direct = {name: imports(path, top_level=False) & files.keys() for name, path in files.items()}
    for package, forbidden in FORBIDDEN.items():
        members = [name for name in files if inside(name, package)]
        assert members, f"{package} is gone: mend this table"
        for member in members:
            reached, frontier = set(), {member}
            while frontier:
                reached |= frontier
                frontier = set().union(*(direct[name] for name in frontier)) - reached
            wrong = {
                name
                for name in reached
                if any(inside(name, banned) for banned in forbidden) and not inside(name, package)
            }
            assert not wrong, f"{member} reaches {sorted(wrong)}"


@pytest.mark.parametrize("module", LIGHT)
def test_the_command_line_is_light_to_import(checkout: Path, module: str) -> None:
    files = modules(checkout)
    reached, frontier, outside = set(), {module}, set()
    while frontier:
        reached |= frontier
        names = set().union(*(imports(files[name], top_level=True) for name in frontier))
        outside |= {name.split(".")[0] for name in names}
        frontier = (names & files.keys()) - reached
    assert not outside & LIGHT[module]


def test_files_are_short(checkout: Path) -> None:
    folders = [checkout / name for name in ("jaxtrain", "configs", "tests", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 20
    long = {
        str(path.relative_to(checkout)): count
        for path in files
        if (count := len(path.read_text().splitlines()))
        > SHORTER.get(path.relative_to(checkout).as_posix(), MAX_LINES)
    }
    assert not long, f"too long: {long}"
    assert all((checkout / name).exists() for name in SHORTER)


def test_no_file_is_a_drawer(checkout: Path) -> None:
    names = {path.name for path in (checkout / "jaxtrain").rglob("*.py")}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}


def test_every_package_ships(checkout: Path) -> None:
    with (checkout / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (checkout / "jaxtrain").rglob("*.py")}
    packages = {".".join(folder.relative_to(checkout).parts) for folder in folders}
    assert set(listed) == packages | {"jaxtrain.configs"}
