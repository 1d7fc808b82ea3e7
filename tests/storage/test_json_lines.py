"""Files of JSON objects: reading a file that grows and is rewound."""

import contextlib
from functools import partial
from pathlib import Path

import pytest

from jaxtrain.storage.json_lines import JsonLines, Reader, Record


@pytest.mark.parametrize("rewinds", [1, 2, 3])
def test_a_reader_sees_each_rewind(tmp_path: Path, rewinds: int) -> None:
    """The second replacement may get the inode that the file had when it was last read."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.add(*({"step": step} for step in range(1, 9)))
    with contextlib.closing(Reader(lines.path)) as reader:
        assert len(list(reader.new())) == 8
        assert list(reader.new()) == []
        for last in range(7, 7 - rewinds, -1):
            lines.rewind(partial(_until, last))
        lines.add({"step": 100})
        assert [record["step"] for record in reader.new()] == [*range(1, last + 1), 100]
        assert list(reader.new()) == []


def _until(last: int, record: Record) -> bool:
    return bool(record["step"] <= last)


def test_a_torn_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"')
    with contextlib.closing(Reader(path)) as reader:
        assert list(reader.new()) == [{"step": 1}]
        assert list(reader.new()) == []
        JsonLines(path).add({"step": 2})  # removes the torn line, in the same file
        assert list(reader.new()) == [{"step": 2}]
