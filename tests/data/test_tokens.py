import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxtrain.data import documents, tokens
from jaxtrain.data.masking import SEP
from jaxtrain.data.tokens import LEFT_OUT, TRAIN, VAL, Corpus, assign, assign_all
from jaxtrain.errors import InputError


def silent(text: str) -> None:
    pass


def text(seed: int, sentences: int = 30) -> str:
    """Sentences of made-up words, with the names of special tokens among them."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeinorst", k=rng.randint(1, 8))) for _ in range(60)]
    words += ["[SEP]", "[PAD]", "Ünicode", "3.14"]
    return " ".join(
        "It " + " ".join(rng.choices(words, k=rng.randint(1, 12))) + "." for _ in range(sentences)
    )


def make(folder: Path, files: int = 4) -> Path:
    folder.mkdir()
    for number in range(files):
        rows = [json.dumps({"text": text(10 * number + row)}) for row in range(5)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


def corpus(folder: Path, cache: Path, change: Callable[[list], list] = lambda s: s) -> Corpus:
    cache.mkdir(exist_ok=True)
    files = documents.scan(str(folder), None, cache, "--data.path", silent)
    splits = assign(
        [f.documents for f in files], [f.name for f in files], train_split=0.7, max_examples=None
    )
    return Corpus(files=files, splits=change(splits), text_field=None)


def prepare(what: Corpus, cache: Path, say: Callable[[str], None] = silent) -> tuple[Path, dict]:
    return tokens.prepare(what, vocab_size=120, tokenizer_path=None, folder=cache, say=say)


def test_the_streams_hold_every_document_once(tmp_path: Path) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "cache")
    folder, manifest = prepare(what, tmp_path / "cache")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.encode_special_tokens = True
    for split, name in ((TRAIN, "train"), (VAL, "val")):
        wanted: list[int] = []
        ends = []
        mine = [document for number, document in what.read() if number == split]
        for document in mine:
            for sentence in documents.sentences(document):
                wanted += words.encode(sentence, add_special_tokens=False).ids
                ends.append(len(wanted))
            wanted.append(SEP)
        assert manifest["dtype"] == "uint16"
        got = np.fromfile(folder / f"{name}.tokens", np.uint16)
        assert got.tolist() == wanted
        # A "[SEP]" in the text is ordinary text.
        assert (got == SEP).sum() == len(mine) == manifest["splits"][name]["documents"] > 0
        assert np.fromfile(folder / f"{name}.ends", np.uint64).tolist() == ends
        facts = manifest["splits"][name]
        assert (facts["tokens"], facts["sentences"]) == (len(wanted), len(ends))
        assert facts["bytes"] == sum(len(document.encode()) for document in mine)


def test_batches_do_not_change_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "one")
    one, facts = prepare(what, tmp_path / "one")
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 100)
    (tmp_path / "two").mkdir()
    two, same_facts = prepare(what, tmp_path / "two")
    assert facts["splits"] == same_facts["splits"]
    for name in facts["files"]:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_the_vocabulary_comes_from_the_training_split(tmp_path: Path) -> None:
    folder = make(tmp_path / "in")
    what = corpus(folder, tmp_path / "cache")
    for file, split in zip(what.files, what.splits, strict=True):
        if split[0] == VAL:
            Path(file.path).write_text(json.dumps({"text": "яблоко яблоко яблоко"}))
    folder, _ = prepare(corpus(folder, tmp_path / "cache"), tmp_path / "cache")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert words.encode("яблоко").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_a_cache_is_read_while_it_fits_and_rebuilt_when_stale(tmp_path: Path) -> None:
    source, cache = make(tmp_path / "in"), tmp_path / "cache"
    said: list[str] = []

    def built(where: Path = source) -> tuple[bool, Path]:
        said.clear()
        folder, _ = prepare(corpus(where, cache), cache, said.append)
        return bool(said), folder

    first = built()
    assert first[0]
    assert built() == (False, first[1])
    os.utime(source / "1.jsonl", ns=(1, 1))  # read through again, found equal
    assert built() == (False, first[1])
    shutil.copytree(source, tmp_path / "copy")  # the place does not matter
    assert built(tmp_path / "copy") == (False, first[1])
    rows = (source / "1.jsonl").read_text()
    (source / "1.jsonl").write_text(rows.replace("a", "o", 1))
    changed = built()
    assert changed[0]
    assert changed[1] != first[1]
    (source / "9.jsonl").write_text(rows)
    added = built()
    assert added[0]
    (source / "9.jsonl").unlink()
    assert built() == (False, changed[1])


def test_other_settings_are_other_caches(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    first, _ = prepare(what, cache)
    other_size, _ = tokens.prepare(
        what, vocab_size=90, tokenizer_path=None, folder=cache, say=silent
    )
    given, manifest = tokens.prepare(
        what, vocab_size=90, tokenizer_path=other_size / "tokenizer.json", folder=cache, say=silent
    )
    split, _ = prepare(corpus(tmp_path / "in", cache, lambda s: [1 - x for x in s]), cache)
    assert len({first, other_size, given, split}) == 4
    assert manifest["vocabulary"] == 90
    assert (given / "train.tokens").read_bytes() == (other_size / "train.tokens").read_bytes()


def test_a_half_written_cache_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    _, whole = prepare(what, tmp_path)
    program = (
        "import os, pickle, sys\n"
        "from pathlib import Path\n"
        "from jaxtrain.data import tokens\n"
        "what, cache = pickle.load(sys.stdin.buffer)\n"
        "tokens._BATCH_CHARACTERS = 500\n"
        "flush, calls = tokens._Stream.flush, []\n"
        "def dying(self):\n"
        "    flush(self)\n"
        "    self._tokens.flush()\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5:\n"
        "        os.kill(os.getpid(), 9)\n"
        "tokens._Stream.flush = dying\n"
        "tokens.prepare(what, vocab_size=120, tokenizer_path=None, folder=cache, say=print)\n"
    )
    died = run_python(program, what, cache)
    assert died.wait() == -9
    left = list(cache.glob("tokens-*.tmp-*"))
    assert [path.name for path in left[0].glob("*.tokens") if path.stat().st_size]
    folder, manifest = prepare(what, cache)
    assert manifest["splits"] == whole["splits"]
    assert not list(cache.glob("*.tmp-*"))
    os.truncate(folder / "train.tokens", 100)
    _, manifest = prepare(what, cache)
    assert (folder / "train.tokens").stat().st_size == manifest["files"]["train.tokens"] > 100


def test_two_processes_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    program = (
        "import pickle, sys\n"
        "from jaxtrain.data import tokens\n"
        "what, cache = pickle.load(sys.stdin.buffer)\n"
        "folder, manifest = tokens.prepare(\n"
        "    what, vocab_size=120, tokenizer_path=None, folder=cache, say=lambda text: None)\n"
        "data = (folder / 'train.tokens').stat().st_size\n"
        "assert data == manifest['files']['train.tokens'], data\n"
    )
    both = [run_python(program, what, cache) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([path for path in cache.glob("tokens-*") if path.is_dir()]) == 1
    assert not list(cache.glob("*.tmp-*"))


def run_python(program: str, *values: object) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    with process.stdin as stream:
        pickle.dump(values, stream)
    return process


def test_a_file_that_changes_meanwhile_stops_the_build(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    path = tmp_path / "in" / "2.jsonl"
    for new in (path.read_text() + "\n" + json.dumps({"text": "more"}), "{broken", None):
        if new is None:
            path.unlink()
        else:
            path.write_text(new)
        with pytest.raises(InputError, match=r"2.jsonl changed while it was being read"):
            prepare(what, cache)
    assert not [p for p in cache.glob("tokens-*") if p.is_dir()]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_files_are_split_by_name_and_stay(share: float) -> None:
    names = [f"{number}.txt" for number in range(100)]

    def sides(chosen: list[str]) -> dict[str, int]:
        splits = assign([3] * len(chosen), chosen, train_split=share, max_examples=None)
        assert all(len(split) == 3 and len(set(split.tolist())) == 1 for split in splits)
        return {name: int(split[0]) for name, split in zip(chosen, splits, strict=True)}

    every = sides(names)
    training = sum(side == TRAIN for side in every.values())
    assert abs(training - 100 * share) <= 12
    assert 1 <= training <= 99
    if 0 < share < 1:
        fewer = sides(names[10:60])
        assert fewer.items() <= every.items()
    assert set(sides(names[:2]).values()) == {TRAIN, VAL}


def test_one_file_is_split_by_document() -> None:
    (split,) = assign([1000], ["a.jsonl"], train_split=0.9, max_examples=None)
    assert 60 < (split == VAL).sum() < 140
    (more,) = assign([1100], ["b.jsonl"], train_split=0.9, max_examples=None)
    assert (more[:1000] == split).all()
    (two,) = assign([2], ["a.txt"], train_split=0.9, max_examples=None)
    assert sorted(two.tolist()) == [TRAIN, VAL]
    with pytest.raises(InputError, match=r"has 1 document.*--data.val_path"):
        assign([1], ["a.txt"], train_split=0.9, max_examples=None)


@pytest.mark.parametrize("limit", [2, 3, 50, 999, 1000, 5000])
def test_max_examples_counts_documents_over_the_whole_corpus(limit: int) -> None:
    counts = [10] * 100
    names = [f"{number}.txt" for number in range(100)]
    full = np.concatenate(assign(counts, names, train_split=0.9, max_examples=None))
    got = np.concatenate(assign(counts, names, train_split=0.9, max_examples=limit))
    kept = got != LEFT_OUT
    assert kept.sum() == min(limit, 1000)
    assert (got[kept] == full[kept]).all()
    assert set(got[kept].tolist()) == {TRAIN, VAL}
    if limit == 50:
        assert abs(np.flatnonzero(kept).mean() - 500) < 50
        assert abs((got == VAL).sum() / 50 - (full == VAL).mean()) < 0.02
    alone = np.concatenate(assign_all(counts, TRAIN, limit))
    assert (alone == TRAIN).sum() == min(limit, 1000)
