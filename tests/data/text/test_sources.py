"""Several sources of text, given tokenizers, and documents inside a sequence."""

import dataclasses
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data.text.small_text import (
    Model,
    documents_in,
    opened,
    sequences,
    silent,
    token_ids,
    words_of,
    write,
)

from jaxtrain.data import mixture, sampler
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.text import Causal, Masked, layout, masking, specials, vocabulary
from jaxtrain.data.text import rows as text_rows
from jaxtrain.data.text import shards as text_shards
from jaxtrain.data.text.documents import File
from jaxtrain.data.text.masking import MaskedSource
from jaxtrain.data.text.sources import Text
from jaxtrain.errors import InputError


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with other letters, so that a token identifies its source."""
    top = write(tmp_path_factory.mktemp("other") / "in", files=3)
    for path in top.iterdir():
        text = path.read_text().lower()
        path.write_text(text.translate(str.maketrans("aeinorst", "bcdfghjk")))
    return top


def test_sources_share_a_vocabulary_and_are_drawn_by_weight(
    folder: Path, other: Path, cache: Path
) -> None:
    got = opened(folder, cache, more_paths=(str(other),), weights=(1.0, 3.0))
    assert got.files == 9
    assert isinstance(got.train, Mixture)
    first, second = got.train.sources
    assert isinstance(first, MaskedSource)
    assert isinstance(second, MaskedSource)
    words = words_of(got)
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


def test_weights_follow_their_sources(
    folder: Path, other: Path, cache: Path, tmp_path: Path
) -> None:
    """The second source's file for training is broken, so the weights of the others remain."""
    words = tmp_path / "tokenizer.json"
    words_of(opened(folder, cache)).save(str(words))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.txt").write_bytes(b"\xff" * 20)
    (broken / "val.txt").write_text("a rose is a rose " * 50)
    said: list[str] = []
    config = Masked(
        path=str(folder),
        more_paths=(str(broken), str(other)),
        weights=(1.0, 8.0, 3.0),
        max_bad_share=0.5,
        tokenizer=str(words),
        batch_size=2,
        cache_dir=str(tmp_path),
    )
    got = config.open(Model(), seed=0, say=said.append)
    assert isinstance(got.train, Mixture)
    size = len(got.train)
    assert got.train.per_epoch == tuple(mixture.shared_out(size, (1, 3)))
    assert said.count(f"warning: --data.more_paths {broken} has no text for training") == 1
    alone = dataclasses.replace(config, more_paths=(str(broken),), weights=(1.0, 8.0))
    assert len(alone.open(Model(), seed=0, say=silent).train) == got.train.sizes[0]


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
    assert "data.max_examples: using 6 documents" in said
    assert "train: 4 documents" in summary
    assert "val: 2 documents" in summary
    said.clear()
    small = dataclasses.replace(config, max_examples=2)  # one of each split per source
    summary = small.open(Model(), seed=0, say=said.append).summary
    assert "data.max_examples: using 4 documents" in said
    assert "train: 2 documents" in summary
    assert "val: 2 documents" in summary


def test_only_the_last_sequence_of_a_stream_has_padding(folder: Path, tmp_path: Path) -> None:
    got = opened(folder, tmp_path, Model(sequence_length=128))
    padding = [int((sequence == 0).sum()) for sequence in sequences(got.train)]
    assert len(padding) > 3
    assert not any(padding[:-1])


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
    index = max(range(len(source)), key=lambda at: int((source.sequence(at) == 3).sum()))
    segments = source.example(index, np.random.default_rng(0))["segments"]
    assert segments.dtype == np.int32
    assert segments.max() > 2


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [  # 0 is [PAD], 2 [CLS], 3 [SEP]
        ([2, 7, 8, 3, 9, 3], [1, 1, 1, 1, 2, 2]),
        ([2, 3, 7, 3, 8, 3], [1, 1, 1, 1, 2, 2]),
        ([2, 7, 3, 3, 0, 0], [1, 1, 1, 2, 0, 0]),
    ],
)
def test_a_separator_belongs_to_the_document_before_it(
    tokens: list[int], expected: list[int]
) -> None:
    assert masking.segments(np.array(tokens), specials.Specials()).tolist() == expected


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


