"""An untrusted tokenizer.json is read, or rejected with one line and in bounded memory."""

import base64
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from peak_memory import peak_mib

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


def precompiled(data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


def replace(content: str, times: int = 1) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": content}] * times


def charsmap(text: str) -> bytes:
    """A map that replaces # by ``text``: a Darts trie with one leaf, and the text."""
    root, leaf = 1 ^ ord("#"), 200
    units = [0] * 256
    units[0] = 1 << 10
    units[root] = (root ^ leaf) << 10 | 1 << 8 | ord("#")
    units[leaf] = 1 << 31
    return struct.pack("<257I", 1024, *units) + text.encode() + b"\0"


def special(content: str) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": 3, "content": content, "special": True, **dict.fromkeys(flags, False)}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


BROKEN = {
    "a charsmap of 8 GiB in 4 bytes": (
        precompiled(b"\xff\xff\xff\xff"),
        "should have 4,294,967,295",
    ),
    "an empty charsmap": (precompiled(b""), "precompiled_charsmap has 0 bytes"),
    "a charsmap of the wrong type": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}},
        "precompiled_charsmap",
    ),
    "a charsmap that points outside": (precompiled(b"\4\0\0\0abcd"), "index out of bounds"),
    "a charsmap inside a sequence": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [precompiled(b"\xff\xff\xff\xff")["normalizer"]],
            }
        },
        "should have 4,294,967,295",
    ),
    "replacements of replacements": (
        {"normalizer": {"type": "Sequence", "normalizers": replace("a" * 1000, 4)}},
        "1,000,000,000,000 times as long",
    ),
    "bytes of bytes": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}},
        "1,073,741,824 times as long",
    ),
    "a decoder's replacements": (
        {"decoder": {"type": "Sequence", "decoders": replace("a" * 1000, 4)}},
        "1,000,000,000,000 times as long",
    ),
    "a long prefix": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 9999}},
        "10,000 times as long",
    ),
    "many prefixes": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "x"}] * 20,
            }
        },
        "1,048,576 times as long",
    ),
    "a charsmap of megabytes for a character": (
        precompiled(charsmap("é" * 10**6)),
        "1,000,000 times as long",
    ),
    "replacements of the empty string": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"},
                    {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
                ]
                * 10,
            }
        },
        "1,048,576 times as long",
    ),
    "ligatures of letters of ligatures": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "\u0644"}, "content": "\ufdfa"},
                    {"type": "NFKD"},
                ]
                * 5,
            }
        },
        "104,976 times as long",
    ),
    "an entry of megabytes": (
        {"model": {"type": "WordLevel", "vocab": {"a" * 10**6: 0}, "unk_token": "a"}},
        "has 1,000,000 characters, and the limit is 1,000",
    ),
    "a special token of megabytes": (
        {"added_tokens": [special("a" * 10**6)]},
        "has 1,000,000 characters, and the limit is 1,000",
    ),
    "a template without its token": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "no entry found",
    ),
    "chunks of length 0": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero"),
    "a prefix longer than a token": (
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "b": 1, "ab": 2},
                "merges": [["a", "b"]],
                "continuing_subword_prefix": "ééééé",
            }
        },
        "out of range",
    ),
    "a huge id": (
        {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
        "the id 4,294,967,295",
    ),
    "an empty vocabulary": (
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}},
        "is empty",
    ),
    "deeply nested steps": ({"normalizer": nested(90)}, "nested too deeply"),
    "an unknown model": ({"model": {"type": "Sybil"}}, "not a tokenizer.json"),
    "a number": ({"model": 5}, "not a tokenizer.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_reported_in_one_line(
    name: str, written: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    parts, message = BROKEN[name]
    path = written(**parts)
    for read in (tokenizer.of_source, lambda path: tokenizer.load(path, 100)):
        with pytest.raises(InputError) as error:
            read(path)
        assert message in str(error.value)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")  # and Rust prints nothing


def test_invalid_json_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"", b"[]", b"{", b"[" * 10**5, b'{"a": "\xff"}', b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer.json: it"):
            tokenizer_file.read(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="1,099,511,627,776 bytes, and the limit"):
        tokenizer_file.read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file"):
        tokenizer_file.read(path)


def test_the_library_reads_only_checked_content(written: Callable[..., Path]) -> None:
    """Python keeps the last of two equal keys; the library would read both."""
    path = written()
    bomb = json.dumps(precompiled(b"\xff\xff\xff\xff"))[1:-1]
    path.write_text("{" + bomb + "," + path.read_text()[1:])
    assert tokenizer_file.read(path).encode("a b").ids == [1, 2]


def test_no_other_module_reads_tokenizer_files(checkout: Path) -> None:
    found = {
        path.name
        for path in (checkout / "jaxtrain").rglob("*.py")
        if re.search(r"tokenizers\.Tokenizer\.from_(file|buffer|pretrained)", path.read_text())
    }
    assert not found


def test_padding_and_truncation_are_ignored(written: Callable[..., Path]) -> None:
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[UNK]",
    }
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    found = tokenizer.of_source(written(padding=padding, truncation=truncation))
    assert found.encode("a b a").ids == [1, 2, 1]


