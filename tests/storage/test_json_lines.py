"""Files of JSON objects: reading a file that grows and is rewound."""

import json
import os
import random
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from jaxtrain.errors import InputError
from jaxtrain.storage.json_lines import JsonLines, Reader, Record, read


@pytest.mark.parametrize("rewinds", [1, 2, 3])
def test_a_reader_sees_each_rewind(tmp_path: Path, rewinds: int) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.add(*({"step": step} for step in range(1, 9)))
    reader = Reader(lines.path)
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
    reader = Reader(path)
    assert list(reader.new()) == [{"step": 1}]
    assert list(reader.new()) == []
    JsonLines(path).add({"step": 2})  # removes the torn line
    assert list(reader.new()) == [{"step": 2}]


def test_a_reader_sees_a_file_that_grew_again_to_its_length(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.add({"step": 1, "time": 0.5}, {"step": 2, "time": 0.6})
    reader = Reader(lines.path)
    assert len(list(reader.new())) == 2
    lines.rewind(partial(_until, 1))
    lines.add({"step": 2, "time": 0.7}, {"step": 3, "time": 0.8})
    assert [record["time"] for record in reader.new()] == [0.5, 0.7, 0.8]


def test_a_rewind_keeps_the_records_up_to_a_step(tmp_path: Path) -> None:
    """Records of random lengths, also much longer than a piece of the file that is read."""
    path = tmp_path / "examples.jsonl"
    for seed in range(15):
        rng = random.Random(seed)
        path.unlink(missing_ok=True)
        records = [
            {"step": step, "ids": [rng.randrange(10**6)] * rng.choice([0, 1, 100, 9000, 40_000])}
            for step in range(1, rng.randint(1, 25))
        ]
        lines = JsonLines(path)
        lines.add(*records)
        last = rng.randint(0, len(records) + 1)
        lines.rewind(partial(_until, last))
        assert list(read(path)) == records[:last], seed


def test_a_rewind_reads_what_it_removes_and_needs_no_more_memory(tmp_path: Path) -> None:
    path, steps = tmp_path / "examples.jsonl", 50_000
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "ids": [step] * 64}) + "\n")
        file.write('{"torn')
    size, parsed = path.stat().st_size, list[int]()
    assert size > 2e7

    def until(record: Record) -> bool:
        parsed.append(record["step"])
        return bool(record["step"] <= steps - 10)

    tracemalloc.start()
    lines = JsonLines(path)
    lines.rewind(until)
    lines.add({"step": steps - 9})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parsed == list(range(steps, steps - 11, -1))
    assert peak < 1e6
    assert [record["step"] for record in read(path)] == list(range(1, steps - 8))


def test_a_rewind_of_another_file_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    for content, words in (
        (b"mine\n" * 10_000, "contains a line that jaxtrain did not write"),
        (os.urandom(2**20).replace(b"\n", b"") * 20 + b"\n", "is not UTF-8|did not write"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=words):
            JsonLines(path).rewind(partial(_until, 3))
        assert path.read_bytes() == content
