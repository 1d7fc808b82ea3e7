"""An untrusted tokenizer.json is read, or rejected with one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import tokenizers

from jaxtrain.data.text import byte_level, encoding, specials, tokenizer, tokenizer_file
from jaxtrain.errors import InputError


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a small tokenizer with some parts replaced."""

    def write(**parts: Any) -> Path:
        words = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
        )
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(json.loads(words.to_str()) | parts))
        return path

    return write


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown model": ({"model": {"type": "Quantum", "vocab": {}}}, "not a tokenizer.json: "),
    "an empty vocabulary": (
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}},
        "its vocabulary is empty",
    ),
    "a charsmap of the wrong type": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}},
        "not a tokenizer.json: ",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_reported_in_one_line(
    name: str, written: Callable[..., Path]
) -> None:
    parts, message = BROKEN[name]
    path = written(**parts)
    for read in (tokenizer.of_source, lambda path: tokenizer.load(path, 100, lossless=False)):
        with pytest.raises(InputError) as error:
            read(path)
        assert message in str(error.value)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_invalid_json_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"", b"[]", b"{", b"[" * 10**5, b'{"a": "\xff"}', b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer.json: "):
            tokenizer_file.read(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="1,099,511,627,776 bytes, and the limit"):
        tokenizer_file.read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        tokenizer_file.read(path)


def test_valid_tokenizers_are_unchanged(tmp_path: Path) -> None:
    text = Path(tokenizer.__file__).read_text()
    for kind in get_args(tokenizer.Kind):
        words = tokenizer.train([text], 400, kind)
        words.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer_file.read(tmp_path / "tokenizer.json").to_str() == words.to_str()


def test_a_closed_vocabulary_is_read(written: Callable[..., Path]) -> None:
    path = written(model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"})
    words = tokenizer_file.read(path)
    assert tokenizer_file.ids(words, "b a") == [1, 0]
    with pytest.raises(InputError, match=r"fails on the text: WordLevel error: Missing \[UNK\]"):
        tokenizer_file.ids(words, "c")
    with pytest.raises(InputError, match="the text is not UTF-8"):
        tokenizer_file.ids(words, "\udcff")


def test_a_regex_that_never_ends_is_reported_in_one_line(
    written: Callable[..., Path],
) -> None:
    pattern = {"Regex": "(a|aa)+$x"}
    vocab = {name: token_id for token_id, name in enumerate([*specials.NAMES, "a"])}
    path = written(
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        pre_tokenizer={
            "type": "Split",
            "pattern": pattern,
            "behavior": "Isolated",
            "invert": False,
        },
    )
    words = tokenizer_file.read(path)
    with pytest.raises(InputError, match=r"fails on the text: Onig: .*retry-limit-in-match over"):
        tokenizer_file.ids(words, "a" * 40)
    encoder = encoding.Encoder(path.read_text(), False, (0,), str(path))
    with pytest.raises(InputError, match=r"fails on a document: Onig: .*retry-limit"):
        encoder(["a" * 40])


def test_entries_outside_the_byte_alphabet_stand_for_themselves() -> None:
    words = byte_level.train(["a text of a few words"], 300)
    content = json.loads(words.to_str())
    size = words.get_vocab_size()
    content["model"]["vocab"]["日本"] = size
    words = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert byte_level.as_bytes(words)[size] == "日本".encode() == words.decode([size]).encode()
    assert byte_level.lengths(words)[size] == 6
