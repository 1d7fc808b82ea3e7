import bz2
import contextlib
import functools
import gzip
import importlib.util
import io
import json
import lzma
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.data.text import documents, kinds, rows
from jaxtrain.data.text.documents import SECTION_CHARACTERS, File, FileRange
from jaxtrain.data.text.rows import Rows, Skipped
from jaxtrain.errors import BadExample, InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    # As the program zstd does.
    ".zst": functools.partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064x\nsize 9\n" % 7


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def objects(path: Path, *values: object) -> Path:
    return write(path, "\n".join(json.dumps(value) for value in values))


def parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def read(
    path: Path, text_field: str | None, skipped: Skipped | None = None, bad: float = 0.0
) -> Iterator[str]:
    size = path.stat().st_size
    file = File(str(path), path.name, size, "")
    if text_field is None and (chosen := rows.choose([file], path.name, "--data.text_field")):
        text_field = chosen.name
    return FileRange(file, 0, size, Rows(text_field, bad)).read(skipped or Skipped())


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
        write(tmp_path / "in" / name, name)
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
        f"2 .png, 1 without a suffix; supported: {kinds.SUPPORTED}",
    ]
    assert names("in/b.txt") == ["b.txt"]
    assert not said
    assert names("in/a/*.jsonl") == ["d.jsonl"]
    assert names("*/[bz].txt") == ["far/z.txt", "in/b.txt"]
    assert names("*/z.txt") == ["far/z.txt"]  # whatever else matches
    assert names("i*/*/d.jsonl") == ["in/a/d.jsonl"]
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
    a = objects(tmp_path / "a.jsonl", {"id": 1, "text": "one"}, {"text": None}, {"text": " "})
    assert list(read(a, None)) == ["one"]
    b = parquet(tmp_path / "b.parquet", n=[1, 2, 3], content=["x", None, "y\n"])
    assert list(read(b, None)) == ["x", "y\n"]
    c = objects(tmp_path / "c.jsonl", {"text": "one", "code": "two"})
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
    path = objects(tmp_path / "a.jsonl", *titles, {"text": "one", "body": "b"}, {"text": "two"})
    for field in (None, "text"):
        skipped = Skipped()
        assert list(read(path, field, skipped)) == ["one", "two"]
        assert skipped.rows == 2


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
    skipped = Skipped()
    assert list(read(tmp_path / "a.parquet", None, skipped)) == ["a", "b"]
    assert skipped.rows == 1


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
        objects(tmp_path / "g.jsonl", {"text": "one"}, {"text": 2})
    )
    assert "2 of 3 lines have no field 'text', such as line 2, which has 'title'" in reason(
        objects(tmp_path / "h.jsonl", {"text": "one"}, {"title": "two"}, {"title": "three"})
    )
    assert "data.text_field" in reason(objects(tmp_path / "i.jsonl", {"wörter": "one"}))
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


class Placed(io.BytesIO):
    """Remembers where it was read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.places: set[int] = set()

    def readinto(self, buffer: Any) -> int:
        self.places.add(self.tell())
        return super().readinto(buffer)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_only_the_first_section_of_a_file_reads_its_beginning(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket, that is a request for 8 MiB."""
    file = File("s3://b/a", f"a{suffix}", 18_000, "1")
    for start, stop in ((9000, 18_000), (0, 9000)):
        raw = Placed(b'{"text": "a b c"}\n' * 1000)
        data = io.BufferedReader(raw, 64)
        monkeypatch.setattr(File, "opened", lambda *_, data=data: contextlib.nullcontext(data))
        assert list(FileRange(file, start, stop, Rows("text")).read(Skipped()))
        assert (min(raw.places) > 8000) == (start > 0)


def test_lines_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 30)
    line = '{"text": "' + "x" * 17 + '"}\n'
    assert len(line) == 30
    assert len(list(read(write(tmp_path / "c.jsonl", line * 2), None))) == 2
    assert "line 2: more than 30 bytes" in reason(write(tmp_path / "d.jsonl", line + " " + line))