def test_valid_tokenizers_are_unchanged(tmp_path: Path) -> None:
    text = Path(tokenizer.__file__).read_text()
    for kind in ("wordpiece", "bpe", "word", "byte_bpe"):
        words = tokenizer.train([text], 400, kind)
        words.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer_file.read(tmp_path / "tokenizer.json").to_str() == words.to_str()


def test_normalizers_in_use_are_read(written: Callable[..., Path]) -> None:
    """ALBERT has the most normalizers; the ligature is the longest replacement in its map."""
    steps = [
        *({"type": "Replace", "pattern": {"String": old}, "content": '"'} for old in ("``", "''")),
        *({"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")),
        precompiled(charsmap("صلى الله عليه وسلم"))["normalizer"],
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    words = tokenizer_file.read(written(normalizer={"type": "Sequence", "normalizers": steps}))
    assert words.normalizer.normalize_str("#  \ufdfa").count("صلى الله عليه وسلم") == 2
    old_llama = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    words = tokenizer_file.read(written(normalizer={"type": "Sequence", "normalizers": old_llama}))
    assert words.normalizer.normalize_str("a b") == "▁a▁b"


def test_a_closed_vocabulary_is_read(written: Callable[..., Path]) -> None:
    path = written(model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"})
    words = tokenizer_file.read(path)
    assert tokenizer_file.ids(words, "b a") == [1, 0]
    with pytest.raises(InputError, match=r"fails on the text: WordLevel error: Missing \[UNK\]"):
        tokenizer_file.ids(words, "c")
    with pytest.raises(InputError, match="the text is not UTF-8"):
        tokenizer_file.ids(words, "\udcff")


def test_a_regex_that_never_ends_is_reported_in_one_line(
    written: Callable[..., Path], capfd: pytest.CaptureFixture[str]
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
    assert capfd.readouterr() == ("", "")
    chunk = encoding.Chunk([(0, "a" * 40)], 1)
    with pytest.raises(InputError, match=r"fails on a document: Onig: .*retry-limit"):
        encoding.encode(chunk, str(path), "uint16", "sentences", 0)


def test_other_output_to_standard_error_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with tokenizer_file.explained("it", quiet=True):
        os.write(2, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"

    def interrupted() -> None:
        with tokenizer_file.explained("it", quiet=True):
            os.write(2, b"another\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capfd.readouterr().err == "another\n"


def test_entries_outside_the_byte_alphabet_stand_for_themselves(tmp_path: Path) -> None:
    words = byte_level.train(["a text of a few words"], 300)
    content = json.loads(words.to_str())
    size = words.get_vocab_size()
    content["model"]["vocab"]["日本"] = size
    words = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert byte_level.as_bytes(words)[size] == "日本".encode() == words.decode([size]).encode()
    assert byte_level.lengths(words)[size] == 6


READS = """
import sys
from pathlib import Path
from jaxtrain.data.text import tokenizer_file
from jaxtrain.errors import InputError
try:
    tokenizer_file.read(Path(sys.argv[1]))
except InputError as error:
    print(error)
"""


def test_a_damaged_charsmap_takes_no_extra_memory(written: Callable[..., Path]) -> None:
    base, said = peak_mib(READS, written())
    assert not said
    most, said = peak_mib(READS, written(**precompiled(b"\xff\xff\xff\xff")))
    assert "damaged tokenizer.json" in said
    assert most < base + 20
