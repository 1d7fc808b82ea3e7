"""Lossless byte-level tokens."""

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxtrain.data.text import byte_level, specials, tokenizer
from jaxtrain.errors import InputError

TEXT = Path(tokenizer.__file__).read_text() + " größer Übergröße 中文字 中文 🙂🙂 2024 1234\r\n\r\n"


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> tokenizers.Tokenizer:
    return specials.plain(byte_level.train([TEXT], 400))


def hostile(seed: int) -> str:
    """Random characters, runs of white space, and names of special tokens."""
    rng = random.Random(seed)
    alphabets = [
        lambda: chr(rng.choice([*range(0xD800), *range(0xE000, 0x110000, 97)])),
        lambda: chr(rng.randrange(0x20)),
        lambda: rng.choice(" \t\n\r\u00a0\u2028\u3000\u0085\x1c") * rng.randrange(1, 9),
        lambda: rng.choice(["\r\n", "\n\n\n", "'LL", "don't", "3.1415", "e\u0301", "👩‍👩‍👧", "ﬁ"]),
        lambda: rng.choice([*specials.CAUSAL, "[SEP]", "[MASK]", "</s>", "<|endoftext|>"]),
        lambda: rng.choice(TEXT.split()),
    ]
    return "".join(rng.choice(alphabets)() for _ in range(rng.randrange(1, 60)))


def test_every_text_is_decoded_unchanged(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    lengths = byte_level.lengths(byte_level_tokenizer)
    assert lengths.dtype == np.int32
    special = {byte_level_tokenizer.token_to_id(one) for one in specials.CAUSAL}
    texts = [hostile(seed) for seed in range(120)]
    texts += ["", " ", "\n", "\x00", " \n \n", *specials.CAUSAL]
    for text in texts:
        ids = byte_level_tokenizer.encode(text, add_special_tokens=False).ids
        assert byte_level_tokenizer.decode(ids, skip_special_tokens=False) == text
        assert not special & set(ids), text
        assert lengths[ids].sum() == len(text.encode())
        begun = byte_level_tokenizer.encode(text).ids
        assert begun == [specials.begin(byte_level_tokenizer, "it"), *ids]
        assert byte_level_tokenizer.decode(begun) == text


def test_ids_are_dense_and_special_tokens_come_first(
    byte_level_tokenizer: tokenizers.Tokenizer,
) -> None:
    vocab = byte_level_tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(400))
    assert [vocab[one] for one in specials.CAUSAL] == list(range(9))
    assert specials.begin(byte_level_tokenizer, "it") == 0
    assert byte_level.lengths(byte_level_tokenizer)[:9].tolist() == [0] * 9
    assert byte_level.lengths(byte_level_tokenizer)[9:].min() == 1
    assert byte_level_tokenizer.encode("2024", add_special_tokens=False).tokens in (
        ["20", "24"],
        [*"2024"],
    )
    with pytest.raises(InputError, match="vocab_size is 264: a byte_bpe tokenizer needs 265"):
        byte_level.train([TEXT], 264)


def test_byte_characters_match_the_library() -> None:
    library = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert set(byte_level.CHARACTERS) == set(library.alphabet())
    text = "".join(chr(code) for code in range(0x800))
    (got,) = library.pre_tokenize_str(text)
    assert got[0] == "".join(byte_level.CHARACTERS[byte] for byte in text.encode())


def test_words_of_more_than_a_hundred_characters_are_not_learned() -> None:
    long, longest = "ab" * 60, "cd" * 49
    entries = byte_level.train([f"{long} {longest}\n" * 5, "ef " * 5], 400).get_vocab()
    assert {"cd", "ef"} <= entries.keys()
    assert "ab" not in entries


def test_the_cache_of_stretches_does_not_change_tokens(
    byte_level_tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [hostile(seed) for seed in range(60)] + [TEXT, "字" * 300, "a  b" * 50, ""]
    wanted = [byte_level_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    encoder = byte_level.Encoder(byte_level_tokenizer)
    assert encoder(texts) == wanted
    assert len(encoder._known) > 100
    assert max(map(len, encoder._known)) <= 100
    assert [encoder([text])[0] for text in texts] == wanted
    monkeypatch.setattr(byte_level, "_LONGEST_KNOWN", 3)  # limits only the cache
    shorter = byte_level.Encoder(byte_level_tokenizer)
    assert shorter(texts) == wanted
    assert max(map(len, shorter._known)) == 3
    monkeypatch.setattr(byte_level, "_MOST_KNOWN", 10)
    assert [encoder([text])[0] for text in texts] == wanted
    assert len(encoder._known) < 1000


def test_words_that_continue_across_spaces_are_not_cut() -> None:
    other = byte_level.train([TEXT], 400)
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    other.model = tokenizers.models.BPE(
        {**{one: i for i, one in enumerate(byte_level.CHARACTERS)}, "Ġa": 256, "xĠa": 257},
        [("Ġ", "a"), ("x", "Ġa")],
    )
    assert byte_level.Encoder(specials.plain(other))(["x a"]) == [[257]]


def test_a_given_tokenizer_in_the_style_of_gpt2(tmp_path: Path) -> None:
    """GPT-2 has <|endoftext|> between documents."""
    other = tokenizers.Tokenizer(
        tokenizers.models.BPE({one: i for i, one in enumerate(byte_level.CHARACTERS)}, [])
    )
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    other.save(str(path))
    with pytest.raises(InputError, match=r"no special token that begins a document, <\|bos\|> or"):
        tokenizer.load(path, 300, lossless=True)
    other.add_special_tokens(["<|endoftext|>"])
    other.add_tokens(["übermäßig"])
    other.save(str(path))
    read = tokenizer.load(path, 300, lossless=True)
    assert specials.begin(read, "it") == 256
    assert byte_level.lengths(read).tolist() == [1] * 256 + [0, len("übermäßig".encode())]
    other.normalizer = tokenizers.normalizers.NFC()
    other.save(str(path))
    with pytest.raises(InputError, match="BPE tokenizer that turns"):
        tokenizer.load(path, 300, lossless=True)
