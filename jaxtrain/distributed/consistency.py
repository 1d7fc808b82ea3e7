"""Whether all processes of a run are about to do the same: config, code and packages.

Processes that compile different programs wait for each other in a collective that never ends, or
train something that nobody asked for. So they compare before the first compilation, in the
key-value store, which needs no device.
"""

import functools
import hashlib
import inspect
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, versions
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.errors import InputError

# What each host may have its own way. The data itself is compared by its fingerprint.
PER_HOST = (
    "data.path",
    "data.more_paths",
    "data.val_path",
    "data.cache_dir",
    "data.workers",
    "data.prefetch",
)

_TOPIC = "config and versions"
_PATIENCE_S = 120.0
_FIELDS_TO_NAME = 5
_CURES = {
    "config": "start all with the same command line",
    "code": "install the same jaxtrain on every host",
    "package": "install the same packages on every host",
}


def facts(run: config.Run, flags: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What has to be the same everywhere: kind -> name -> value.

    Args:
        run: the config.
        flags: of the command line, those that change what is computed.
    """
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


def compare(every: list[Mapping[str, Mapping[str, str]]]) -> str:
    """One sentence that names what differs, with the values by process; empty if nothing does."""
    found: list[str] = []
    cures: list[str] = []
    for kind, cure in _CURES.items():
        names = dict.fromkeys(name for one in every for name in one.get(kind, {}))
        for name in names:
            values = [one.get(kind, {}).get(name, "(absent)") for one in every]
            # Of the code only the digest counts; the commit behind it is for the reader.
            if len({value.split(" ", 1)[0] if kind == "code" else value for value in values}) > 1:
                found.append(f"{name} is {_by_process(values)}")
                cures.append(cure)
    if not found:
        return ""
    more = len(found) - _FIELDS_TO_NAME
    return (
        "the processes do not run the same: "
        + "; ".join(found[:_FIELDS_TO_NAME])
        + (f"; and {more} more" if more > 0 else "")
        + ": "
        + ", and ".join(dict.fromkeys(cures))
    )


def check(own: Mapping[str, Any], store: KeyValueStore) -> None:
    """Process 0 compares the facts of all processes.

    Args:
        own: what :func:`facts` gave in this process.
        store: of the run.

    Raises:
        InputError: in all processes alike; names what differs.
        RunAgain: a process has published nothing.
    """

    def decide() -> str:
        different = compare([json.loads(text) for text in store.collect(_TOPIC, _PATIENCE_S)])
        if different:
            raise InputError(different)
        return ""

    store.publish(_TOPIC, json.dumps(own))
    store.decide("same run", decide, _PATIENCE_S)


def _code(run: config.Run) -> str:
    """Digest of the package's files and of those that define model and data, and the commit."""
    package = Path(__file__).parents[1]
    files = {f"jaxtrain/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    for part in (run.model, run.data):
        source = Path(inspect.getfile(type(part)))
        if package not in source.parents:
            files[source.name] = source
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    commit = _commit(package.parent)
    return digest.hexdigest()[:12] + (f" (commit {commit})" if commit else "")


@functools.cache
def _commit(checkout: Path) -> str:
    """The commit of a checkout; empty if this is an installed package, or git is not there."""
    if not (checkout / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _by_process(values: list[str]) -> str:
    """``["a", "b", "a"]`` as ``a in processes 0, 2 and b in process 1``."""
    by_value: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        by_value.setdefault(value, []).append(number)
    return " and ".join(
        f"{value} in process{'es' if len(numbers) > 1 else ''} {_ranges(numbers)}"
        for value, numbers in by_value.items()
    )


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
