"""The demonstration corpus: the documentation that comes with Python.

It consists of the language reference's topics (what ``help("if")`` shows) and the docstrings of the
standard library's modules, classes and functions. These are read from syntax trees: no module is
imported or run. There is one .txt file per module or topic.
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

from jaxtrain.errors import InputError
from jaxtrain.storage import cache

_VERSION = 2  # of the selection and of the files
# Tests, generated tables, installed packages and applications: little documentation for their size.
_EXCLUDED = {
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
    """Writes the corpus under ``root`` if it is missing; returns its folder.

    Raises:
        InputError: this Python has no sources of its standard library.
    """
    folder = root / f"stdlib_docs-{platform.python_version()}-{_VERSION}"

    def build(work: Path) -> dict[str, Any]:
        say(f"writing the demonstration corpus to {folder}")
        sources = Path(sysconfig.get_paths()["stdlib"])
        count = 0
        written = set[str]()  # help("else") is that of "if"
        for name, text in _texts(sources):
            if len(text) >= _LEAST_CHARACTERS and text not in written:
                written.add(text)
                (work / f"{name}.txt").write_text(text, encoding="utf-8")
                count += 1
        if count == 0:
            raise InputError(
                f"this Python has no sources of its standard library in {sources}: "
                "pass your own text with --data.path"
            )
        return {"version": _VERSION, "python": platform.python_version(), "documents": count}

    cache.make_folder(folder, build, say)
    return folder


def _texts(sources: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each topic of the language reference and each module."""
    try:
        reference = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        reference = {}  # a separate package on some systems; docstrings are the larger part
    for name, text in sorted(reference.items()):
        yield f"topics.{name}", text
    for folder, inner, names in os.walk(sources):
        inner[:] = sorted(set(inner) - _EXCLUDED)
        for path in sorted(Path(folder, name) for name in names if name.endswith(".py")):
            module = ".".join(path.relative_to(sources).with_suffix("").parts)
            yield module, "\n\n".join(docstrings(path)) + "\n"


def docstrings(path: Path) -> list[str]:
    """Returns the docstrings of a file's module, classes, and functions, in the order of the file.

    A file that this Python cannot parse (a template, an old syntax) has none.
    """
    try:
        with tokenize.open(path) as file:  # respects the encoding declaration
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError):
        return []
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a node and its statements; skips expressions, which have none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, block, None)
        if isinstance(inner, list):  # a lambda's body is an expression
            for statement in inner:
                yield from _docstrings(statement)
