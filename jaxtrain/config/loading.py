"""Finds a config by its name or path, and the arguments that give a run."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from jaxtrain.config import checks, field_values, files, overrides
from jaxtrain.config.run import Run
from jaxtrain.errors import InputError, shortest_path
from jaxtrain.storage import addresses


def load(name_or_path: str, arguments: Sequence[str] = ()) -> Run:
    """Loads a config, applies the overrides of a command line, and checks the result.

    Args:
        name_or_path: ``"h100_16"`` or ``"mine/big.py"``.
        arguments: ``["--data.path", "clips", "--optim.peak_lr=1e-3"]``.

    Raises:
        InputError: has one line per problem, with the nearest valid name or value.
    """
    run = unchecked(name_or_path, arguments)
    checks.validate(run)
    return run


def unchecked(name_or_path: str, arguments: Sequence[str]) -> Run:
    """Like :func:`load`, but not checked: for callers that report the problems themselves
    (:func:`jaxtrain.config.checks.problems`).

    Raises:
        InputError: no such config or field, or a value of the wrong type.
    """
    return overrides.apply(named(name_or_path), arguments)


def named(name_or_path: str) -> Run:
    """Returns a shipped config, or that of a file; not yet checked.

    A config file derives from another one with this function and ``dataclasses.replace``.

    Raises:
        InputError: no such config, or its file has an error.
    """
    path = files.find(name_or_path)
    run = files.execute(path)
    if not isinstance(run, Run):
        raise InputError(f"{path} sets run to a {type(run).__name__}; it must be a config.Run")
    shipped = path.parent == files.directory()
    word = path.stem if shipped else os.path.abspath(path)
    inherited = {loaded.name for key, loaded in _LOADED.items() if key != word}
    if not run.name or run.name in inherited:
        run = dataclasses.replace(run, name=path.stem)
    _LOADED[word] = run
    return run


_LOADED: dict[str, Run] = {}
"""Name of a config, or absolute path of its file -> the run as :func:`named` last read it.

For :func:`equivalent_arguments`. It is not a field of a run: fields are recorded, and two runs with
equal fields are the same run.
"""


def equivalent_arguments(run: Run) -> tuple[str, ...]:
    """Returns arguments that give a run: a config that this process loaded, and overrides.

    Returns:
        ``("--config", "demo", "--loop.steps", "20")``, or ``("--config", "/tmp/own.py")``; the
        fewest arguments, URLs without their query. Empty if no arguments give the run, for
        example because it was built in Python.
    """
    if run.name not in _LOADED and run.name in files.names():
        with contextlib.suppress(InputError):
            named(run.name)
    candidates = [
        (word, _changes(base, run))
        for word, base in _LOADED.items()
        if type(base.model) is type(run.model) and type(base.data) is type(run.data)
    ]
    for word, changes in sorted(candidates, key=lambda candidate: len(candidate[1])):
        with contextlib.suppress(InputError):
            if overrides.apply(_LOADED[word], changes) == run:
                config = shortest_path(word) if os.path.isabs(word) else word
                return addresses.scrubbed(("--config", config, *changes))
    return ()


def _changes(base: Run, run: Run) -> list[str]:
    """Returns overrides for the fields in which ``run`` differs from ``base``."""
    before = {leaf.name: leaf.value for leaf in overrides.leaves(base)}
    return [
        word
        for leaf in overrides.leaves(run)
        if leaf.name not in before or before[leaf.name] != leaf.value
        for word in (f"--{leaf.name}", *field_values.as_arguments(leaf.value))
    ]
