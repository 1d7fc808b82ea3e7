"""Documents as token ids, and what is lost."""

import array
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from jaxtrain.data.text import byte_level, encoding, tokenizer
from jaxtrain.data.text.specials import NAMES
from jaxtrain.errors import InputError

TEXTS = [
    "  Two  spaces.\n\n\nLines,\r\n and a tab\t at the end \n",
    "A literal <|bos|> and [SEP] are text.",
    "中文字。 größer e\u0301 🙂\x00\x07",
    "\n",  # blank: no document
    "one",
    " two three. Four! ",
    "Five? six",
    "seven " * 40,
]


def encoder(words: tokenizers.Tokenizer, lossless: bool, mark: int) -> encoding.Encoder:
    return encoding.Encoder(words.to_str(), lossless, (mark,), "tokenizer.json")


def test_exact_tokens_have_every_byte_of_every_document() -> None:
    words = byte_level.train(TEXTS, 280)
    encoded = encoder(words, True, 0)(TEXTS)
    for text, document in zip(TEXTS, encoded, strict=True):
        assert document.ids[0] == 0
        assert words.decode(list(document.ids[1:]), skip_special_tokens=False) == text
        assert document.lost == 0
    assert encoder(words, True, 0)(TEXTS[2:3]) == encoded[2:3]


def test_a_lossy_tokenizer_that_passes_the_check_is_caught() -> None:
    """The check's probe text does not include the one word that this one shortens."""
    lossy = byte_level.train(TEXTS, 280)
    lossy.normalizer = tokenizers.normalizers.Replace("größer", "gr")
    byte_level.check(lossy, "it")
    with pytest.raises(InputError, match=r"loses text: .* has \d+ bytes, but its tokens stand for"):
        encoder(lossy, True, 0)(TEXTS)


def lossy(
    normalizer: Any, splitter: Any = None, model: Any = None, *, letters: str = "ehनहか가."
) -> tokenizers.Tokenizer:
    """A tokenizer with BERT's names, and these letters at every place of a word."""
    entries = [*NAMES, *letters, *(f"##{letter}" for letter in letters)]
    vocab = {entry: number for number, entry in enumerate(entries)}
    words = tokenizers.Tokenizer(model(vocab) if model else models.WordPiece(vocab))
    words.add_special_tokens(list(NAMES))
    if normalizer is not None:
        words.normalizer = normalizer
    words.pre_tokenizer = splitter or pre_tokenizers.BertPreTokenizer()
    return words


UNCASED = normalizers.BertNormalizer(lowercase=True)
NO_URLS = normalizers.Replace(tokenizers.Regex(r"http\S+"), "")
LONE_E = normalizers.Replace(tokenizers.Regex(r"\be\b"), "")
NO_DOTS = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokenizers.Regex(r"\.+"), "removed")]
)
LOSSES = {
    "nothing": (lossy(UNCASED), "e he  EHE\n\te", 0),
    "a vowel sign": (lossy(UNCASED), "हु न", 1),
    "a decomposed accent": (lossy(UNCASED), "he\u0301e", 1),
    "a composed accent": (lossy(UNCASED), "hée é", 2),
    "the mark of a kana": (lossy(UNCASED), "が か", 1),
    "no mark of Hangul": (lossy(normalizers.NFC()), "가", 0),
    "a zero-width space": (lossy(UNCASED), "h\u200be", 1),
    "an unknown word": (lossy(UNCASED), "hex e", 3),
    "an unknown word with an accent": (lossy(UNCASED), "éx é", 3),
    "all accents": (lossy(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
                    "é ह", 1),
    "a word that is replaced": (lossy(NO_URLS), "e http://e.e e", 10),
    "a character that is replaced in some places": (lossy(LONE_E), "he e", 1),
    "punctuation that is removed": (lossy(None, NO_DOTS), "e... e", 3),
    "what a BPE without [UNK] lacks": (
        lossy(None, None, lambda vocab: models.BPE(vocab, [])), "xe é e", 2,
    ),
    "a document without any token": (lossy(UNCASED), "ू ु", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_characters_that_are_deleted_changed_or_unknown_are_counted(name: str) -> None:
    words, text, lost = LOSSES[name]
    encode = encoder(words, False, 3)
    for documents in ([text], ["he", text, "hehe"], [text, text]):
        counted = [encoded.lost for encoded in encode(documents)]
        assert counted == [lost if document == text else 0 for document in documents]
    assert encode([text])[0].ids[0] == 3  # also a document without tokens is one


def test_losses_are_counted_with_long_words_and_case_is_none() -> None:
    words = tokenizer.train(["the longest of these words is here " * 4], 100)
    encode = encoder(words, False, 3)
    assert [document.lost for document in encode(["THE WORDS", "es" * 200, "x ☃"])] == [0, 0, 2]
    assert encode(["thé x the\u0301"])[0].lost == 1 + 3 + 3  # each word; a mark is in its character
    assert encode(["\u200b"])[0] == encoding.Encoded(array.array("I"), 1)
