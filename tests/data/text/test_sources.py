"""Several sources of text, given tokenizers, and documents inside a sequence."""

import dataclasses
import json
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from small_text import Model, opened, sequences, silent, write

from jaxtrain.data import sampler
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text import (
    Causal,
    Masked,
    documents,
    hub_datasets,
    specials,
    splitting,
    tokenizer,
)
from jaxtrain.data.text.masking import MaskedSource
from jaxtrain.data.text.sources import Prepared
from jaxtrain.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "in")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with other letters, so that a token identifies its source."""
    top = write(tmp_path_factory.mktemp("other") / "in", files=3)
    for path in top.iterdir():
        text = path.read_text().lower()
        path.write_text(text.translate(str.maketrans("aeinorst", "bcdfghjk")))
    return top


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_sources_share_a_vocabulary_and_are_drawn_by_weight(
    folder: Path, other: Path, cache: Path
) -> None:
    got = opened(folder, cache, more_paths=(str(other),), weights=(1.0, 3.0))
    assert got.files == 9
    assert isinstance(got.train, Mixture)
    first, second = got.train.parts
    assert isinstance(first, MaskedSource)
    assert isinstance(second, MaskedSource)
    assert first.tokenizer_path == second.tokenizer_path
    words = tokenizers.Tokenizer.from_file(first.tokenizer_path)
    for part, letters in ((first, "aeinorst"), (second, "bcdfghjk")):
        text = words.decode(sequences(part)[0].tolist())
        assert set(text) <= {*letters, " ", "."}, text
    where = sampler.order_of(got.train, 0)
    drawn = [where(position) < len(first) for position in range(len(got.train))]
    assert sum(drawn) == got.train.per_epoch[0]
    assert abs(got.train.per_epoch[0] - len(got.train) / 4) <= 0.5
    val = len(opened(folder, cache).val) + len(opened(other, cache).val)
    assert abs(len(got.val) - val) <= 0.3 * val  # the vocabulary differs
    unweighted = opened(folder, cache, more_paths=(str(other),)).train
    assert isinstance(unweighted, Mixture)
    assert unweighted.per_epoch == unweighted.sizes


def test_max_examples_is_divided_among_the_sources(folder: Path, tmp_path: Path) -> None:
    """Each .txt file is one document here."""
    said: list[str] = []
    config = Masked(
        path=str(folder),
        more_paths=(str(folder),),
        batch_size=2,
        cache_dir=str(tmp_path),
        max_examples=6,
    )
    summary = config.open(Model(), seed=0, say=said.append).summary
    assert any("data.max_examples is 6: using 6 of 12 documents" in line for line in said)
    assert "train: 4 documents" in summary
    assert "val: 2 documents" in summary
    said.clear()
    small = dataclasses.replace(
        config, max_examples=2
    )  # one training and one validation document per source
    summary = small.open(Model(), seed=0, say=said.append).summary
    assert any("data.max_examples is 2: using 4 of 12 documents" in line for line in said)
    assert "train: 2 documents" in summary
    assert "val: 2 documents" in summary


def test_a_fetched_dataset_is_split_by_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the last part has few documents, and other files are beside the parts."""
    folder = tmp_path / "[hf]"
    folder.mkdir()
    for number, count in enumerate((30, 30, 1, 30)):
        texts = [f"Document {number} {row} has words." for row in range(count)]
        hub_datasets._write_part(folder / f"part-{number:06d}.parquet", texts)
    (folder / "progress.json").write_text("{}")
    monkeypatch.setattr(hub_datasets, "fetch", lambda *_: (folder, 3))
    said: list[str] = []
    config = Masked(path="hf:some/name", batch_size=2, cache_dir=str(tmp_path))
    sources = config.open(Model(), seed=0, say=said.append)
    assert sources.files == 3
    train, val = (int(n) for n in re.findall(r"(\d+) documents", sources.summary))
    assert train + val == 61
    assert 45 < train < 60
    assert not any("skipped" in line for line in said)


def test_padding_is_measured_and_below_one_percent(folder: Path, tmp_path: Path) -> None:
    got = opened(folder, tmp_path, Model(sequence_length=128))
    assert isinstance(got.train, MaskedSource)
    padding = np.mean([(sequence == 0).mean() for sequence in sequences(got.train)])
    assert f"padding {100 * padding:.2f}% (measured)" in got.summary
    all_but_last = [(sequence == 0).mean() for sequence in sequences(got.train)[:-1]]
    assert np.mean(all_but_last) < 0.01


