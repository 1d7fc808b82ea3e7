import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.data.text import documents
from jaxtrain.data.text.documents import SECTION_CHARACTERS, File, Section
from jaxtrain.errors import BadExample, InputError


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def rows(path: Path, *values: object) -> Path:
    return write(path, "\n".join(json.dumps(value) for value in values))


def parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def read(path: Path, text_field: str | None, skipped: Counter[str] | None = None) -> Iterator[str]:
    size = path.stat().st_size
    section = Section(File(str(path), path.name, size, ""), 0, size)
    return section.read(text_field, Counter() if skipped is None else skipped)


def find(pattern: str, say: Callable[[str], None] = print) -> list[File]:
    return documents.find(pattern, "--data.path", Path("unused"), say)


def reason(path: Path, text_field: str | None = None) -> str:
    with pytest.raises(BadExample) as error:
        list(read(path, text_field))
    return error.value.reason


def test_find_in_folders_and_globs(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a/c.MD",
        "a/d.jsonl",
        ".git/e.txt",
        "f.png",
        "a/g.PNG",
        "a/h",
        "a/.h.txt",
    ):
        write(tmp_path / "in" / name, "x")
    write(tmp_path / "far" / "z.txt", "x")
    (tmp_path / "in/link").symlink_to(tmp_path / "far")
    (tmp_path / "in/a/loop").symlink_to(tmp_path / "in")

    def names(pattern: str) -> list[str]:
        said.clear()
        return [file.name for file in find(str(tmp_path / pattern), said.append)]

    said: list[str] = []
    assert names("in") == ["a/c.MD", "a/d.jsonl", "b.txt", "link/z.txt"]
    assert said == [
        f"skipped a link to folders that are read already, such as {tmp_path}/in/a/loop -> "
        f"{tmp_path}/in",
        f"--data.path {tmp_path / 'in'}: skipped 3 of 7 files, which are of other kinds: "
        "2 .png, 1 without a suffix; supported: .txt, .md, .jsonl, .parquet",
    ]
    assert names("in/b.txt") == ["b.txt"]
    assert not said
    assert names("in/a/*.jsonl") == ["d.jsonl"]
    assert names("*/[bz].txt") == ["far/z.txt", "in/b.txt"]
    with pytest.raises(InputError, match=r"--data.path .*nothing.*no such file"):
        names("nothing")
    with pytest.raises(InputError, match=r"none of its 1 files is a text file; pass .txt"):
        names("in/f.png")


@pytest.mark.parametrize(("newline", "chunk"), [("\n", 1 << 20), ("\r\n", 1000)])
def test_a_long_text_is_cut_at_blank_lines(
    tmp_path: Path, newline: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paragraph = f"Zwölf Boxkämpfer{newline}jagen Viktor.{newline}{newline}"
    text = "\ufeff" + paragraph * 4000
    monkeypatch.setattr(documents, "_CHUNK_BYTES", chunk)
    got = list(read(write(tmp_path / "a.txt", text), None))
    assert "".join(got) == text[1:].replace(newline, "\n")
    assert len(got) > 3
    for document in got[:-1]:
        assert document.endswith("\n\n")
        assert SECTION_CHARACTERS <= len(document) < SECTION_CHARACTERS + 100


@pytest.mark.parametrize("mark", ["\n", " ", ""])
def test_a_long_text_without_blank_lines_is_cut_too(tmp_path: Path, mark: str) -> None:
    text = ("abcdefg" + mark) * 20_000
    got = list(read(write(tmp_path / "a.txt", text), None))
    assert "".join(got) == text
    assert len(got) > 3
    assert max(map(len, got)) <= 2 * SECTION_CHARACTERS
    assert all(document.endswith(mark) for document in got)


def test_jsonl_and_parquet_rows_are_documents(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", {"id": 1, "text": "one"}, {"text": None}, {"text": " "})
    assert list(read(a, None)) == ["one"]
    b = parquet(tmp_path / "b.parquet", n=[1, 2, 3], content=["x", None, "y\n"])
    assert list(read(b, None)) == ["x", "y\n"]
    c = rows(tmp_path / "c.jsonl", {"text": "one", "code": "two"})
    assert list(read(c, "code")) == ["two"]
    assert list(read(parquet(tmp_path / "d.parquet", text=["x"], code=["z"]), "code")) == ["z"]


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "b.parquet", text=["one"])
    write(tmp_path / "a.txt", "one")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"b\.parquet requires .* pip install -e '\.\[parquet\]'"):
        find(str(tmp_path))
    assert find(str(tmp_path / "a.txt"))


