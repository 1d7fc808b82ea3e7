"""Windows of a token stream: each token is predicted once; a window depends on its index only."""

import dataclasses
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data.text import streams, windows
from jaxtrain.data.text.layout import Rule
from jaxtrain.data.text.streams import SHARD, Streams
from jaxtrain.data.text.windows import WindowSource


def source(
    folder: Path, length: int, sequence_length: int = 8, holes: tuple[int, ...] = ()
) -> WindowSource:
    """A source of the stream 1000, 1001, ...; id n stands for n % 7 bytes.

    Args:
        holes: positions in the stream before which the shard has other tokens.
    """
    for cached in (streams._table, streams._file):  # pytest may use the path of a test again
        cached.cache_clear()
    shard = folder / "shard"
    shard.mkdir(exist_ok=True)
    pieces = np.split(1000 + np.arange(length), holes)
    filled = [np.append(piece, [9, 9, 9]) for piece in pieces]
    np.concatenate(filled).astype(np.uint16).tofile(shard / "tokens")
    starts = [0, *holes]
    runs = [(start, start + 3 * number) for number, start in enumerate(starts)]
    np.array(runs, np.uint64).tofile(folder / "a.runs")
    examples = Rule(sequence_length, overlap=1).windows(length)
    np.array((b"shard", length, 0, len(runs), examples), SHARD).tofile(folder / "a.shards")
    (np.arange(3000) % 7).astype(np.int32).tofile(folder / "token_bytes")
    return WindowSource(
        streams=Streams(str(folder), str(folder / "a"), "uint16", examples),
        token_bytes=str(folder / "token_bytes"),
        sequence_length=sequence_length,
        fingerprint="windows",
    )


@pytest.mark.parametrize("length", [2, 9, 17, 100])
@pytest.mark.parametrize("size", [1, 8, 64])
@pytest.mark.parametrize("holes", [(), (1,), (2, 3, 9, 16, 50, 51)])
def test_each_token_but_the_first_is_a_target_once(
    length: int, size: int, holes: tuple[int, ...], tmp_path: Path
) -> None:
    of = source(tmp_path, length, size, tuple(hole for hole in holes if hole < length))
    stream = (1000 + np.arange(length)).tolist()
    targets, counted = [], 0
    for index in range(len(of)):
        example = of.example(index)
        assert {name: (part.shape, part.dtype.name) for name, part in example.items()} == (
            dict.fromkeys(("tokens", "targets", "target_bytes"), ((size,), "int32"))
        )
        used = example["targets"] != windows.IGNORED
        assert used.any()
        assert used.all() or index == len(of) - 1
        assert (example["tokens"][used] + 1 == example["targets"][used]).all()
        assert (
            example["tokens"].tolist()[: len(stream[index * size :])]
            == (stream[index * size : (index + 1) * size])
        )
        assert (example["target_bytes"][used] == example["targets"][used] % 7).all()
        assert not example["target_bytes"][~used].any()
        assert example["tokens"].min() >= 0
        targets += example["targets"][used].tolist()
        counted += int(example["target_bytes"].sum())
    assert targets == stream[1:]
    assert counted == sum(token % 7 for token in stream[1:])
    for wrong in (-1, len(of)):
        with pytest.raises(IndexError):
            of.example(wrong)


def test_a_window_depends_only_on_its_index(tmp_path: Path) -> None:
    of = source(tmp_path, 100)
    last = [of.example(index) for index in reversed(range(len(of)))][::-1]
    data = pickle.dumps(of)  # after its first use
    assert len(data) < 1000
    there = pickle.loads(data)
    for index in range(len(of)):
        for name, part in there.example(index, np.random.default_rng(index)).items():
            assert (part == last[index][name]).all()


def test_a_stream_of_one_token_predicts_nothing(tmp_path: Path) -> None:
    assert len(source(tmp_path, 1)) == Rule(8, overlap=1).windows(0) == 0


def test_large_ids_are_not_truncated(tmp_path: Path) -> None:
    of = source(tmp_path, 3)
    of = dataclasses.replace(of, streams=dataclasses.replace(of.streams, dtype="uint32"))
    np.array([0, 70_000, 69_999], np.uint32).tofile(tmp_path / "shard" / "tokens")
    np.arange(70_001, dtype=np.int32).tofile(tmp_path / "token_bytes")
    example = of.example(0)
    assert example["tokens"].tolist() == [0, 70_000, 69_999, 0, 0, 0, 0, 0]
    assert example["targets"].tolist() == [70_000, 69_999, -1, -1, -1, -1, -1, -1]
    assert example["target_bytes"].tolist() == [70_000, 69_999, 0, 0, 0, 0, 0, 0]


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    """Windows do not cross shards; only a few shards are open at a time."""
    rows, examples = [], 0
    for number in range(200):
        shard = tmp_path / f"shard-{number}"
        shard.mkdir()
        (1000 + np.arange(number + 2)).astype(np.uint16).tofile(shard / "tokens")
        examples += Rule(8, overlap=1).windows(number + 2)
        rows.append((shard.name.encode(), number + 2, number, 1, examples))
    of = source(tmp_path, 3)
    np.array(rows, SHARD).tofile(tmp_path / "a.shards")
    np.zeros((200, 2), np.uint64).tofile(tmp_path / "a.runs")
    of = dataclasses.replace(of, streams=dataclasses.replace(of.streams, examples=examples))
    before = len(os.listdir("/proc/self/fd"))
    targets = [t for index in range(len(of)) for t in of.example(index)["targets"].tolist()]
    assert [t for t in targets if t >= 0] == [
        1000 + token for number in range(200) for token in range(1, number + 2)
    ]
    assert len(os.listdir("/proc/self/fd")) < before + 100
