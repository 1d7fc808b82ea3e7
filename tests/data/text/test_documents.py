import errno
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peak_memory import peak_mib

from jaxtrain.data.text import documents
from jaxtrain.data.text.documents import SECTION_CHARACTERS, find, read, scan
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
        return [name for _, name, *_ in find(str(tmp_path / pattern), "--data.path", said.append)]

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


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("chunk", [7, 1000, 1 << 20])
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
        find(str(tmp_path), "--data.path", print)
    assert find(str(tmp_path / "a.txt"), "--data.path", print)


def test_rows_without_the_field_are_skipped_and_counted(tmp_path: Path) -> None:
    """Some, and also the first one, which then does not name the field."""
    titles = [{"title": "a"}, {"title": "b", "text": None}]
    path = rows(tmp_path / "a.jsonl", *titles, {"text": "one", "body": "b"}, {"text": "two"})
    for field in (None, "text"):
        skipped: Counter[str] = Counter()
        assert list(read(path, field, skipped)) == ["one", "two"]
        assert skipped == {"rows": 2}
    (scanned,) = scan(str(path), None, tmp_path, "--data.path", lambda line: None)
    assert (scanned.documents, scanned.skipped, scanned.reason) == (2, 2, None)


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


def test_scan_reads_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    write(folder / "a.txt", "one")
    write(folder / "b.txt", b"\xff")
    write(folder / "c.txt", " \n")
    rows(folder / "d.jsonl", {"text": "four"}, {"text": "fünf"})
    (folder / "e.txt").symlink_to(tmp_path / "gone.txt")
    opened: list[str] = []

    def watched(path: Path, *more: Any) -> object:
        opened.append(path.name)
        return read(path, *more)

    monkeypatch.setattr(documents, "read", watched)

    def run() -> list[documents.Scanned]:
        opened.clear()
        return scan(str(folder), None, tmp_path, "--data.path", lambda text: None)

    first = run()
    assert [file.documents for file in first] == [1, 0, 0, 2, 0]
    assert [file.characters for file in first] == [3, 0, 0, 8, 0]
    assert [file.text_bytes for file in first] == [3, 0, 0, 9, 0]
    reasons = [file.reason for file in first]
    assert [text is None for text in reasons] == [True, False, False, True, False]
    assert "not UTF-8" in str(reasons[1])
    assert reasons[2] == "no text in it"
    assert "No such file" in str(reasons[4])
    assert run() == first
    assert opened == []
    os.utime(folder / "a.txt", ns=(1, 1))
    assert run()[0].sha256 == first[0].sha256
    assert opened == ["a.txt"]
    write(folder / "a.txt", "two")
    assert run()[0].sha256 != first[0].sha256


def test_a_path_in_the_home_folder_has_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a path that begins with ~ does not depend on the working directory."""
    write(tmp_path / "home/texts/a.txt", "A text.")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for path in ("~/texts", str(tmp_path / "home/texts")):
            scan(path, None, tmp_path / "cache", "--data.path", print)
    assert len(list((tmp_path / "cache").glob("scan-*.jsonl"))) == 1


def test_files_that_could_not_be_read_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be unchanged, but its disk or its permissions may not."""
    write(tmp_path / "in/a.txt", "one")
    write(tmp_path / "in/b.txt", "two")

    def denied(path: Path, *more: Any) -> object:
        if path.name == "b.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path, *more)

    def run() -> list[str | None]:
        found = scan(str(tmp_path / "in"), None, tmp_path, "--data.path", lambda text: None)
        return [file.reason for file in found]

    with monkeypatch.context() as patched:
        patched.setattr(documents, "read", denied)
        assert run() == [None, "Permission denied"]
    assert run() == [None, None]


def test_saving_the_record_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a million files takes longer than the pause after which it is saved again."""
    for number in range(300):
        write(tmp_path / f"in/{number}.txt", "text")
    clock, saved = [0.0], list[int]()
    real = documents.cache.write_lines

    def saving(path: Path, lines: Iterable[str]) -> None:
        kept = list(lines)
        saved.append(len(kept))
        clock[0] += 12.0
        real(path, kept)

    def read_in_a_second(path: Path, *more: Any) -> object:
        clock[0] += 1.0
        return read(path, *more)

    monkeypatch.setattr(documents.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(documents.cache, "write_lines", saving)
    monkeypatch.setattr(documents, "read", read_in_a_second)
    found = scan(str(tmp_path / "in"), None, tmp_path, "--data.path", lambda text: None)
    assert len(found) == 300
    assert saved == [11, 132, 253, 300]


def test_a_scan_of_another_version_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in/a.txt", b"\xff")
    pattern, said = str(tmp_path / "in"), list[str]()
    for version, lines in ((documents._VERSION, 1), (documents._VERSION, 1), (-1, 2)):
        monkeypatch.setattr(documents, "_VERSION", version)
        scan(pattern, None, tmp_path, "--data.path", said.append)
        assert len(said) == lines


READS = """
import sys
from pathlib import Path
from jaxtrain.data.text import documents
from jaxtrain.errors import BadExample
try:
    print(sum(1 for _ in documents.read(Path(sys.argv[1]), None)))
except BadExample as bad:
    print(bad.reason)
"""


def test_lines_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_BYTES", 30)
    line = '{"text": "' + "x" * 17 + '"}\n'
    assert len(line) == 30
    assert len(list(read(write(tmp_path / "c.jsonl", line * 2), None))) == 2
    assert "line 2 has 31 bytes or more" in reason(write(tmp_path / "d.jsonl", line + " " + line))


def test_an_endless_line_is_not_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "zeros.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    most, count = peak_mib(READS, path)
    assert "line 1 has" in count
    assert most < 400, most


def test_devices_and_pipes_are_bad_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.parquet"):
        (tmp_path / name).symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "d.txt")
    found = documents.scan(str(tmp_path), None, tmp_path / "cache", "--data.path", print)
    assert [one.reason for one in found] == ["not a regular file"] * 4