def test_rows_without_the_field_are_skipped_and_counted(tmp_path: Path) -> None:
    """Some, and also the first one, which then does not name the field."""
    titles = [{"title": "a"}, {"title": "b", "text": None}]
    path = rows(tmp_path / "a.jsonl", *titles, {"text": "one", "body": "b"}, {"text": "two"})
    for field in (None, "text"):
        skipped: Counter[str] = Counter()
        assert list(read(path, field, skipped)) == ["one", "two"]
        assert skipped == {"rows": 2}


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", None, "b"]),
        pa.array(["a", None, "b"], pa.large_string()),
        pa.array(["a", None, "b"], pa.string_view()),
        pa.array(["a", None, "b"]).dictionary_encode(),
        pa.array(["a", None, "b"], pa.large_string()).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_all_types_of_columns_whose_values_are_strings(array: pa.Array, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    skipped: Counter[str] = Counter()
    assert list(read(tmp_path / "a.parquet", None, skipped)) == ["a", "b"]
    assert skipped == {"rows": 1}


def test_reasons_of_broken_files_give_the_place(tmp_path: Path) -> None:
    assert "at byte 5" in reason(write(tmp_path / "a.txt", b"12345\xff678"))
    assert "at byte 3" in reason(write(tmp_path / "a.md", b"123\xc3"))  # cut inside a character
    assert "NUL" in reason(write(tmp_path / "b.txt", b"PK\0\0"))
    good = b'{"text": "one"}\n'
    assert "line 2: not JSON" in reason(write(tmp_path / "c.jsonl", good + b'{"text": "tw'))
    assert "line 2: not UTF-8" in reason(write(tmp_path / "d.jsonl", good + b'{"text": "\xff"}'))
    assert "line 2: an unpaired" in reason(
        write(tmp_path / "e.jsonl", good + b'{"text": "\\ud800"}')
    )
    assert "line 2: not a JSON object" in reason(write(tmp_path / "f.jsonl", good + b"[1]"))
    assert "line 2: field 'text' is not text" in reason(
        rows(tmp_path / "g.jsonl", {"text": "one"}, {"text": 2})
    )
    assert "2 of 3 lines have no field 'text', such as line 2, which has 'body'" in reason(
        rows(tmp_path / "h.jsonl", {"text": "one"}, {"body": "two"}, {"body": "three"})
    )
    assert "data.text_field" in reason(rows(tmp_path / "i.jsonl", {"wörter": "one"}))
    assert "'code'" in reason(parquet(tmp_path / "j.parquet", text=["x"]), "code")
    assert "is not text: int64" in reason(parquet(tmp_path / "k.parquet", text=[1]))
    intact = parquet(tmp_path / "l.parquet", text=["x" * 100] * 9).read_bytes()
    assert "broken parquet" in reason(write(tmp_path / "l.parquet", intact[:-20]))
    assert "broken parquet" in reason(write(tmp_path / "m.parquet", b""))


def test_a_file_changes_with_its_content_and_its_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in/a.txt", "one")
    (tmp_path / "in/b.txt").symlink_to(tmp_path / "gone.txt")
    first, gone = find(str(tmp_path / "in"))
    assert (first.size, gone.size) == (3, 0)
    assert not first.changed()
    os.utime(first.path, ns=(1, 1))
    assert first.changed()
    second, _ = find(str(tmp_path / "in"))
    assert second != first
    monkeypatch.setattr(os, "access", lambda *_: False)
    third, _ = find(str(tmp_path / "in"))
    assert third != second
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/in") == [third, gone]


def test_lines_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 30)
    line = '{"text": "' + "x" * 17 + '"}\n'
    assert len(line) == 30
    assert len(list(read(write(tmp_path / "c.jsonl", line * 2), None))) == 2
    assert "line 2 has more than 30 bytes" in reason(write(tmp_path / "d.jsonl", line + " " + line))
