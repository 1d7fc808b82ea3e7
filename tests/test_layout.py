"""The structure of the package: the direction of imports, and names that choose code."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from jaxtrain.telemetry import tracker

# The packages and top-level modules; each imports only those after it.
ORDER = (
    *("__main__", "main", "supervisor", "cli", "comparison", "doctor", "bench", "inference"),
    *(
        "planning",
        "training",
        "reporting",
        "interop",
        "data",
        "jobs",
        "machine",
        "telemetry",
        "cost",
        "checkpoint",
        "distributed",
    ),
    *("optim", "models", "sharding", "xla", "ops", "config", "terminal", "storage", "versions"),
    *("formats", "errors"),
)
# Modules that are named otherwise than their distribution. jax requires one version of jaxlib.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "backports": "backports.zstd",
    "jaxlib": "jax",
    "orbax": "orbax-checkpoint",
    "pynvml": "nvidia-ml-py",
    "yaml": "PyYAML",
}
NEWER = {"compression"}  # in Python's library since 3.14
# Imports that would slow down worker processes and the parsing of a command line.
_JAX = {"jax", "flax", "optax", "orbax", "grain"}
LIGHT = {
    "jaxtrain.main": _JAX | {"numpy", "rich"},
    # For ssh, a machine that only starts runs on others needs no packages.
    "jaxtrain.supervisor": _JAX | {"numpy", "obstore", "psutil", "rich"},
    # Commands that check their input before they load jax and a model.
    **{f"jaxtrain.cli.{name}": _JAX for name in ("video", "evaluate")},
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(checkout: Path) -> dict[str, Path]:
    found = {}
    for path in sorted((checkout / "jaxtrain").rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Returns the names that a file imports, anywhere or only at its top level."""
    tree = parsed(path)
    nodes = tree.body if top_level else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


TRACKER_FILES = {f"tracker_{name}" for name in tracker.TRACKERS}


def imported_packages(checkout: Path, *, top_level: bool) -> set[str]:
    """Returns the distributions that jaxtrain and its configs import, as the index names them."""
    found = {
        name.partition(".")[0]
        for folder in ("jaxtrain", "configs")
        for path in (checkout / folder).rglob("*.py")
        if not (top_level and path.stem in TRACKER_FILES)  # imported only for that tracker
        for name in imports(path, top_level=top_level)
    }
    return {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - NEWER}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def package_of(name: str) -> str:
    return name.rpartition(".")[0]


def part(name: str) -> str:
    """Returns the package or top-level module: the second part of a dotted name."""
    return name.split(".")[1]


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Walks a file, without what only a type checker imports."""
    if not (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
        yield tree
        for node in ast.iter_child_nodes(tree):
            yield from at_run_time(node)


def direct_imports(
    files: dict[str, Path], walk: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk
) -> dict[str, set[str]]:
    """Returns module -> modules of jaxtrain that it imports, in functions, too."""
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        whole = {
            # A module of a package, or else a name that the package itself defines.
            dotted if (dotted := f"{node.module}.{alias.name}") in files else str(node.module)
            for node in walk(parsed(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        # Importing a module first imports the packages that contain it.
        whole |= {package_of(other) for other in whole if not inside(name, package_of(other))}
        found[name] = (whole & files.keys()) - {"jaxtrain", name}
    return found


def upward(direct: dict[str, set[str]]) -> list[str]:
    """Returns imports between packages against the order."""
    return [
        f"{name} imports {other}"
        for name, others in direct.items()
        for other in sorted(others)
        if part(name) != part(other) and ORDER.index(part(other)) < ORDER.index(part(name))
    ]


def cycle(direct: dict[str, set[str]]) -> list[str]:
    """Returns modules that import each other in a cycle, if any."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for other in sorted(direct.get(name, ())):
            if found := walk(other, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in direct if (found := walk(name, []))), [])


def test_imports_go_down_the_order(checkout: Path) -> None:
    files = modules(checkout)
    assert {part(name) for name in files if name != "jaxtrain"} == set(ORDER)
    del files["jaxtrain"]
    assert upward(direct_imports(files)) == []
    assert cycle(direct_imports(files, at_run_time)) == []


def test_a_folder_has_at_most_twenty_modules(checkout: Path) -> None:
    folders = {path.parent for path in modules(checkout).values()}
    for folder in folders:
        names = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert len(names) <= 20, (
            f"{folder}: {len(names)} modules; put those of one subject together"
        )