@pytest.mark.parametrize("suffix", [*kinds.SUFFIXES])
def test_what_stands_for_a_file_is_not_text(tmp_path: Path, suffix: str) -> None:
    """In every kind of file, and inside of compressed ones."""
    path = tmp_path / f"a{suffix}"
    for content, cure in ((POINTER, "git lfs pull"), (b"<!DOCTYPE html>", "download the file")):
        assert cure in reason(write(path, content))
        with pytest.raises(BadExample, match=cure):
            documents.texts(path, None)
        if pack := COMPRESS.get(kinds.packing(path.name)):
            assert cure in reason(write(path, pack(content)))


def test_a_pointer_among_text_is_a_bad_file(tmp_path: Path) -> None:
    """A page that only quotes one is text."""
    assert list(read(write(tmp_path / "a.md", b"It begins with\n" + POINTER), None))
    assert list(read(write(tmp_path / "b.md", "<p align='center'>A <html> page"), None))


REPOSITORIES: dict[str, tuple[list[str], list[str]]] = {  # all files, those that are text
    "a clone": (
        ["README.md", "LICENSE.txt", "dataset_card.md", "data/train-0.json.gz", "script.py"],
        ["data/train-0.json.gz"],
    ),
    "parquet": (["README.md", "README_zh.md", "data/a.parquet"], ["data/a.parquet"]),
    "packed text": (
        ["README.txt", "LICENCE", "a.txt.zst", "b.txt.zst"],
        ["a.txt.zst", "b.txt.zst"],
    ),
    "books and a card": (["README.md", "LICENSE-MIT.md", "a.txt"], ["a.txt"]),
    "checksums": (["SHA256SUMS.txt", "md5sum.txt", "a.jsonl.zst"], ["a.jsonl.zst"]),
    "requirements": (["requirements.txt", "a.jsonl", "b.txt.gz"], ["a.jsonl", "b.txt.gz"]),
    "a wiki": (["README.md", "guide/README.md", "guide/use.md"], ["README.md", "guide/README.md"]),
    "topics": (["license.txt", "copyright.txt", "tour.txt"], ["license.txt", "copyright.txt"]),
    "only a card": (["README.md"], ["README.md"]),
    "a name that begins so": (["licensed to sail.txt", "a.jsonl"], ["licensed to sail.txt"]),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_what_describes_data_of_another_kind_is_not_text(tmp_path: Path, name: str) -> None:
    every, text = REPOSITORIES[name]
    for file in every:
        write(tmp_path / file, file)
    said: list[str] = []
    got = {file.name for file in find(str(tmp_path), said.append)}
    assert set(text) <= got
    about = [file for file in every if kinds.describes(file)]
    assert (got & set(about)) == (set(text) & set(about))
    assert any("which describe the others: " in line for line in said) == bool({*about} - got)


def test_a_folder_of_many_readmes_is_divided_without_comparing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100,000 of them, each compared with those before it, that is 5e9 comparisons."""
    files = [File(f"/{number}/README.md", f"{number}/README.md", 1, "") for number in range(9)]
    compared: list[object] = []
    monkeypatch.setattr(File, "__eq__", lambda self, other: compared.append(other) or False)
    assert len(documents._divided(files)[0]) == 9
    assert not compared


def test_a_card_beside_files_that_cannot_be_read_is_not_text(tmp_path: Path) -> None:
    for name in ("README.md", "data/train.csv.gz", "data/test.csv.gz"):
        write(tmp_path / name, "x")
    with pytest.raises(InputError, match=r"none of its 3 files is a text file \(README.md desc"):
        find(str(tmp_path))
    assert [file.name for file in find(str(tmp_path / "README.md"))] == ["README.md"]


@pytest.mark.parametrize("packing", kinds.COMPRESSED)
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json"])
def test_compressed_files_have_the_documents_of_plain_ones(
    tmp_path: Path, packing: str, kind: str
) -> None:
    """Also if several parts follow each other, as parallel compressors and cat write them."""
    text = "\n\n".join(f"Zwölf Boxkämpfer {number} " * 9 for number in range(300)) + "\n"
    if kind != ".txt":
        text = "".join(json.dumps({"text": row}) + "\n" for row in text.split("\n\n"))
    data, half = text.encode(), len(text) // 2
    plain = write(tmp_path / f"a{'.txt' if kind == '.txt' else '.jsonl'}", data)
    wanted = list(read(plain, None))
    assert len(wanted) >= 3
    pack = COMPRESS[packing]
    path = write(tmp_path / f"B{kind}{packing}".upper(), pack(data[:half]) + pack(data[half:]))
    assert list(read(path, None)) == wanted
    assert documents.texts(path, None) == documents.texts(plain, None)


@pytest.mark.parametrize("packing", kinds.COMPRESSED)
def test_damaged_compressed_files_are_bad(tmp_path: Path, packing: str) -> None:
    data = COMPRESS[packing](os.urandom(9000).hex().encode())
    path = tmp_path / f"a.txt{packing}"
    broken = f"broken {packing}: "
    for content in (data[:-3], data[: len(data) // 2], data[:40] + b"zzzz" + data[44:], b"text"):
        assert reason(write(path, content)).startswith(broken)
    assert not list(read(write(path, COMPRESS[packing](b"")), None))
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        assert reason(write(tmp_path / name, data)) == f"compressed: add {packing} to its name"


def test_a_dictionary_of_gigabytes_is_refused(tmp_path: Path) -> None:
    """Memory has a bound that no file of others changes; xz -9 is below it."""
    for size, fits in ((2**26, True), (2**30, False)):
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": size, "nice_len": 8}]
        part = lzma.compress(b"text", filters=filters)
        path = write(tmp_path / "a.txt.xz", part)
        again = write(tmp_path / "b.txt.xz", lzma.compress(b"a ") + bytes(8192) + part + bytes(4))
        if fits:
            assert list(read(path, None)) == ["text"]
            assert list(read(again, None)) == ["a text"]
        else:
            assert "Memory usage limit" in reason(path)
            assert "Memory usage limit" in reason(again), "a part after the first has a limit, too"


def test_bad_rows_are_skipped_up_to_a_fraction(tmp_path: Path) -> None:
    """Of lines, whatever is wrong with them, and of the rows of parquet."""
    good = [json.dumps({"text": f"text {number}"}).encode() for number in range(20)]
    for bad, why in (
        (b'{"text": "cut o', "line 11: not JSON"),
        (b'{"text": "\xff"}', "line 11: not UTF-8"),
        (b'["text"]', "line 11: not a JSON object"),
        (b'{"text": 7}', "line 11: field 'text' is not text: int"),
        (b'{"text": "\\ud800"}', "line 11: an unpaired surrogate"),
        (b'{"text": "a\\u0000b"}', "line 11: field 'text' has a NUL character"),
        (b"\0" * 100, "line 11: not JSON"),
    ):
        path = write(tmp_path / "a.jsonl", b"\n".join([*good[:10], bad, *good[10:]]))
        skipped = Skipped()
        assert len(list(read(path, None, skipped, 0.05))) == 20
        assert (skipped.rows, skipped.bad) == (0, 1)
        assert skipped.first.startswith(why)
        for share in (0.04, 0.0):
            with pytest.raises(BadExample) as error:
                list(read(path, None, Skipped(), share))
            assert error.value.reason.startswith(
                f"1 of 21 lines cannot be used, more than data.max_bad_share={share:g} allows; "
                f"the first is {why}"
            )
    parquet(tmp_path / "b.parquet", text=["x", "a\0b", None, *"yz"])
    skipped = Skipped()
    assert list(read(tmp_path / "b.parquet", None, skipped, 0.2)) == ["x", "y", "z"]
    assert skipped == Skipped(1, 1, "row 2: field 'text' has a NUL character: not text")
    assert "; the first is row 2: " in reason(tmp_path / "b.parquet")


def test_a_line_without_an_end_is_one_bad_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next section begins after it."""
    monkeypatch.setattr(rows, "LONGEST_LINE", 40)
    monkeypatch.setattr(rows, "_CHUNK_BYTES", 16)
    line = b'{"text": "short"}\n'
    path = write(tmp_path / "a.jsonl", line + b"x" * 100 + b"\n" + line)
    skipped = Skipped()
    assert list(read(path, None, skipped, 0.5)) == ["short", "short"]
    assert skipped == Skipped(0, 1, "line 2: more than 40 bytes: split it")
    file = File(str(path), path.name, path.stat().st_size, "")
    half = FileRange(file, 40, file.size, Rows("text", 0.5))
    assert list(half.read(Skipped())) == ["short"]


LAYOUTS: dict[str, tuple[list[dict[str, object]], str | None]] = {
    "the first row lacks it": (
        [{"context": "see also"}, *[{"text": "a", "context": "Wikipedia"}] * 40],
        "text",
    ),
    "many first rows lack it": (
        [{"context": "a"}] * 300 + [{"text": "a", "context": "b"}] * 700,
        "text",
    ),
    "capitals": ([{"Text": "a", "Content": "b"}] * 9, "text"),
    "capitals of a rare name": ([{"Raw_Content": "a", "id": 1}] * 9, "raw_content"),
    "empty or null": ([{"text": "", "content": "a"}, {"text": None, "content": "a"}], "content"),
    "numbers": ([{"text": 7, "content": "a"}] * 5, "content"),
    "a few rows have another": ([{"content": "a"}] * 9 + [{"body": "b"}], "content"),
    "few rows have any": ([{"title": "a"}] * 9 + [{"passage": "b"}], "passage"),
    "none": ([{"words": "a"}] * 9, None),
    "several": ([{"content": "a", "body": "b"}] * 9, "several"),
    "two halves": ([{"content": "a"}] * 5 + [{"body": "b"}] * 5, "several"),
    "two spellings": ([{"content": "a", "Content": "b"}] * 5, "several"),
}


@pytest.mark.parametrize("kind", [".jsonl", ".json.gz", ".parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_field_is_the_one_that_most_rows_have(tmp_path: Path, layout: str, kind: str) -> None:
    """By the same rule in all kinds of files."""
    every, wanted = LAYOUTS[layout]
    path = tmp_path / f"a{kind}"
    if kind == ".parquet":
        if layout == "numbers":
            every = [row | {"text": 7} for row in every]
        pq.write_table(pa.Table.from_pylist(every, _schema(every)), path)
    else:
        data = "\n".join(map(json.dumps, every)).encode()
        path.write_bytes(gzip.compress(data) if kind == ".json.gz" else data)
    file = File(str(path), path.name, path.stat().st_size, "")
    if wanted == "several":
        with pytest.raises(InputError, match=r"several fields may have the text.*: set --f to the"):
            rows.choose([file], "name", "--f")
        return
    got = rows.choose([file], "name", "--f")
    assert (got.name if got else None) == wanted
    if got and got.has == got.of:
        section = FileRange(file, 0, file.size, Rows(got.name))
        assert len(list(section.read(Skipped()))) == len(every)


def _schema(every: list[dict[str, object]]) -> pa.Schema:
    names = dict.fromkeys(name for row in every for name in row)
    kinds = {name: pa.int64() for row in every for name in row if isinstance(row[name], int)}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in names])


def test_the_field_is_one_for_a_source(tmp_path: Path) -> None:
    """Weighted by size, from several places of a file, whatever a section or a small file has."""
    first = b"".join(b'{"context": "meta %d"}\n' % n for n in range(100))
    later = b"".join(b'{"text": "a text %d", "context": "meta"}\n' % n for n in range(40_000))
    large = write(tmp_path / "a.jsonl", first + later)
    small = objects(tmp_path / "b.jsonl", *[{"content": "b"}] * 90)
    files = find(str(tmp_path))
    chosen = rows.choose(files, "name", "--f")
    assert chosen is not None
    assert chosen.name == "text"
    assert chosen.of > 64 + 90
    file, half = files[0], files[0].size // 2
    parts = [FileRange(file, a, b, Rows("text")) for a, b in ((0, half), (half, file.size))]
    got = [text for part in parts for text in part.read(Skipped())]
    assert got == [f"a text {number}" for number in range(40_000)]
    assert documents.texts(large, None) == got
    assert documents.texts(small, None) == ["b"] * 90


class Counted(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def _counted(self, data: bytes) -> bytes:
        Counted.count += len(data)
        return data

    def read(self, size: int | None = -1) -> bytes:
        return self._counted(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._counted(super().readline(size))


@pytest.mark.parametrize("longest", [20, 40_000, 2_000_000])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_the_field_is_chosen_from_a_part_of_large_rows(
    suffix: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows of each place are read, also if they are books."""
    rng = random.Random(0)
    monkeypatch.setattr(Counted, "count", 0)
    monkeypatch.setattr(rows, "_FILE_BYTES", 2**19, raising=False)
    count = min(20_000, 2 + 6_000_000 // longest)
    every = [{"content": rng.randbytes(longest // 2).hex()} for _ in range(count)]
    if suffix == ".parquet":
        buffer = io.BytesIO()
        how: dict[str, Any] = {"row_group_size": -(-count // 9), "data_page_size": 2**14}
        how |= {"write_batch_size": 1, "use_dictionary": False, "compression": "none"}
        pq.write_table(pa.Table.from_pylist(every), buffer, **how)
        data = buffer.getvalue()
    else:
        data = "".join(f"{json.dumps(row)}\n" for row in every).encode()

    @contextlib.contextmanager
    def content(self: File, buffer_bytes: int) -> Iterator[Counted]:
        yield Counted(data)

    monkeypatch.setattr(File, "content", content)
    chosen = rows.choose([File("/a", f"a{suffix}", len(data), "")], "name", "--f")
    assert chosen is not None
    assert chosen.name == "content"
    assert chosen.has == chosen.of
    # With long rows, each place has to reach the end of a row, and of the next one.
    places = 1 if suffix == ".jsonl.gz" else 8
    assert Counted.count <= 2**19 + places * 4 * longest + 2**17


def test_rows_of_any_spelling_are_read(tmp_path: Path) -> None:
    path = objects(tmp_path / "a.jsonl", {"Text": "a"}, {"text": "b"}, {"TEXT": "c", "x": "d"})
    assert list(read(path, None)) == ["a", "b", "c"]
    assert list(read(path, "text")) == ["a", "b", "c"]
    assert list(read(parquet(tmp_path / "b.parquet", TEXT=["a"]), "text")) == ["a"]


def test_copies_under_other_names_are_named(tmp_path: Path) -> None:
    for name in ("book.txt", "latest.txt", "sub/old.txt"):
        write(tmp_path / name, "A book. " * 50_000)
    write(tmp_path / "other.txt", "A book. " * 49_999 + "No book.")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "empty2.txt", "")
    said: list[str] = []
    assert len(find(str(tmp_path), said.append)) == 6
    (line,) = said
    assert line.startswith(f"warning: --data.path {tmp_path}: 2 of 6 files have the size and both")
    assert "most likely copies: latest.txt = book.txt, sub/old.txt = book.txt; remove" in line
    # Of train.txt and an equal val.txt, only the latter is used.
    assert line.endswith("or their text is used twice where it is on one side")


@pytest.mark.parametrize("packing", kinds.COMPRESSED)
def test_a_small_file_that_unpacks_to_a_large_one_takes_little_memory(
    tmp_path: Path, packing: str
) -> None:
    path = write(tmp_path / f"a.txt{packing}", COMPRESS[packing](b"a" * 30_000_000))
    section = read(path, None)
    tracemalloc.start()
    try:
        assert sum(map(len, section)) == 30_000_000
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # 8 MiB of xz
    finally:
        tracemalloc.stop()
