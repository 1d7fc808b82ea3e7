import sys
import sysconfig
import types
from pathlib import Path

import pytest
from data.text.small_text import silent

from jaxtrain.data.text import stdlib_corpus
from jaxtrain.errors import InputError


def test_docstrings_are_in_order_and_no_code_runs(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Module."""\nraise SystemExit\n'
        'class A:\n    """Class."""\n    async def f(self):\n        """Method."""\n'
        'def g():\n    """Function.\n\n    Indented.\n    """\n    return "no docstring"\n'
        "def h():\n    pass\n"
    )
    assert stdlib_corpus.docstrings(path) == [
        "Module.",
        "Class.",
        "Method.",
        "Function.\n\nIndented.",
    ]
    path.write_text("print 'an old syntax'")
    assert stdlib_corpus.docstrings(path) == []
    path.write_bytes(b'# -*- coding: latin-1 -*-\n"""Stra\xdfe."""')
    assert stdlib_corpus.docstrings(path) == ["Straße."]


def test_one_file_per_module_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdlib = tmp_path / "lib"
    for name in ("one.py", "two/__init__.py", "two/three.py", "test/four.py", "short.py"):
        path = stdlib / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""About {name}{"" if name == "short.py" else "." * 200}"""')
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(stdlib)})
    reference = types.SimpleNamespace(topics={"if": "The if statement." * 20})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", reference)  # type: ignore[arg-type]
    folder = stdlib_corpus.prepare(tmp_path, silent)
    files = {path.name: path.read_text() for path in folder.glob("*.txt")}
    assert sorted(files) == ["one.txt", "topics.if.txt", "two.__init__.txt", "two.three.txt"]
    assert files["one.txt"].startswith("About one.py...")
    said: list[str] = []
    assert stdlib_corpus.prepare(tmp_path, said.append) == folder
    assert said == []


def test_a_python_without_sources_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="no sources of its standard library"):
        stdlib_corpus.prepare(tmp_path / "cache", silent)
