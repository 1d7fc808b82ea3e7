"""Finds config files and runs them.

A config is a Python file that sets ``run``. Its name is the file's name; its docstring describes
the model and the hardware, and has the command that starts it.
"""

import ast
import dataclasses
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from jaxtrain.config import invocation
from jaxtrain.config.field_values import close_to, did_you_mean
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded

MODULE = "jaxtrain_config_"
"""How the module of an executed config is named: this, and the name of its file."""


def directory() -> Path:
    """The folder of the shipped configs: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "configs", package.parent / "configs")
    for folder in folders:
        if folder.is_dir():
            return folder
    raise InputError(f"no shipped configs: neither {folders[0]} nor {folders[1]} exists")


def names() -> list[str]:
    """Returns the names of the shipped configs, sorted."""
    return sorted(path.stem for path in directory().glob("*.py") if path.stem[0] != "_")


def find(name_or_path: str) -> Path:
    """Returns the file of a shipped config, or the path itself.

    Raises:
        InputError: no such config or file; the message suggests the nearest names.
    """
    if name_or_path.endswith(".py") or "/" in name_or_path:
        path = expanded(name_or_path)
        if not path.is_file():
            raise InputError(f"config file {name_or_path} does not exist")
        if path.suffix != ".py":
            raise InputError(f"{name_or_path} does not end with .py: a config is a Python file")
        return path
    present = names()
    if name_or_path not in present:
        raise InputError(f"unknown config '{name_or_path}'; {_suggested(name_or_path, present)}")
    return directory() / f"{name_or_path}.py"


def _suggested(name: str, present: list[str]) -> str:
    """Returns the nearest names of configs, or those that contain a name, and how to list all."""
    near = close_to(name, present) or [
        candidate for candidate in present if name.lower() in candidate
    ]
    more = f"{invocation.program()} configs list describes all"
    if not near:
        return more
    *others, last = near
    comma = "," if len(near) > 2 else ""
    return f"did you mean {', '.join(others)}{comma}{' or ' if others else ''}{last}? {more}"


def docstring(name_or_path: str) -> str:
    """The docstring of a config file, which is not run."""
    path = find(name_or_path)
    return ast.get_docstring(_parsed(path)) or ""


def execute(path: Path) -> Any:
    """Runs a config file and returns its ``run``.

    Raises:
        InputError: the file does not set ``run``, or has an error, such as an unknown field.
            Errors that are raised inside jaxtrain keep their traceback.
    """
    code = compile(_parsed(path), str(path), "exec")
    module_name = f"{MODULE}{path.stem}"
    spec = importlib.util.spec_from_loader(module_name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    # Its folder comes last, so that a model beside it can be imported, also in worker processes,
    # and hides no package.
    folder = str(path.absolute().parent)
    if path.parent != directory() and folder not in sys.path:
        sys.path.append(folder)
    sys.modules[module_name] = module  # dataclasses look up their module by name
    try:
        exec(code, module.__dict__)
    except InputError:
        raise
    except Exception as error:
        line = _line_at_fault(error, path)
        if line is None:
            raise
        raise InputError(f"{path}, line {line}: {_in_words(error, path, line)}") from error
    if not hasattr(module, "run"):
        raise InputError(f"{path} does not set run: a config ends with 'run = config.Run(...)'")
    return module.run


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error


def _line_at_fault(error: Exception, path: Path) -> int | None:
    """The line in the file that raised the error, itself or through a dataclass; None if none."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[-1].filename == dataclasses.__file__:
        frames.pop()
    return frames[-1].lineno if frames and frames[-1].filename == str(path) else None


def _in_words(error: Exception, path: Path, line: int) -> str:
    """Describes an error; for an unknown field, with the nearest field of that class."""
    unknown = re.match(
        r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)
    )
    if unknown is None:
        return f"{type(error).__name__}: {error}"
    owner, word = unknown.groups()
    section = _section_at_fault(error, path, line, word)
    if section is None or not dataclasses.is_dataclass(section):
        return f"{owner} has no field '{word}'"
    fields = sorted(field.name for field in dataclasses.fields(section))
    return f"{owner} has no field '{word}'; {did_you_mean(word, fields)}"


def _section_at_fault(error: Exception, path: Path, line: int, word: str) -> object:
    """The class that was called with an unknown field; a name such as Config is ambiguous.

    It is the class of the argument of ``dataclasses.replace``, or the one called in the line.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_code.co_filename == dataclasses.__file__:
        changed = frames[-1].f_locals
        return type(changed.get("self", changed.get("obj")))  # self in Python 3.13
    for node in ast.walk(_parsed(path)):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        names_only = all(
            isinstance(child, ast.Name | ast.Attribute | ast.Load) for child in ast.walk(node.func)
        )
        if names_only and any(keyword.arg == word for keyword in node.keywords):
            called = compile(ast.Expression(node.func), str(path), "eval")
            return eval(called, frames[-1].f_globals, frames[-1].f_locals)
    return None
