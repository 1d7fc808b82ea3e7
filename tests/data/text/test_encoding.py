"""Documents as token ids, by sentence or without any loss."""

import pytest
import tokenizers

from jaxtrain.data.text import byte_level, encoding
from jaxtrain.data.text.specials import Form
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


def encoder(words: tokenizers.Tokenizer, form: Form, *marks: int) -> encoding.Encoder:
    return encoding.Encoder(words.to_str(), form, marks, "tokenizer.json")


def test_exact_tokens_have_every_byte_of_every_document() -> None:
    words = byte_level.train(TEXTS, 280)
    encoded = encoder(words, "exact", 0)(TEXTS)
    for text, document in zip(TEXTS, encoded, strict=True):
        assert document.ids[0] == 0
        assert words.decode(list(document.ids[1:]), skip_special_tokens=False) == text
        assert (document.ends, document.unknown) == ([], 0)
    assert encoder(words, "exact", 0)(TEXTS[2:3]) == encoded[2:3]


def test_a_lossy_tokenizer_that_passes_the_check_is_caught() -> None:
    """The check's probe text does not include the one word that this one shortens."""
    lossy = byte_level.train(TEXTS, 280)
    lossy.normalizer = tokenizers.normalizers.Replace("größer", "gr")
    byte_level.check(lossy, "it")
    with pytest.raises(InputError, match=r"loses text: .* has \d+ bytes, but its tokens stand for"):
        encoder(lossy, "exact", 0)(TEXTS)


def test_documents_are_split_into_sentences() -> None:
    text = (
        'Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town! "Why?" he said. He left...\n'
        "A line\nthat goes on\n \n= A title =\n\nThe end. (Really.) 「終わり。」はい。"
    )
    assert encoding.sentences(text) == [
        "Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town!",
        '"Why?" he said.',
        "He left...",
        "A line\nthat goes on",
        "= A title =",
        "The end.",
        "(Really.)",
        "「終わり。」",
        "はい。",
    ]
    assert encoding.sentences(" \n") == []