def _config(path: str, **fields: object) -> Causal:
    cache = Path(path).parent / "cache"
    cache.mkdir(exist_ok=True)
    return Causal(path=path, batch_size=4, cache_dir=str(cache), **fields)  # type: ignore[arg-type]


def _documents(config: Text) -> tuple[list[str], list[str], list[str]]:
    """Returns the documents that train and that validate, and the printed lines."""
    lines: list[str] = []
    sources = config.open(Model(vocab_size=300), seed=0, say=lines.append)
    decode = sources.decode
    assert decode is not None
    sides = []
    for source in (sources.train, sources.val):
        parts = source.sources if isinstance(source, Mixture) else (source,)
        sides.append([text for part in parts for text in documents_in(token_ids(part), decode)])
    return sides[0], sides[1], lines


def _texts(folder: Path, **texts: str) -> str:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_named_splits_train_on_train_only(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "d", train_txt="aa", valid_txt="bb", test_txt="cc")
    train, val, lines = _documents(_config(folder))
    assert (train, val) == (["aa"], ["bb"])
    assert any("1 of 3 files train, and 1 validate, by words in their names" in x for x in lines)
    assert any("1 of 3 files are not used" in line and "test.txt" in line for line in lines)
    # Without text for validation, a part of the text for training validates, never the test set.
    rows = [json.dumps({"text": f"text {number}"}) for number in range(20)]
    folder = _texts(tmp_path / "e", train_jsonl="\n".join(rows), test_jsonl='{"text": "cc"}')
    train, val, _ = _documents(_config(folder))
    assert sorted(train + val) == sorted(f"text {number}" for number in range(20))
    assert train
    assert val


@pytest.mark.parametrize(
    ("names", "val_path", "sides", "said"),
    [
        (
            ["0.txt", "test.txt"],
            "v.txt",
            {"0.txt": "train", "test.txt": "train"},
            ["so all files train: test.txt", "T: the text of data.val_path validates"],
        ),
        (
            ["0.txt", "test.txt"],
            None,
            {"0.txt": None, "test.txt": None},
            ["so all files are split: test.txt", "so a part of all documents does"],
        ),
        (
            ["train.txt", "test.txt"],
            None,
            {"train.txt": None},
            ["1 of 2 files are not used", "so a part of the other files' documents does"],
        ),
        (
            ["train.txt", "val.txt"],
            "v.txt",
            {"train.txt": "train"},
            ["1 of 2 files are not used", "T: the text of data.val_path validates"],
        ),
        (
            ["train.txt", "val.txt"],
            None,
            {"train.txt": "train", "val.txt": "val"},
            ["1 of 2 files train, and 1 validate"],
        ),
    ],
)
def test_the_first_lines_say_what_validates(
    names: list[str], val_path: str | None, sides: dict[str, str | None], said: list[str]
) -> None:
    lines: list[str] = []
    files = [File(f"/{name}", name, 1, name) for name in names]
    got = Causal(path="/", val_path=val_path, batch_size=1)._sides(files, "T", lines.append)
    assert {file.name: side for file, side in got.items()} == sides
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True)), lines


def test_what_validates_is_not_trained_on(tmp_path: Path) -> None:
    folder = _texts(tmp_path / "d", train_txt="aa", valid_txt="bb", test_txt="cc", more__x_txt="bb")
    train, val, lines = _documents(_config(folder, val_path=f"{folder}/valid.txt"))
    assert (train, val) == (["aa"], ["bb"])
    other = _texts(tmp_path / "o", x_txt="11", y_txt="22", z_txt="bb")
    train, val, lines = _documents(_config(other, val_path=f"{folder}/valid.txt"))
    assert (sorted(train), val) == (["11", "22"], ["bb"])
    assert "1 documents are not trained on, because equal documents validate" in lines
    with pytest.raises(InputError, match="no text is left for training"):
        _documents(_config(folder, val_path=folder))
    # The same files in two sources: what validates in one does not train in the other.
    texts = {f"{number}_txt": f"text {number}" for number in range(40)}
    first, second = (_texts(tmp_path / name, **texts) for name in ("first", "second"))
    train, val, _ = _documents(_config(first, more_paths=(second,)))
    assert {*train, *val} == set(texts.values())
    assert not {*train} & {*val}