def test_every_imported_package_is_declared_and_used(checkout: Path) -> None:
    """Only what a function or the file of a tracker imports may come from an extra."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for lines in extras.values() for line in lines]
    declared, optional = (
        {re.split(r"[\[>=<; ]", line)[0] for line in some}
        for some in (project["dependencies"], lines)
    )
    anywhere = imported_packages(checkout, top_level=False)
    assert imported_packages(checkout, top_level=True) - declared == {"jaxtrain"}
    assert anywhere - declared - optional == set()
    assert declared - anywhere == set()


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


def test_only_the_models_package_checks_model_classes(checkout: Path) -> None:
    """The methods of its base class say what a model can do (jaxtrain/models/contract.py)."""
    package = checkout / "jaxtrain"
    models = {path.stem for path in (package / "models").iterdir()}
    for path in package.rglob("*.py"):
        if package / "models" in path.parents:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                asked = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                assert not asked & models, f"{path}: {ast.unparse(node)}"


# Places where a variable name chooses code or an attribute, and the origin of that name. It must
# never come from a file, a URL or the network (SECURITY.md).
_FIELDS = "fields that the class declares"
_LITERAL = "names in the function itself"
CHOSEN = {
    "cli/command_line.py refuse": "names in its callers",
    "cli/evaluate.py main": _LITERAL,
    "inference/teachers.py Own.__init__": _FIELDS,
    "cli/evaluate.py _resolved": "names in the table _USUAL",
    "models/from_file.py in_weights": _FIELDS,
    "config/bounds.py Section.__post_init__": _FIELDS,
    "config/checks.py _exactly_one": "names in _check_sections",
    "config/record.py _fields": _FIELDS,
    "config/files.py _section_at_fault": "a name in a --config file, which is code by design",
    "config/files.py execute": "a --config file is code by design",
    "data/video/pieces.py Settings.__post_init__": _LITERAL,
    "data/text/stdlib_corpus.py _docstrings": _LITERAL,
    "jobs/subprocess_worker.py _named": "names in plan, bench and doctor",
    "training/run_summary.py _twice_as_long": _LITERAL,
    "interop/huggingface.py _special_ids": _LITERAL,
    "cli/command_line.py run": "commands.TABLE",
    "models/from_file.py config_class": "the modules in the package's own folder",
    "models/video_ae/autoencoder.py Config.comfyui_name": "names in the table _COMFYUI",
    "models/reconstruction/streaming.py _step": "names in its callers",
    "ops/attention.py reproducible_gradients": _LITERAL,
    "inference/export_check.py _of_diffusers": "diffusers_class of the model's class",
    "cli/help.py _default": _FIELDS,
    "cli/help.py _nested": _FIELDS,
    "cli/help.py _own_fields": _FIELDS,
    "config/overrides.py _built": "fields that _changed() found",
    "config/overrides.py _fields": _FIELDS,
    "training/step.py build_eval_step.eval_step": "names in its callers",
    "interop/weights.py _check_guess": "not_in_weights of the model's class",
    "models/from_file.py _differing": "not_in_weights of the model's class",
    "models/from_file.py check_not_in_weights": "in_weights, not_in_weights of the model's class",
}
CHOOSERS = {"getattr", "attrgetter", "methodcaller"}
RUNNERS = {
    *("import_module", "__import__", "exec", "eval", "compile", "run_path", "run_module"),
    *("locate", "system", "popen", "globals", "unpickle", "Unpickler", "deserialize_and_load"),
}


def choices(tree: ast.AST, inside: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Returns calls that choose or run code by a name or a text, with their functions."""
    found = []
    for node in ast.iter_child_nodes(tree):
        scope = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*inside, node.name)
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            literal = all(isinstance(one, ast.Constant) for one in node.args[:1])
            attribute = node.args[1:2] if name == "getattr" else node.args[:1]
            named = all(isinstance(one, ast.Constant) for one in attribute)
            runs = name in RUNNERS and not (literal and name == "import_module")
            # Methods with these names are harmless: re.compile, torch's model.eval().
            if name in ("compile", "eval") and owner:
                runs = False
            loads = owner.rpartition(".")[2] in ("pickle", "marshal", "shelve", "dill", "yaml")
            loads &= name != "safe_load"  # yaml's, which makes only plain values
            shell = any(
                one.arg in ("shell", "allow_pickle", "trust_remote_code")
                and not (isinstance(one.value, ast.Constant) and one.value.value is False)
                for one in node.keywords
            )
            unsafe = ast.unparse(node.func) == "torch.load" and "weights_only=True" not in (
                ast.unparse(node)
            )
            if runs or loads or shell or unsafe or (name in CHOOSERS and not named):
                found.append((".".join(scope), ast.unparse(node)))
        found += choices(node, scope)
    return found


def test_no_name_from_a_file_chooses_code(checkout: Path) -> None:
    package, used = checkout / "jaxtrain", set()
    for path in sorted(package.rglob("*.py")):
        for function, call in choices(parsed(path)):
            place = f"{path.relative_to(package).as_posix()} {function}"
            used.add(place)
            assert place in CHOSEN, (
                f"jaxtrain/{place}: {call} chooses code by a name. If no file, URL or message "
                "can supply the name, add the place to CHOSEN with the origin of the name"
            )
    assert used == CHOSEN.keys(), f"nothing uses these entries of CHOSEN: {CHOSEN.keys() - used}"


def test_every_string_statement_is_a_docstring(checkout: Path) -> None:
    """One without three quotes is the lost half of a message, whose parentheses are missing."""
    lost = []
    for folder in ("jaxtrain", "tests", "benchmarks"):
        for path in sorted((checkout / folder).rglob("*.py")):
            lines = path.read_text().splitlines()
            lost += [
                f"{path.relative_to(checkout)}:{node.lineno}"
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and not lines[node.lineno - 1].strip().startswith(('"""', 'r"""'))
            ]
    assert not lost
