"""Checks that all processes of a run have the same config, code, and packages.

Processes that compile different programs wait for each other in a collective that never ends, or
train the wrong thing. So they compare before the first compilation, through the key-value store,
which needs no device.
"""

import functools
import hashlib
import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, versions
from jaxtrain.config import files as config_files
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.errors import InputError

# Fields that may differ per host. The data itself is compared by its fingerprint.
PER_HOST = (
    "data.path",
    "data.more_paths",
    "data.val_path",
    "data.cache_dir",
    "data.workers",
    "data.prefetch",
)

_INSTALLED = {"site-packages", "dist-packages"}
_TOPIC = "config and versions"
_PATIENCE_S = 120.0
_FIELDS_TO_NAME = 5
_CURES = {
    "config": "start all with the same command line",
    "code": "install the same jaxtrain on every host",
    "package": "install the same packages on every host",
}


def facts(run: config.Run, flags: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Collects what must be the same in all processes: kind -> name -> value."""
    leaves = jax.tree_util.tree_leaves_with_path(
        config.to_dict(run), is_leaf=lambda node: not isinstance(node, dict)
    )
    fields = {
        jax.tree_util.keystr(path, simple=True, separator="."): str(value) for path, value in leaves
    }
    return {
        "config": {name: value for name, value in fields.items() if name not in PER_HOST}
        | {name: str(value) for name, value in flags.items()},
        "code": {"code": _code(run)},
        "package": versions.versions(),
    }


def compare(facts_of_processes: list[Mapping[str, Mapping[str, str]]]) -> str:
    """Returns a sentence that names each difference, its values, and its processes; or ""."""
    differences: list[str] = []
    cures: list[str] = []
    for kind, cure in _CURES.items():
        names = dict.fromkeys(name for facts in facts_of_processes for name in facts.get(kind, {}))
        for name in names:
            values = [facts.get(kind, {}).get(name, "(absent)") for facts in facts_of_processes]
            # Only the code's digest is compared; the commit after it is for the reader.
            if len({value.split(" ", 1)[0] if kind == "code" else value for value in values}) > 1:
                differences.append(f"{name} is {_by_process(values)}")
                cures.append(cure)
    if not differences:
        return ""
    more = len(differences) - _FIELDS_TO_NAME
    return (
        "the processes differ: "
        + "; ".join(differences[:_FIELDS_TO_NAME])
        + (f"; and {more} more" if more > 0 else "")
        + ": "
        + ", and ".join(dict.fromkeys(cures))
    )


def check(own_facts: Mapping[str, Any], store: KeyValueStore) -> None:
    """Compares the facts of all processes.

    Raises:
        InputError: the facts differ; the same message in all processes.
        RunAgain: a process published nothing in time.
    """
    texts = store.gather(_TOPIC, json.dumps(own_facts), _PATIENCE_S)
    if different := compare([json.loads(text) for text in texts]):
        raise InputError(different)


def code_files(run: config.Run) -> dict[str, Path]:
    """Returns the source files that a run may use: name -> path.

    They are those of the package, those of the classes of its model and its data, and the modules
    that this process has imported from the folders of these and of the config, at any depth. Files
    of installed packages are not among them: they have versions.
    """
    package = Path(__file__).parents[1]
    files = {f"jaxtrain/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    own = [Path(inspect.getfile(type(section))) for section in (run.model, run.data)]
    for module in list(sys.modules.values()):
        if str(getattr(module, "__name__", "")).startswith(config_files.MODULE):
            own.append(Path(str(module.__file__)))
    own = [path.absolute() for path in own if package not in path.absolute().parents]
    folders = {path.parent for path in own if path.parent != config_files.directory()}
    for module in list(sys.modules.values()):
        path = Path(str(getattr(module, "__file__", None) or ""))
        if path.suffix == ".py" and not _INSTALLED & set(path.parts):
            own += [path] if folders & set(path.parents) else []
    for path in own:
        near = [folder for folder in folders if folder in path.parents]
        if package not in path.parents and path.is_file():
            # The longest folder, so that the name does not depend on where the others are.
            name = path.relative_to(max(near, key=lambda at: len(at.parts))) if near else path.name
            files[str(name)] = path
    return files


def code_digests(run: config.Run) -> dict[str, str]:
    """Returns a digest of each file of :func:`code_files`."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        for name, path in sorted(code_files(run).items())
    }


def digest_of(digests: Mapping[str, str]) -> str:
    """Returns one digest of all of :func:`code_digests`."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]


def _code(run: config.Run) -> str:
    commit = _commit(Path(__file__).parents[2])
    return digest_of(code_digests(run)) + (f" (commit {commit})" if commit else "")


@functools.cache
def _commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():
        return ""
    try:
        ended = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip()


def _by_process(values: list[str]) -> str:
    """Formats ``["a", "b", "a"]`` as ``a in processes 0, 2 and b in process 1``."""
    by_value: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        by_value.setdefault(value, []).append(number)
    return " and ".join(
        f"{value} in process{'es' if len(numbers) > 1 else ''} {_ranges(numbers)}"
        for value, numbers in by_value.items()
    )


def _ranges(numbers: list[int]) -> str:
    """Formats ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
