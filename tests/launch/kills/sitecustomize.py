"""Kills processes of jaxtrain in the functions that a file names. Python imports this at its start.

Each line of ``$KILLS`` is of one start: ``MODULE:FUNCTION INDEX COUNT SIGNAL``. Its process INDEX
gets the signal when it calls the function for the COUNT-th time.
"""

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

KILLS = os.environ.get("KILLS", "")


class Killing(importlib.abc.MetaPathFinder):
    """Replaces a function of a module when the module is imported."""

    def __init__(self, module: str, function: str, count: int, number: int) -> None:
        self.module, self.function, self.left = module, function, count
        self.number = number

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def replace(self, module: ModuleType) -> None:
        *owners, name = self.function.split(".")
        owner: Any = functools.reduce(getattr, owners, module)
        original = getattr(owner, name)

        @functools.wraps(original)
        def killing(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                lines = Path(KILLS).read_text().splitlines(keepends=True)
                Path(KILLS).write_text("".join(lines[1:]))
                os.kill(os.getpid(), self.number)
            return original(*arguments, **named)

        setattr(owner, name, killing)


def main() -> None:
    """Prepares the kill of this start, if this process is the one."""
    lines = Path(KILLS).read_text().splitlines()
    if not lines:
        return
    place, index, count, number = lines[0].split()
    if index == (os.environ.get("JAX_PROCESS_ID") or os.environ.get("RANK") or "0"):
        module, _, function = place.partition(":")
        sys.meta_path.insert(0, Killing(module, function, int(count), signal.Signals[number]))


# Not the launcher, which the same interpreter runs.
if KILLS and sys.orig_argv[1:3] == ["-m", "jaxtrain.main"]:
    main()
