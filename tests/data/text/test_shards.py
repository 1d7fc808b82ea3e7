"""Shards: how files are divided, and that they hold every document's tokens, whatever happens."""

import array
import errno
import hashlib
import json
import os
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from data.text.small_text import silent

from jaxtrain.data.text import documents, encoding, shards, specials, tokenizer
from jaxtrain.data.text.documents import File, FileRange
from jaxtrain.data.text.rows import Rows, Skipped
from jaxtrain.data.text.shards import COLUMNS, CachedShard, Recipe, Shard
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import disks

ROWS = Rows("text")
HERE = engines.Threads(1)


def text(seed: int, sentences: int = 30) -> str:
    """Sentences of made-up words and names of special tokens."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeinorst", k=rng.randint(1, 8))) for _ in range(60)]
    words += ["[SEP]", "[PAD]", "Ünicode", "3.14"]
    return " ".join(
        "It " + " ".join(rng.choices(words, k=rng.randint(1, 12))) + "." for _ in range(sentences)
    )


def texts(number: int) -> list[str]:
    return [text(10 * number + row) for row in range(5)]


def make(folder: Path, files: int = 4) -> Path:
    folder.mkdir()
    for number in range(files):
        rows = [json.dumps({"text": text}) for text in texts(number)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


def find_files(folder: Path) -> list[File]:
    return documents.find(str(folder), "--data.path", folder, silent)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    trained = tokenizer.train([text(seed) for seed in range(50)], 120)
    return Recipe(trained.to_str(), "tokenizer.json", False, (specials.SEP,), 120)


def prepared(plan: list[Shard], recipe: Recipe, root: Path, **how: Any) -> list[CachedShard]:
    root.mkdir(exist_ok=True)
    assert shards.prepare(plan, recipe, root, silent, **({"engine": HERE} | how))
    return [CachedShard.of(root / shard.folder(recipe), recipe.dtype) for shard in plan]


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.glob("shard-*/*")
        if path.is_file()
    }


def file(name: str, size: int) -> File:
    return File(f"/{name}", name, size, "1")


def test_groups_depend_only_on_names_and_sizes_and_change_little() -> None:
    rng = random.Random(0)
    files = [file(f"{n}.txt", rng.randrange(1, 40_000_000)) for n in range(400)]
    files += [file(f"large-{n}.jsonl", rng.randrange(2**28, 2**30)) for n in range(3)]
    plan = shards.plan(files, ROWS)
    assert shards.plan(rng.sample(files, len(files)), ROWS) == plan
    sections = [section for shard in plan for section in shard.file_ranges]
    covered = Counter[str]()
    for section in sections:
        covered[section.file.name] += section.stop - section.start
    assert covered == {one.name: one.size for one in files}
    assert all(shard.size <= shards.GROUP_BYTES for shard in plan)
    assert len(plan) < 4 * sum(one.size for one in files) / shards.GROUP_BYTES
    for _ in range(50):
        more = shards.plan(
            [*files, file(f"new-{rng.random()}", rng.randrange(1, 40_000_000))], ROWS
        )
        assert 1 <= len(set(more) - set(plan)) <= 3
        assert len(set(plan) - set(more)) <= 1


def test_equal_names_and_large_files_do_not_divide_without_end() -> None:
    one, two = file("a.txt", 2**27), file("b.txt", 2**28)
    assert {shard.file_ranges for shard in shards.plan([one, two], ROWS)} == {
        (FileRange(one, 0, 2**27, ROWS),),
        (FileRange(two, 0, 2**28, ROWS),),
    }
    packed = file("c.jsonl.gz", 2**30)  # a stream, whose documents are found only in order
    assert shards.plan([packed], ROWS) == [Shard((FileRange(packed, 0, 2**30, ROWS),))]
    (empty,) = shards.plan([file("empty.txt", 0)], ROWS)
    assert empty.size == 0


def read(section: FileRange) -> list[str]:
    return list(section.read(Skipped()))


@pytest.mark.parametrize("size", [7, 100, 1000, 10_000])
def test_ranges_of_a_file_have_each_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", size)
    monkeypatch.setattr(shards, "LARGE_BYTES", size)
    rows = [f"Ünïcode {n} 日本語 " * (n % 7 + 1) for n in range(60)]
    lines = [json.dumps({"text": row}, ensure_ascii=n % 2 == 0) for n, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n")
    pq.write_table(
        pa.table({"n": range(60), "text": rows}), tmp_path / "c.parquet", row_group_size=9
    )
    for path in sorted(tmp_path.iterdir()):
        (whole,) = (one for one in find_files(tmp_path) if one.name == path.name)
        pieces = [section for shard in shards.plan([whole], ROWS) for section in shard.file_ranges]
        assert len(pieces) == -(-whole.size // size)
        assert [row for piece in pieces for row in read(piece)] == rows
    for name, break_ in (("d.txt", "\n\n"), ("e.txt", "\r\n \r\n"), ("f.md", "\n"), ("g.txt", "")):
        (tmp_path / name).write_bytes(break_.join(rows).encode())
        (whole,) = (one for one in find_files(tmp_path) if one.name == name)
        pieces = [section for shard in shards.plan([whole], ROWS) for section in shard.file_ranges]
        parts = ["".join(read(piece)) for piece in pieces]
        joined = break_.join(rows).replace("\r\n", "\n").replace(" ", "").replace("\n", "")
        assert "".join(parts).replace(" ", "").replace("\n", "") == joined
        ends = {row.rstrip() for row in rows} if break_ else {joined}
        for part in filter(str.strip, parts):  # no range ends inside a line
            assert part.rstrip().rsplit("\n", 1)[-1] in ends or not break_


def test_a_shard_has_the_tokens_of_every_document_in_the_order_of_digests(
    tmp_path: Path, recipe: Recipe
) -> None:
    (shard,) = shards.plan(find_files(make(tmp_path / "in")), ROWS)
    (made,) = prepared([shard], recipe, tmp_path / "cache")
    words = tokenizers.Tokenizer.from_str(recipe.tokenizer)
    words.encode_special_tokens = True
    every = sorted(
        (one for number in range(4) for one in texts(number)),
        key=lambda one: hashlib.sha256(one.encode()).digest()[:8],
    )
    wanted: list[int] = []
    rows = []
    for document in every:
        encoded = words.encode(document, add_special_tokens=False)
        wanted += [specials.SEP, *encoded.ids]
        spans = zip(encoded.ids, encoded.offsets, strict=True)
        unknown = sum(end - start for id, (start, end) in spans if id == specials.UNK)
        head = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
        assert shards.digest(document.encode()) == head
        rows.append([head, len(wanted), len(document.encode()), len(document), unknown])
    tokens = np.fromfile(made.folder / "tokens", np.uint16)
    assert tokens.tolist() == wanted
    assert made.documents.tolist() == rows
    assert made.documents.shape == (20, len(COLUMNS))
    assert (tokens == specials.SEP).sum() == 20  # a "[SEP]" in the text is ordinary text


def test_chunks_processes_and_parts_do_not_change_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", 10_000)
    plan = shards.plan(find_files(make(tmp_path / "in", files=6)), ROWS)
    assert len(plan) > 3
    prepared(plan, recipe, tmp_path / "one")
    expected = contents(tmp_path / "one")
    prepared(plan, recipe, tmp_path / "two", engine=engines.Processes(2))
    with monkeypatch.context() as patched:
        patched.setattr(shards, "_CHUNK_CHARACTERS", 100)
        prepared(plan[::-1], recipe, tmp_path / "three")
    root = tmp_path / "parts"
    root.mkdir()
    done = [
        shards.prepare(plan, recipe, root, silent, engine=HERE, part=resumable.Part(index, 3))
        for index in range(3)
    ]
    assert done == [False, False, True]
    assert contents(tmp_path / "two") == contents(tmp_path / "three") == expected
    assert contents(root) == expected
    assert len(expected) == 3 * len(plan)


def test_a_shard_is_made_once_until_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", 20_000)
    folder, root = make(tmp_path / "in", files=12), tmp_path / "cache"

    def fresh(recipe: Recipe = recipe, rows: Rows = ROWS) -> int:
        before = set(root.glob("shard-*"))
        plan = shards.plan(find_files(folder), rows)
        prepared(plan, recipe, root)
        assert len({shard.folder(recipe) for shard in plan}) == len(plan)
        return len(set(root.glob("shard-*")) - before)

    assert fresh() > 4
    assert fresh() == 0
    shutil.move(folder, tmp_path / "moved")  # the path does not matter
    folder = tmp_path / "moved"
    assert fresh() == 0
    os.utime(folder / "1.jsonl", ns=(1, 1))
    assert fresh() == 1
    for name in ("-first.jsonl", "5-middle.jsonl", "z-last.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}))
        assert 1 <= fresh() <= 3
        assert fresh() == 0
    other = Recipe(recipe.tokenizer, "elsewhere", False, (specials.SEP,), 120)
    assert fresh(other) == 0
    assert fresh(rows=Rows("body")) > 4


def test_nothing_of_a_broken_file_is_used(tmp_path: Path, recipe: Recipe) -> None:
    folder = make(tmp_path / "in", files=3)
    (clean,) = prepared(shards.plan(find_files(folder), ROWS), recipe, tmp_path / "clean")
    (folder / "00.jsonl").write_text('{"text": "good at first"}\n{"text": ')
    (folder / "a.txt").write_bytes(b"good at first " * 2000 + b"\xff")
    (folder / "b.parquet").write_bytes(b"PAR1")
    (folder / "c.jsonl").write_text('{"text": "It is."}\n{"text": null}\n\n{"text": " "}')
    (folder / "d.txt").symlink_to("/dev/zero")
    (shard,) = shards.plan(find_files(folder), ROWS)
    (made,) = prepared([shard], recipe, tmp_path / "cache")
    assert {name: reason[:14] for name, reason in made.bad.items()} == {
        "00.jsonl": "1 of 2 lines c",
        "a.txt": "not UTF-8: inv",
        "b.parquet": "broken parquet",
        "d.txt": "not a regular ",
    }
    assert made.skipped == {"c.jsonl": 1}
    assert len(made.documents) == len(clean.documents) + 1
    assert set(clean.documents[:, 0].tolist()) < set(made.documents[:, 0].tolist())


def test_a_file_that_changes_meanwhile_stops_the_command(tmp_path: Path, recipe: Recipe) -> None:
    folder = make(tmp_path / "in")
    plan = shards.plan(find_files(folder), ROWS)
    (folder / "2.jsonl").write_text(json.dumps({"text": "more"}))
    with pytest.raises(InputError, match=r"2.jsonl changed while it was being read: start again"):
        prepared(plan, recipe, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("shard-*"))


def test_an_outage_of_the_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """In the middle of a file, of which documents have been written."""
    plan = shards.plan(find_files(make(tmp_path / "in")), ROWS)
    prepared(plan, recipe, tmp_path / "calm")
    read, tries = FileRange.read, []

    def reading(section: FileRange, *rest: Any) -> Iterator[str]:
        for number, document in enumerate(read(section, *rest)):
            if section.file.name == "2.jsonl" and number == 2 and len(tries) < 3:
                tries.append(number)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            yield document

    monkeypatch.setattr(shards, "_CHUNK_CHARACTERS", 500)
    monkeypatch.setattr(disks, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(FileRange, "read", reading)
    prepared(plan, recipe, tmp_path / "struck")
    assert len(tries) == 3
    assert contents(tmp_path / "struck") == contents(tmp_path / "calm")


def test_a_worker_that_is_killed_is_reported_with_its_files(tmp_path: Path, recipe: Recipe) -> None:
    plan = shards.plan(find_files(make(tmp_path / "in")), ROWS)

    class Kills:
        where = "nowhere"

        def map(self, begin: Any, items: Any) -> Iterator[Any]:
            yield from ((item, None) for item in items)

    with pytest.raises(InputError, match=r"jsonl and 3 more files: kills the worker that"):
        prepared(plan, recipe, tmp_path / "cache", engine=Kills())


def test_large_vocabularies_use_wider_ids(recipe: Recipe) -> None:
    for ids, width in ((2**16, 2), (2**16 + 1, 4)):
        wide = Recipe(recipe.tokenizer, "", False, (specials.SEP,), ids)
        assert wide.dtype.itemsize == width


@pytest.mark.parametrize("name", ["manifest.json", "tokens", "documents.npy"])
def test_a_damaged_shard_is_made_again(tmp_path: Path, recipe: Recipe, name: str) -> None:
    """Its files keep their sizes, as after a crash. Two records of it would disagree forever."""
    plan = shards.plan(find_files(make(tmp_path / "in")), ROWS)
    (made,) = prepared(plan, recipe, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    made.verify()
    path = made.folder / name
    path.write_bytes(bytes(path.stat().st_size))
    if name == "manifest.json":
        with pytest.raises(AssertionError):
            CachedShard.of(made.folder, recipe.dtype)
    else:
        with pytest.raises(RunAgain, match=rf"{name} is damaged: start again, and these tokens"):
            made.verify()
    (again,) = prepared(plan, recipe, tmp_path / "cache")
    again.verify()
    assert contents(tmp_path / "cache") == before


def test_tokens_take_no_memory_before_they_are_sorted(tmp_path: Path) -> None:
    """A compressed file of 42 GB of text is one shard."""
    many = encoding.Encoded(array.array("I", [7] * 10_000), 0)
    with shards._Writer(tmp_path, np.dtype("uint16")) as writer:
        writer.add(["a"], [many])
        mark = writer.mark()
        writer.add(["dropped"], [many])
        writer.reset(mark)
        tracemalloc.start()
        try:
            for number in range(100):
                writer.add([f"{number}"], [many])
            assert tracemalloc.get_traced_memory()[0] < 500_000
        finally:
            tracemalloc.stop()
        assert writer.finish()[1] == 101
    np.testing.assert_array_equal(np.fromfile(tmp_path / "tokens", np.uint16), [7] * 101 * 10_000)
    assert {path.name for path in tmp_path.iterdir()} == {"tokens", "documents.npy"}
