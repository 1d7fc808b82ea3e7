"""The demonstration corpus: the documentation that every Python carries.

The language reference's topics (what ``help("if")`` shows) and the docstrings of the standard
library's modules, classes and functions, taken from the syntax trees of the sources: no module is
imported or run. One .txt file a module or topic.
"""

import ast
import importlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.errors import InputError

_VERSION = 1  # of what is taken and how it is written
# Tests, generated tables, installed packages and whole programs: little documentation for its size.
_LEFT_OUT = {
    "__phello__",
    "__pycache__",
    "_pyrepl",
    "encodings",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "turtledemo",
    "pydoc_data",
}
_LEAST_CHARACTERS = 200


def prepare(root: Path, say: Callable[[str], None]) -> Path:
    """Write the corpus once under ``root``; returns its folder.

    Raises:
        InputError: this Python came without the sources of its standard library.
    """
    folder = root / f"stdlib_docs-{platform.python_version()}-{_VERSION}"

    def build(work: Path) -> dict[str, Any]:
        say(f"writing the demonstration corpus to {folder}")
        sources = Path(sysconfig.get_paths()["stdlib"])
        count = 0
        for name, text in _texts(sources):
            if len(text) >= _LEAST_CHARACTERS:
                (work / f"{name}.txt").write_text(text, encoding="utf-8")
                count += 1
        if count == 0:
            raise InputError(
                f"this Python has no sources of its standard library in {sources}: "
                "name your own text with --data.path"
            )
        return {"version": _VERSION, "python": platform.python_version(), "documents": count}

    cache.make_folder(folder, build, say)
    return folder


def _texts(sources: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every topic of the language reference and every module."""
    try:
        reference = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        reference = {}  # some systems pack it apart; the docstrings are the larger part
    for name, text in sorted(reference.items()):
        yield f"topics.{name}", text
    for folder, inner, names in os.walk(sources):
        inner[:] = sorted(set(inner) - _LEFT_OUT)
        for path in sorted(Path(folder, name) for name in names if name.endswith(".py")):
            module = ".".join(path.relative_to(sources).with_suffix("").parts)
            yield module, "\n\n".join(docstrings(path)) + "\n"


def docstrings(path: Path) -> list[str]:
    """Docstrings of a source file's module, classes and functions, in the order of the file.

    A file that this Python cannot parse (a template, an old syntax) has none.
    """
    try:
        with tokenize.open(path) as file:  # minds the coding line
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError):
        return []
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a node and of the statements in it; expressions hold none, and are the bulk."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, block, None)
        if isinstance(inner, list):  # a lambda's body is an expression
            for statement in inner:
                yield from _docstrings(statement)
