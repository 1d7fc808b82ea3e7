import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data.text.small_text import Model, opened, sequences, silent, words_of, write

from jaxtrain.data.quarantine import BrokenFileLimit, Quarantine
from jaxtrain.data.source import Source
from jaxtrain.data.text import Masked, stdlib_corpus
from jaxtrain.data.text.masking import masked_count
from jaxtrain.data.text.specials import CLS, PAD, SEP
from jaxtrain.errors import InputError


def example(source: Source, index: int, seed: int = 0) -> dict[str, np.ndarray]:
    return source.example(index, np.random.default_rng(seed))


def test_every_token_of_the_corpus_occurs_once(folder: Path, cache: Path) -> None:
    sources = opened(folder, cache)
    words = words_of(sources)
    got: list[str] = []
    for source in (sources.train, sources.val):
        ids: list[int] = []
        for sequence in sequences(source):
            assert sequence.shape == (32,)
            assert sequence.dtype == np.int32
            assert sequence[0] == CLS
            used = sequence[sequence != PAD]
            assert used[-1] == SEP
            assert not sequence[len(used) :].any()
            ids += used[(used != CLS) & (used != SEP)].tolist()
        got.append(" ".join(map(str, ids)))
    sides = [0, 0]
    for path in folder.iterdir():
        ids = words.encode(path.read_text(), add_special_tokens=False).ids
        document = " ".join(map(str, ids))
        (side,) = (number for number in (0, 1) if document in got[number])
        assert got[side].count(document) == 1
        got[side] = got[side].replace(document, "")
        sides[side] += 1
    assert all(sides)
    assert not "".join(got).strip()


def test_examples_are_masked_reproducibly(folder: Path, cache: Path) -> None:
    source = opened(folder, cache).train
    slots = masked_count(32, 0.15)
    for index in range(len(source)):
        plain = sequences(source)[index]
        got = example(source, index, index)
        assert {name: (array.shape, array.dtype.name) for name, array in got.items()} == {
            "tokens": ((32,), "int32"),
            "positions": ((slots,), "int32"),
            "targets": ((slots,), "int32"),
            "target_weights": ((slots,), "float32"),
        }
        used = got["target_weights"] == 1
        assert used.sum() == masked_count(int((plain > 4).sum()), 0.15)
        restored = got["tokens"].copy()
        restored[got["positions"][used]] = got["targets"][used]
        assert (restored == plain).all()
        again = example(source, index, index)
        assert all((got[name] == again[name]).all() for name in got)


def test_random_share_and_keep_share_affect_examples(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "random_share", 0.0)
    monkeypatch.setattr(Masked, "keep_share", 0.0)
    everything = opened(folder, cache, Model(mask_fraction=1.0)).train
    assert (example(everything, 0)["tokens"] <= 4).all()
    monkeypatch.setattr(Masked, "keep_share", 1.0)
    kept = opened(folder, cache, Model(mask_fraction=1.0)).train
    assert (example(kept, 0)["tokens"] == sequences(kept)[0]).all()


def test_the_fingerprint_changes_with_the_examples(folder: Path, tmp_path: Path) -> None:
    one = opened(folder, tmp_path / "one")
    shutil.copytree(folder, tmp_path / "copy")
    same = opened(tmp_path / "copy", tmp_path / "two", Model(mask_fraction=0.3))
    assert one.train.fingerprint == same.train.fingerprint
    assert one.val.fingerprint == same.val.fingerprint
    path = tmp_path / "copy" / "0.txt"
    path.write_text(path.read_text() + " One more.")
    others = [
        opened(folder, tmp_path / "one", Model(sequence_length=40)),
        opened(folder, tmp_path / "one", Model(vocab_size=100)),
        opened(folder, tmp_path / "one", max_examples=4),
        opened(tmp_path / "copy", tmp_path / "two"),
    ]
    *first, changed = [(s.train.fingerprint, s.val.fingerprint) for s in [one, *others]]
    # The single document that validates may be that of data.max_examples.
    assert len({train for train, _ in first}) == len(first)
    assert len({val for _, val in first}) >= len(first) - 1
    # The changed document is in one of the two splits, but the vocabulary may change both.
    assert changed != first[0]


