"""Turns documents into token ids, and counts what a tokenizer loses."""

import array
import json
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tokenizers

from jaxtrain.data.text import byte_level, specials, tokenizer, tokenizer_file
from jaxtrain.errors import InputError

# Of the kind "bpe": a replacement that loses no visible character.
_ONE_SPACE = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}


class Encoded(NamedTuple):
    """The tokens of a document.

    Attributes:
        ids: token ids, after the special tokens between documents; empty if it has no tokens.
        lost: number of characters, without white space, that the tokens do not have: they become
            [UNK], are deleted, or lose an accent. Case is not counted.
    """

    ids: "array.array[int]"
    lost: int


class Encoder:
    """Encodes documents.

    Args:
        lossless: whether the tokens must have every byte of a text; otherwise losses are counted.
        marks: special tokens before each document.
    """

    def __init__(self, content: str, lossless: bool, marks: tuple[int, ...], name: str) -> None:
        self._lossless, self._marks, self._name = lossless, marks, name
        # Plain, so that a literal "[SEP]" in text becomes ordinary tokens, not the special one.
        self._tokenizer = specials.plain(tokenizer_file.parsed(content, name))
        if lossless:
            self._bytes = byte_level.Encoder(self._tokenizer)
            self._lengths_V = byte_level.lengths(self._tokenizer)
        else:
            self._without_cuts = specials.plain(tokenizer.without_cuts(self._tokenizer))
            self._unk = specials.find(self._tokenizer, name).unk
            self._losses = Losses(self._tokenizer, self._unk)

    def __call__(self, texts: list[str]) -> list[Encoded]:
        """Encodes documents; the result for each does not depend on the others.

        Raises:
            InputError: the tokenizer fails; or it loses text, but must be lossless.
        """
        with tokenizer_file.explained(f"{self._name} fails on a document"):
            return self._exact(texts) if self._lossless else self._counted(texts)

    def _counted(self, texts: list[str]) -> list[Encoded]:
        """Encodes documents, and counts what is lost.

        Offsets and the pre-tokenizer that cuts long words make tokenizing 20% and 10% slower, so
        only texts in which [UNK] occurs without that pre-tokenizer, or that have characters which
        may be lost, are encoded with both.
        """
        fast = self._without_cuts.encode_batch_fast(texts, add_special_tokens=False)
        encoded = [(of_text.ids, 0) for of_text in fast]
        risky = self._losses.may_be_lost(texts)
        again = [
            at for at, (ids, _) in enumerate(encoded) if self._unk in ids or risky.search(texts[at])
        ]
        slow = self._tokenizer.encode_batch([texts[at] for at in again], add_special_tokens=False)
        for at, of_text in zip(again, slow, strict=True):
            encoded[at] = of_text.ids, self._losses.count(texts[at], of_text)
        documents = []
        for text, (of_document, lost) in zip(texts, encoded, strict=True):
            if not of_document and _has_letters(text):
                of_document = [self._unk]  # to be counted, not omitted
            ids = array.array("I", self._marks if of_document else ())
            ids.extend(of_document)
            documents.append(Encoded(ids, lost))
        return documents

    def _exact(self, texts: list[str]) -> list[Encoded]:
        documents = []
        for text, of_text in zip(texts, self._bytes(texts), strict=True):
            ids = array.array("I", self._marks)
            ids.extend(of_text)  # three times as fast as numpy.array
            size = int(self._lengths_V[np.frombuffer(ids, np.uint32)].sum())
            expected = len(text.encode())
            if size != expected:
                raise InputError(
                    f"the tokenizer loses text: the document that begins with {text[:40]!r} has "
                    f"{expected:,} bytes, but its tokens stand for {size:,}; pass another "
                    "tokenizer with --data.tokenizer, or omit it to train one"
                )
            documents.append(Encoded(ids, 0))
        return documents


class Losses:
    """Counts the characters of texts that a tokenizer loses."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, unk: int) -> None:
        self._tokenizer, self._unk = tokenizer, unk
        self._known = set[str]()
        self._deleted, self._changed = set[str](), set[str]()
        self._by_character = _is_by_character(tokenizer)
        self._pattern = re.compile("(?!)" if self._by_character else "")

    def may_be_lost(self, texts: Iterable[str]) -> re.Pattern[str]:
        """Returns a pattern that all those texts contain in which a character is lost.

        Texts in which one becomes [UNK] need not contain it.
        """
        new = set[str]().union(*texts) - self._known
        for character in new:
            if character.isspace():
                continue
            normalizer = self._tokenizer.normalizer
            normal = normalizer.normalize_str(character) if normalizer else character
            if not self._tokenizer.encode(character, add_special_tokens=False).ids:
                self._deleted.add(character)
            elif _marks(normal) < _marks(character):
                self._changed.add(character)
        self._known |= new
        risky = self._deleted | self._changed
        if self._by_character and not new.isdisjoint(risky):
            self._pattern = re.compile(f"[{re.escape(''.join(sorted(risky)))}]")
        return self._pattern

    def of(self, text: str) -> int:
        """Returns how many characters of a text are lost."""
        self.may_be_lost([text])
        with tokenizer_file.explained("the tokenizer fails on the text"):
            return self.count(text, self._tokenizer.encode(text, add_special_tokens=False))

    def count(self, text: str, encoding: tokenizers.Encoding) -> int:
        """Returns how many characters of a text are lost in its tokens."""
        lost = end = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            lost += self._omitted(text[end:start])
            if token_id == self._unk:
                lost += max(0, stop - max(start, end))
            elif self._changed:
                lost += sum(map(self._changed.__contains__, text[max(start, end) : stop]))
            end = max(end, stop)
        return lost + self._omitted(text[end:])

    def _omitted(self, text: str) -> int:
        """Returns how many characters are lost between tokens.

        A mark that composes a character with the one before (NFC) is not, although it has no token.
        """
        return sum(
            c in self._deleted
            or not (self._by_character or c.isspace() or unicodedata.category(c)[0] == "M")
            for c in text
        )


def _is_by_character(tokenizer: tokenizers.Tokenizer) -> bool:
    """Returns whether characters that are deleted are so in every text."""
    described = json.loads(tokenizer.to_str())
    splitter, model = json.dumps(described["pre_tokenizer"]), described["model"]
    normalizer = json.dumps(described["normalizer"])
    # A BPE without [UNK] drops what it lacks, perhaps only at some places of a word.
    drops = model["type"] == "BPE" and model.get("unk_token") is None
    drops = drops and "ByteLevel" not in normalizer + splitter
    replaces = '"Replace"' in normalizer and described["normalizer"] != _ONE_SPACE
    return not (drops or replaces or '"Removed"' in splitter)


def _marks(text: str) -> int:
    """Returns the number of accents and vowel signs, also of those in composed characters."""
    return sum(unicodedata.category(c)[0] == "M" for c in unicodedata.normalize("NFD", text))


def _has_letters(text: str) -> bool:
    """Returns whether a text has more than control and format characters and white space."""
    return any(unicodedata.category(c)[0] not in "CZ" for c in text)