def bert_like(path: Path) -> Path:
    """A tokenizer with BERT's special tokens, in BERT's order, at other ids."""
    entries = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"aeinorst."]
    entries += [f"##{letter}" for letter in "aeinorst"]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({entry: i for i, entry in enumerate(entries)})
    )
    words.add_special_tokens([entry for entry in entries[:6] if entry != "[unused0]"])
    words.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words.save(str(path))
    return path


def test_a_tokenizer_with_special_tokens_at_other_ids(folder: Path, tmp_path: Path) -> None:
    path = bert_like(tmp_path / "tokenizer.json")
    got = opened(folder, tmp_path, Model(vocab_size=30), tokenizer=str(path))
    source = got.train
    assert isinstance(source, MaskedSource)
    assert source.specials == specials.Specials(0, 2, 3, 4, 5)
    assert got.files_to_keep["tokenizer.json"] == path.read_bytes()
    for index in range(5):
        example = source.example(index, np.random.default_rng(index))
        assert example["tokens"][0] == 3
        used = example["target_weights"] == 1
        assert example["targets"][used].min() > 5
        assert (example["tokens"][example["positions"][used]] == 5).mean() > 0.3


def test_the_padding_ids_of_tokenizer_and_model_must_be_equal(folder: Path, tmp_path: Path) -> None:
    path = bert_like(tmp_path / "tokenizer.json")
    path.write_text(path.read_text().replace("[PAD]", "[X]").replace("[unused0]", "[PAD]"))
    model = Model(vocab_size=30)
    with pytest.raises(InputError, match=r"id 1, but model.pad_id is 0: set --model.pad_id 1"):
        opened(folder, tmp_path, model, tokenizer=str(path))
    got = opened(folder, tmp_path, dataclasses.replace(model, pad_id=1), tokenizer=str(path))
    assert any((sequence[-1] == 1) for sequence in sequences(got.train))


@pytest.mark.parametrize("kind", ["bpe"])
def test_other_kinds_of_tokenizer(kind: str, folder: Path, tmp_path: Path) -> None:
    got = opened(folder, tmp_path, Model(vocab_size=400), tokenizer_kind=kind)
    assert isinstance(got.train, MaskedSource)
    words = tokenizers.Tokenizer.from_file(got.train.tokenizer_path)
    text = words.decode(sequences(got.train)[0].tolist())
    assert len(text.split()) > 5