def test_another_val_path_trains_the_same_tokenizer_and_tokenizes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a sample of the text is trained on."""
    folder = write(tmp_path / "in", files=6)
    write(tmp_path / "val", files=2)
    (tmp_path / "large.txt").write_text("Other words here. " * 5000)
    for most in (vocabulary.MOST_CHARACTERS, 3000):
        monkeypatch.setattr(vocabulary, "MOST_CHARACTERS", most)
        config = _config(str(folder))
        kept, shards = [], set()
        for val_path in (tmp_path / "val", tmp_path / "large.txt", folder / "3.txt"):
            got = dataclasses.replace(config, val_path=str(val_path))
            kept.append(got.open(Model(vocab_size=300), seed=0, say=silent).files_to_keep)
            made = {path.name for path in (tmp_path / "cache/text").glob("shard-*")}
            assert not shards or len(made - shards) <= 1  # of the text for validation
            shards = made
        assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_tokenizer_is_not_trained_on_a_document_that_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Each document has a letter of its own, which a tokenizer learns from repetitions."""
    letters = "абвгдежз"
    rows = [json.dumps({"text": f"{letter * 8} {letter * 8}"}) for letter in letters]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(rows))
    monkeypatch.setattr(layout, "LARGEST_HELD_OUT", share)
    config = _config(str(path))
    train, val, _ = _documents(config)
    assert train
    assert val
    sources = config.open(Model(vocab_size=300), seed=0, say=silent)
    words = words_of(sources)
    for texts, learned in ((train, True), (val, False)):
        for text in texts:
            tokens = words.encode(text[:8], add_special_tokens=False).tokens
            assert (len(tokens) < 8) == learned


def test_max_examples_tokenizes_only_as_many_shards_as_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(30):
        rows = [json.dumps({"text": f"text {number} {row} " * 9}) for row in range(40)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(text_shards, "GROUP_BYTES", 20_000)
    monkeypatch.setattr(vocabulary, "_BYTES_PER_DOCUMENT", 100)
    train, val, lines = _documents(_config(str(folder), max_examples=100))
    assert len(train) + len(val) == 100
    assert "looking for 100 documents" in lines
    few = len(list((tmp_path / "cache/text").glob("shard-*")))
    again = _documents(_config(str(folder), max_examples=100))
    assert again[:2] == (train, val)
    assert "looking for 100 documents" not in again[2]
    everything = _documents(_config(str(folder)))
    assert len(everything[0]) + len(everything[1]) == 1200
    assert few < len(list((tmp_path / "cache/text").glob("shard-*"))) / 3


def test_only_long_files_count_as_several_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"row {n}"}) for n in range(9)))
    (tmp_path / "b.txt").write_text("A long book. " * 4000)
    for name, is_cut in (("a.jsonl", False), ("b.txt", True)):
        config = _config(str(tmp_path / name))
        summary = config.open(Model(vocab_size=300), seed=0, say=silent).summary
        assert ("long files count as several documents" in summary) == is_cut


def _random(alphabet: str, *, word: int, words: int = 400) -> str:
    rng = random.Random(0)
    return "\n".join("".join(rng.choices(alphabet, k=word)) for _ in range(words))


