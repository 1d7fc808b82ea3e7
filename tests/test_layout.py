"""The shape of the package: which way imports point, and what may choose code by a name."""

import ast
import tomllib
from pathlib import Path

import pytest

# module -> the modules of the package that it must not reach, directly or through others.
FORBIDDEN = {
    "jaxtrain.config": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.sharding": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.optim.build": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.ops.layers": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.sharding",
    },
    "jaxtrain.models": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.sharding",
    },
    "jaxtrain.data": {
        "jaxtrain.training.step",
        "jaxtrain.training.state",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.training.state": {
        "jaxtrain.training.step",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.training.step": {"jaxtrain.training.loop", "jaxtrain.models", "jaxtrain.data"},
    "jaxtrain.checkpoint.saver": {
        "jaxtrain.training.step",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
    "jaxtrain.telemetry.recorder": {
        "jaxtrain.training.step",
        "jaxtrain.training.loop",
        "jaxtrain.models",
    },
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


def test_no_file_is_a_drawer(checkout: Path) -> None:
    names = {path.name for path in (checkout / "jaxtrain").rglob("*.py")}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}


def test_every_package_ships(checkout: Path) -> None:
    with (checkout / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (checkout / "jaxtrain").rglob("*.py")}
    packages = {".".join(folder.relative_to(checkout).parts) for folder in folders}
    assert set(listed) == packages | {"jaxtrain.configs"}


# Where a name that is not written out chooses what runs or is read, and where that name comes from.
# A name that a file, an address or the network supplied must never get there (SECURITY.md).
_FIELDS = "fields that the class declares"
_FLAGS = "flags that the parser declares"
_LITERAL = "names in the function itself"
CHOSEN = {
    "bench/measurement.py _shares": _FIELDS,
    "commands/evaluate.py _check": _FLAGS,
    "commands/evaluate_text.py main": _FLAGS,
    "commands/import.py _changed": _FLAGS,
    "commands/import.py _folder": _FLAGS,
    "commands/prepare.py _clips": _FLAGS,
    "config.py Muon.__post_init__": _LITERAL,
    "config.py _check_value": "names in its callers and in the table _POSITIVE",
    "config.py _exactly_one": "names in _check_sections",
    "config.py _fields": _FIELDS,
    "config_files.py execute": "a --config file is code by design",
    "data/pieces.py Settings.__post_init__": _LITERAL,
    "data/stdlib_corpus.py _docstrings": _LITERAL,
    "data/text_sources.py Text.__post_init__": _LITERAL,
    "data/video.py Config.__post_init__": _LITERAL,
    "data/windows.py WindowSource.__getstate__": _FIELDS,
    "doctor/worker.py _groups.module": "names in _groups",
    "farewell.py _twice_as_long": _LITERAL,
    "hf_folder.py _special_ids": _LITERAL,
    "main.py _command": "a key of COMMANDS",
    "models/from_file.py _config_class": "the modules in the package's own folder",
    "models/llama.py Config.to_settings": _FIELDS,
    "models/video_ae/config.py Config.__post_init__": _LITERAL,
    "models/video_ae/config.py Config.problems": _LITERAL,
    "models/video_ae/losses.py Adversary.__post_init__": _LITERAL,
    "models/video_ae/streaming.py _step": "names in its callers",
    "overrides.py _optional_sections": _FIELDS,
    "overrides.py _with": "fields that the command line named and apply() found",
    "overrides.py leaves": _FIELDS,
    "step.py build_eval_step.eval_step": "names in its callers",
    "weights.py _check_guess": "UNSEEN of the model's class",
    "weights.py check_unseen": "UNSEEN of the model's class",
}
CHOOSERS = {"getattr", "attrgetter", "methodcaller"}
RUNNERS = {
    *("import_module", "__import__", "exec", "eval", "compile", "run_path", "run_module"),
    *("locate", "system", "popen", "globals", "unpickle", "Unpickler"),
}


def choices(tree: ast.AST, inside: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Calls that choose or run code by a name or a text: the function they are in, the call."""
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
            # As methods these are others': re.compile, torch's model.eval().
            if name in ("compile", "eval") and owner:
                runs = False
            loads = owner.rpartition(".")[2] in ("pickle", "marshal", "shelve", "dill", "yaml")
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
        for function, call in choices(ast.parse(path.read_text())):
            place = f"{path.relative_to(package).as_posix()} {function}"
            used.add(place)
            assert place in CHOSEN, (
                f"jaxtrain/{place}: {call} chooses what runs by a name. If no file, address or "
                "message can supply the name, add the place to CHOSEN and say where it comes from"
            )
    assert used == CHOSEN.keys(), f"nothing uses these entries of CHOSEN: {CHOSEN.keys() - used}"


@pytest.mark.parametrize(
    "code",
    [
        "def f(saved):\n    return getattr(import_module(saved['module']), saved['name'])",
        "def f(text):\n    exec(text)",
        "def f(text):\n    return eval(text)",
        "def f(file):\n    return pickle.load(file)",
        "def f(file):\n    return torch.load(file)",
        "def f(file):\n    return np.load(file, allow_pickle=True)",
        "def f(text):\n    subprocess.run(text, shell=True)",
        "def f(text):\n    os.system(text)",
        "def f(name):\n    return operator.attrgetter(name)(jax)(1)",
    ],
)
def test_choosing_code_is_noticed(code: str) -> None:
    assert choices(ast.parse(code))
