import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.data import tokenizer
from jaxtrain.data.masking import SPECIALS
from jaxtrain.errors import InputError

TEXT = Path(tokenizer.__file__).read_text()


def test_vocabulary_has_the_size_that_is_asked_for() -> None:
    for size in (100, 257, 400):
        vocab = tokenizer.train([TEXT], size).get_vocab()
        assert sorted(vocab.values()) == list(range(size))  # dense, none twice
        assert tuple(sorted(vocab, key=lambda entry: vocab[entry])[:5]) == SPECIALS


def test_a_small_text_gives_fewer() -> None:
    vocab = tokenizer.train(["ab ab ab ba. ba."], 1000).get_vocab()
    assert set(vocab) == {*SPECIALS, ".", "a", "b", "##a", "##b", "ab", "ba"}
    assert sorted(vocab.values()) == list(range(12))


def test_frequency_decides() -> None:
    words = ["common"] * 50 + ["middle"] * 20 + ["seldom"] * 3
    random.Random(0).shuffle(words)
    vocab = tokenizer.train([" ".join(words)], 32).get_vocab()
    assert "common" in vocab
    assert "seldom" not in vocab


def test_unknown_and_rare_characters_become_unk() -> None:
    words = tokenizer.train([TEXT + " ☃"], 300)  # once only: cut
    assert words.encode("☃ ж tokenizer").tokens[:3] == ["[CLS]", "[UNK]", "[UNK]"]
    assert words.token_to_id("☃") is None


def test_the_alphabet_leaves_room() -> None:
    text = " ".join(chr(0x4E00 + n) * 2 for n in range(2000)) + " word" * 1000
    vocab = tokenizer.train([text], 200).get_vocab()
    assert len(vocab) <= 200
    assert "word" in vocab


def test_it_reads_as_bert_does() -> None:
    words = tokenizer.train([TEXT], 300)
    assert words.encode("TOKENIZER").ids == words.encode("tökenizer").ids
    assert words.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    assert words.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    assert words.encode("x [MASK]").ids[-2] == 4
    text = "the vocabulary of a tokenizer"
    assert words.decode(words.encode(text).ids) == text


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys; from jaxtrain.data import tokenizer;"
        "print(tokenizer.train([sys.stdin.read()], 300).to_str(), end='')"
    )
    here = tokenizer.train([TEXT], 300).to_str()
    for seed in ("1", "2", "3"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            input=TEXT,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert there.stdout == here


def test_load_checks_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words = tokenizer.train([TEXT], 300)
    words.enable_padding(length=50)
    words.enable_truncation(10)
    words.save(str(path))
    assert len(tokenizer.load(path, 300).encode("a " * 30).ids) == 32
    with pytest.raises(InputError, match=r"300 ids, the model 299: set --model.vocab-size 300"):
        tokenizer.load(path, 299)
    with pytest.raises(InputError, match="no such file"):
        tokenizer.load(tmp_path / "gone.json", 300)
    other = tokenizer.wordpiece({**{name: 4 - i for i, name in enumerate(SPECIALS)}, "a": 5})
    other.save(str(path))
    with pytest.raises(InputError, match=r"are \(4, 3, 2, 1, 0\), the model needs \(0, 1, 2, 3"):
        tokenizer.load(path, 300)
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"not a tokenizer.json"):
        tokenizer.load(path, 300)