CORPORA = {
    "DNA": _random("ACGT", word=300),
    "URLs": "".join(f"https://site{n % 7}.org/{n}?q={'x' * (n % 150)} \n" for n in range(400)),
    "rare characters": _random("".join(map(chr, range(0x4E00, 0x4E00 + 900))) + "abc ", word=20),
    "vowel signs": "हिन्दी में स्वर चिह्न महत्वपूर्ण हैं।\nภาษาไทยมีวรรณยุกต์ที่สำคัญ\nTiếng Việt\n" * 90,
    "accents and white space": _random("aé \t\u00a0ü가", word=40) + "e\u0301",
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "wordpiece") for name in CORPORA), ("rare characters", "bpe")]
)
def test_the_characters_that_the_tokenizer_loses_are_counted(
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
    words = words_of(sources)
    manifest = json.loads(next(tmp_path.glob("text/layout-*/manifest.json")).read_text())
    (facts,) = manifest["sources"]
    total = lost = 0
    for text in documents:
        encoded = words.encode(text, add_special_tokens=False)
        covered = set[int]()
        for token_id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            covered |= set(range(start, end)) if token_id != 1 else set()
        omitted = (text[n] for n in range(len(text)) if n not in covered)
        lost += sum(not c.isspace() and c != "\u0301" for c in omitted)  # é is one character
        total += len(text)
    counted = {
        fact: sum(split[fact] for split in facts.values()) for fact in ("characters", "lost")
    }
    assert counted == {"characters": total, "lost": lost}
    train = facts["train"]
    share = train["lost"] / train["characters"]
    assert f"{100 * share:.2f}% of the characters are lost by the tokenizer" in sources.summary
    warned = [line for line in said if "--data.tokenizer_kind bpe trains one that" in line]
    assert any("the train split" in line for line in warned) == (share > 0.02)
    if kind == "wordpiece":
        assert (share > 0.02) == (name == "rare characters")
    assert kind != "bpe" or not lost


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


def test_the_field_of_each_source_is_printed_and_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, field in (("a", "content"), ("b", "Text")):
        rows = [json.dumps({field: f"{name} {number}", "context": "no"}) for number in range(30)]
        if name == "a":
            rows = [row.replace(', "context": "no"', "") for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    config = _config(str(tmp_path / "a.jsonl"), more_paths=(str(tmp_path / "b.jsonl"),))
    train, val, lines = _documents(config)
    assert sorted(train + val) == sorted(f"{name} {n}" for name in "ab" for n in range(30))
    wanted = [
        f"--data.path {tmp_path}/a.jsonl: the text is in the field 'content', which 30 of the 30 "
        "rows have that were read to choose it",
        f"--data.more_paths {tmp_path}/b.jsonl: the text is in the field 'text', which 30 of the "
        "30 rows have that were read to choose it",
    ]
    assert [line for line in lines if "the text is in" in line] == wanted
    monkeypatch.setattr(text_rows, "choose", None)  # the cache has it
    assert [line for line in _documents(config)[2] if "the text is in" in line] == wanted


def test_how_many_documents_validate_is_printed_and_a_field(tmp_path: Path) -> None:
    """It is one fraction for all sources, and a part of the fingerprint."""
    for name in "ab":
        rows = [json.dumps({"text": f"{name} {number}"}) for number in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    config = _config(str(tmp_path / "a.jsonl"), more_paths=(str(tmp_path / "b.jsonl"),))
    _, val, lines = _documents(config)
    assert any(line.startswith("10% of 800 documents (0.0 MB) validate") for line in lines)
    assert 50 < len(val) < 110
    few = dataclasses.replace(config, val_documents=10)
    _, fewer, lines = _documents(few)
    assert any(line.startswith("1.25% of 800 documents") for line in lines)
    assert {*fewer} < {*val}
    assert 5 <= len(fewer) <= 20
    prints = {
        one.open(Model(vocab_size=300), seed=0, say=silent).val.fingerprint for one in (config, few)
    }
    assert len(prints) == 2


def test_equal_names_sizes_and_times_are_not_equal_text(tmp_path: Path) -> None:
    """As in images, zip files and Nix, where times mean nothing."""
    for version, word in (("v1", "one"), ("v2", "two")):
        (tmp_path / version).mkdir()
        for number in range(30):
            path = tmp_path / version / f"{number}.txt"
            path.write_text(f"Text {number} of {word}.")
            os.utime(path, ns=(1, 1))
    for version, word in (("v1", "one"), ("v2", "two")):
        train, val, _ = _documents(_config(str(tmp_path / version)))
        assert all(text.endswith(f"of {word}.") for text in train + val)


def test_a_copy_with_other_white_space_is_on_the_same_side(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(60):
        text = f"Text {number}\nof a book. " * 9
        (folder / f"{number}.txt").write_bytes(text.encode())
        (folder / f"{number}-latest.md").write_bytes(text.replace("\n", "\r\n ").encode() + b"\n")
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": text.strip()}))
    train, val, _ = _documents(_config(str(folder)))
    assert len(train) + len(val) == 180
    sides = [{" ".join(text.split()) for text in side} for side in (train, val)]
    assert not sides[0] & sides[1]
    assert len(val) == 3 * len(sides[1])