def test_bad_files_are_reported_and_not_used(tmp_path: Path) -> None:
    source = write(tmp_path / "in")
    clean = opened(source, tmp_path / "cache")
    (source / "a.txt").write_bytes(b"good at first \xff")
    (source / "b.jsonl").write_text('{"text": "good at first"}\n{"text": \n{')
    said: list[str] = []
    config = Masked(path=str(source), batch_size=2, cache_dir=str(tmp_path), max_bad_share=0.5)
    got = config.open(Model(), seed=0, say=said.append)
    assert got.files == 8
    assert [(Path(bad.path).name, bad.reason[:12]) for bad in got.bad] == [
        ("a.txt", "not UTF-8: i"),
        ("b.jsonl", "2 of 3 lines"),
    ]
    assert sum(text.startswith("skipped: ") for text in said) == 2
    assert "8 text files (2 bad)" in got.summary
    assert len(got.train) == len(clean.train)
    with pytest.raises(InputError, match=r"no text .* first of 1 broken files is .*a.txt: not"):
        opened(source / "a.txt", tmp_path, max_bad_share=1.0)


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abcdefg":
        rows = [json.dumps({"text": f"A row {number} of {name}."}) for number in range(30)]
        (tmp_path / f"in/{name}.jsonl").write_text("\n".join([*rows, '{"text": "cut', "[]"]))
    said: list[str] = []
    config = Masked(path=str(tmp_path / "in"), batch_size=2, cache_dir=str(tmp_path))
    got = config.open(Model(), seed=0, say=said.append)
    assert not got.bad
    listed = [line for line in said if line.startswith("skipped: ")]
    assert len(listed) == 6
    assert all(".jsonl, such as line 31: not JSON (" in line for line in listed[:5])
    assert listed[-1] == "skipped: 4 bad rows in 2 more files"


def test_too_many_bad_files_are_refused(tmp_path: Path) -> None:
    """In all inputs together."""
    good, source = write(tmp_path / "good", files=4), tmp_path / "in"
    source.mkdir()
    text = "".join(f"A file with text {number}. " for number in range(9000))
    (source / "a.txt").write_text(text)
    for number in range(7):
        (source / f"bad{number}.txt").write_bytes(b"\xff")
    said: list[str] = []
    config = Masked(
        path=str(good), more_paths=(str(source),), batch_size=2, cache_dir=str(tmp_path / "cache")
    )
    sources = config.open(Model(), seed=0, say=said.append)
    assert {Path(bad.path).name for bad in sources.bad} == {f"bad{n}.txt" for n in range(7)}
    listed = [line for line in said if line.startswith("skipped: ")]
    assert listed == [*(f"skipped: {bad}" for bad in sources.bad[:5]), "skipped: 2 more"]
    quarantine = Quarantine.open(tmp_path, 0)
    reason = BrokenFileLimit(sources, quarantine, config.max_bad_share).stop_reason()
    assert reason is not None
    assert reason.startswith("7 of 12 input files are broken (58.3%)")
    assert BrokenFileLimit(sources, quarantine, 0.7).stop_reason() is None


def test_unused_ids_of_a_small_vocabulary_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["ab " * (1 + number) + "ba." for number in range(20)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    said: list[str] = []
    config = Masked(path=str(path), batch_size=2, cache_dir=str(tmp_path))
    sources = config.open(Model(mask_fraction=1.0), seed=0, say=said.append)
    assert any("has 12 ids and model.vocab_size is 120: 108 ids" in text for text in said)
    for seed in range(20):
        assert example(sources.train, 0, seed)["tokens"].max() < 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_bad_share": 1.5}, "data.max_bad_share=1.5: use a number of at least 0 and at most"),
        ({"val_documents": 0}, "data.val_documents=0: use"),
        ({"max_examples": 1}, "data.max_examples is 1: use at least 2"),
        ({"max_examples": 0, "val_path": "x"}, "data.max_examples is 0: use at least 1"),
        ({"more_paths": ("b",)}, "data.more_paths requires data.path"),
        ({"path": "a", "more_paths": ("b",), "weights": (1.0,)}, "has 1 numbers for 2 sources"),
        ({"path": "a", "weights": (0.0,)}, "use numbers above 0"),
    ],
)
def test_wrong_values(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Masked(batch_size=2, **fields)


def test_wrong_input(folder: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--data.path"):
        Masked(batch_size=2, cache_dir=str(cache)).open(Model(), seed=0, say=silent)
    with pytest.raises(InputError, match=r"gone: no such file .*; pass a text file \("):
        opened(tmp_path / "gone", cache)
    with pytest.raises(InputError, match=r"gone: no such file .*; pass a text"):
        opened(folder, cache, val_path=str(tmp_path / "gone"))
    with pytest.raises(InputError, match="sequence_length is 2"):
        opened(folder, cache, Model(sequence_length=2))


def test_demo_trains_on_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corpus(root: Path, say: object) -> Path:
        return write(root / "docs")

    monkeypatch.setattr(stdlib_corpus, "prepare", corpus)
    config = Masked(batch_size=2, demo=True, cache_dir=str(tmp_path))
    assert config.open(Model(), seed=0, say=silent).files == 6