def test_segments_number_the_documents_of_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["ab " * (1 + number) + "ba." for number in range(20)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = Masked(path=str(path), batch_size=2, cache_dir=str(tmp_path))
    plain = config.open(Model(), seed=0, say=silent).train
    assert "segments" not in plain.example(0, np.random.default_rng(0))
    source = config.open(Model(attend="document"), seed=0, say=silent).train
    assert isinstance(source, MaskedSource)
    assert source.fingerprint == plain.fingerprint
    sequence = source.sequence(0)
    segments = source.example(0, np.random.default_rng(0))["segments"]
    assert segments.dtype == np.int32
    number, wanted = 1, []
    for token in sequence:
        wanted.append(0 if token == 0 else number)
        number += token == 3
    assert segments.tolist() == wanted
    assert max(wanted) > 2


@pytest.mark.parametrize("kind", [Masked, Causal])
def test_what_a_worker_receives_does_not_grow_with_the_files(
    tmp_path: Path, kind: type[Masked] | type[Causal]
) -> None:
    sizes = []
    for files in (3, 30):
        path = write(tmp_path / f"{files:02}", files=files)
        data = kind(path=str(path), batch_size=1, cache_dir=str(tmp_path))
        sources = data.open(Model(vocab_size=300), seed=0, say=silent)
        sizes.append(len(pickle.dumps(sources.train)))
    assert sizes[0] == pytest.approx(sizes[1], abs=10)  # of numbers


def _config(path: str, **fields: object) -> Masked:
    return Masked(path=path, batch_size=4, **fields)  # type: ignore[arg-type]


def _corpora(config: Masked) -> tuple[set[str], set[str], list[str]]:
    """Returns the names of the files that train and that validate, and the printed lines."""
    lines: list[str] = []
    path = config.path
    assert path is not None
    root = Path(path).parent / "cache"
    root.mkdir(exist_ok=True)
    scanned = [
        documents.scan(where, None, root, flag, lines.append) for flag, where in config.inputs(path)
    ]
    sides: tuple[set[str], set[str]] = (set(), set())
    for corpus in config.corpora(scanned, path, lines.append):
        for number, file in enumerate(corpus.files):
            for block in corpus.split.of_file(number):
                for side in set(block.tolist()) - {splitting.SKIPPED}:
                    sides[side].add(file.name)
    return *sides, lines


def _texts(folder: Path, **texts: str) -> str:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_named_splits_train_on_train_only(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "d", train_txt="a", valid_txt="b", test_txt="c")
    train, val, lines = _corpora(_config(folder))
    assert (train, val) == ({"train.txt"}, {"valid.txt"})
    assert any("1 of 3 files validate: valid.txt" in line for line in lines)
    assert any("1 of 3 files are not used" in line and "test.txt" in line for line in lines)
    # Without text for validation, a part of the text for training validates, never the test set.
    folder = _texts(tmp_path / "e", train_jsonl='{"text": "a"}\n' * 4, test_jsonl='{"text": "c"}')
    train, val, _ = _corpora(_config(folder))
    assert train == val == {"train.jsonl"}


def test_what_validates_is_not_trained_on(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "d", train_txt="a", valid_txt="b", test_txt="c", more__x_txt="b")
    train, val, lines = _corpora(_config(folder, val_path=f"{folder}/valid.txt"))
    assert (train, val) == ({"train.txt"}, {"valid.txt"})
    other = _texts(tmp_path / "o", x_txt="1", y_txt="2", z_txt="b")
    train, val, lines = _corpora(_config(other, val_path=f"{folder}/valid.txt"))
    assert (train, val) == ({"x.txt", "y.txt"}, {"valid.txt"})
    assert any("1 of 3 files are not trained on" in line and "z.txt" in line for line in lines)
    with pytest.raises(InputError, match="no text is left for training"):
        _corpora(_config(folder, val_path=folder))
    # The same files in two sources: what validates in one does not train in the other.
    texts = {f"{number}_txt": f"text {number}" for number in range(40)}
    config = _config(
        _texts(tmp_path / "first", **texts), more_paths=(_texts(tmp_path / "second", **texts),)
    )
    train, val, lines = _corpora(config)
    assert train | val == {name.replace("_", ".") for name in texts}
    assert not train & val


def test_equal_files_are_on_one_side(tmp_path: Path) -> None:
    texts = {f"{number}_txt": f"text {number // 2}" for number in range(60)}
    _, val, _ = _corpora(_config(_texts(tmp_path / "d", **texts)))
    assert val
    for number in range(0, 60, 2):
        assert len({f"{number}.txt", f"{number + 1}.txt"} & val) in (0, 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_documents_that_validate_are_not_trained_on(tmp_path: Path, processes: int) -> None:
    """Also inside of larger files, and in the other sources; with the same tokenizer."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    rows = [f"{a} {b} {c}" for a in words for b in words for c in words][:600]

    def jsonl(path: Path, texts: list[str]) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    val = jsonl(tmp_path / "val" / "a.jsonl", rows[:100])
    train = jsonl(tmp_path / "train" / "b.jsonl", [*rows[90:400], rows[5], rows[5]])
    more = jsonl(tmp_path / "more" / "c.jsonl", [*rows[400:], *rows[:20]])
    lines: list[str] = []

    def prepared(**fields: object) -> Prepared:
        fields = {"cache_dir": str(tmp_path / "cache"), "more_paths": (more,)} | fields
        config = Causal(path=train, batch_size=4, **fields)  # type: ignore[arg-type]
        return config.prepare(290, "exact", lines.append, processes=processes)

    def documents_of(made: Prepared, split: str) -> list[str]:
        texts = []
        for folder, manifest in made.caches:
            ids = np.fromfile(folder / f"{split}.tokens", manifest["dtype"])
            (mark,) = manifest["specials"]["before"]
            starts = np.flatnonzero(ids == mark)
            for document in np.split(ids, starts)[1:]:
                texts.append(tokenizer.decode(made.tokenizer, document[1:].tolist()))
        return texts

    made = prepared(val_path=val)
    assert sorted(documents_of(made, "val")) == sorted(rows[:100])
    assert sorted(documents_of(made, "train")) == sorted(rows[100:])
    assert "12 documents are not trained on, because equal documents validate" in lines
    assert "20 documents are not trained on, because equal documents validate" in lines
    # Of a single file, documents are split by their numbers; equal ones are not on both sides.
    made = prepared(more_paths=())
    assert not set(documents_of(made, "train")) & set(documents_of(made, "val"))
    other = prepared(val_path=jsonl(tmp_path / "other.jsonl", rows[500:]))
    assert made.tokenizer != other.tokenizer  # other text for training
    assert prepared(val_path=val).tokenizer.read_bytes() == other.tokenizer.read_bytes()


def _random(alphabet: str, *, word: int, words: int = 400) -> str:
    rng = random.Random(0)
    return "\n".join("".join(rng.choices(alphabet, k=word)) for _ in range(words))


CORPORA = {
    "DNA": _random("ACGT", word=300),
    "URLs": "".join(f"https://site{n % 7}.org/{n}?q={'x' * (n % 150)} \n" for n in range(400)),
    "rare characters": _random("".join(map(chr, range(0x4E00, 0x4E00 + 900))) + "abc ", word=20),
    "accents and white space": _random("aé \t\u00a0\u0301ü가", word=40),
}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize("name", CORPORA)
def test_the_characters_that_the_tokenizer_does_not_know_are_counted(
    tmp_path: Path, name: str, kind: str
) -> None:
    """Against a count with the tokenizers package alone, over complete documents."""
    path = tmp_path / "in.jsonl"
    lines = CORPORA[name].splitlines()
    documents = ["\n".join(lines[at : at + 20]) for at in range(0, len(lines), 20)]
    documents += [f"a word and another word {number}" for number in range(8)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    said: list[str] = []
    config = Masked(path=str(path), batch_size=2, cache_dir=str(tmp_path), tokenizer_kind=kind)  # type: ignore[arg-type]
    sources = config.open(Model(vocab_size=300), seed=0, say=said.append)
    words = tokenizers.Tokenizer.from_str(sources.files_to_keep["tokenizer.json"].decode())
    manifest = json.loads(next(tmp_path.glob("text/tokens-*/manifest.json")).read_text())
    total = unknown = 0
    for text in documents:
        encoded = words.encode(text, add_special_tokens=False)
        spans = zip(encoded.ids, encoded.offsets, strict=True)
        unknown += sum(end - start for token_id, (start, end) in spans if token_id == 1)
        total += len(text)
    counted = {
        fact: sum(split[fact] for split in manifest["splits"].values())
        for fact in ("characters", "unknown")
    }
    assert counted == {"characters": total, "unknown": unknown}
    train = manifest["splits"]["train"]
    share = train["unknown"] / train["characters"]
    assert f"{100 * share:.2f}% of the characters are unknown to the tokenizer" in sources.summary
    warned = [line for line in said if "--data.tokenizer_kind bpe trains one that" in line]
    assert any("the train split" in line for line in warned) == (share > 0.02)
    if kind == "wordpiece":
        assert (share > 0.02) == (name == "rare characters")
    assert kind != "bpe" or not unknown


def test_text_without_a_token_to_predict_is_refused(tmp_path: Path) -> None:
    """All characters are unknown to the given tokenizer, or each text is too short."""
    path = bert_like(tmp_path / "tokenizer.json")
    (tmp_path / "known.txt").write_text("a rose is a rose " * 50)
    (tmp_path / "unknown.txt").write_text("ўўў қққ " * 50)
    (tmp_path / "short.txt").write_text("a")
    model = Model(vocab_size=30)

    def refused(**paths: str) -> str:
        files = {flag: str(tmp_path / f"{name}.txt") for flag, name in paths.items()}
        with pytest.raises(InputError) as caught:
            opened(files.pop("path"), tmp_path, model, tokenizer=str(path), **files)
        return str(caught.value)

    why = (
        "no sequence of the {} split has a token to predict: its words are unknown to the "
        "tokenizer ([UNK]); --data.tokenizer_kind bpe trains one that loses none, without "
        "--data.tokenizer and --model.init_from"
    )
    assert refused(path="unknown", val_path="known") == why.format("train")
    assert refused(path="known", val_path="unknown") == why.format("val")
    assert refused(path="known", val_path="short") == (
        "no sequence of the val split has a token to predict: its texts are too short; add text"
    )
