"""Turns documents into token ids, either by sentence or without any loss.

See :data:`jaxtrain.data.text.specials.Form`.
"""

import array
import itertools
import re
from typing import NamedTuple

import numpy as np

from jaxtrain.data.text import byte_level, specials, tokenizer, tokenizer_file
from jaxtrain.data.text.specials import Form
from jaxtrain.errors import InputError

# A sentence ends at a blank line, at end punctuation with its closing quotes and white space (not
# after common English titles and initials, not before a lower-case letter), or at a CJK full stop.
_SENTENCE_END = re.compile(
    r"\n[^\S\n]*\n\s*"
    r"|[.!?…][\"'”’)\]]*"  # noqa: RUF001
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bvs\.)(?<!\b[A-Z]\.)"
    r"\s+(?![a-z])"
    r"|[。！？][”’」』]*\s*"  # noqa: RUF001
)


class Encoded(NamedTuple):
    """The tokens of a document.

    Attributes:
        ids: token ids, with the special tokens between documents; empty if it has no tokens.
        ends: positions after each sentence, without the special tokens; none in the exact form.
        unknown: number of characters that become [UNK].
    """

    ids: "array.array[int]"
    ends: list[int]
    unknown: int


class Encoder:
    """Encodes documents.

    Args:
        content: of a ``tokenizer.json``.
        form: which parts of the documents to keep.
        marks: special tokens after each document, or before each one in the exact form.
        name: of the tokenizer, for messages.
    """

    def __init__(self, content: str, form: Form, marks: tuple[int, ...], name: str) -> None:
        self._form, self._marks, self._name = form, list(marks), name
        # Plain, so that a literal "[SEP]" in text becomes ordinary tokens, not the special one.
        self._tokenizer = specials.plain(tokenizer_file.parsed(content, name))
        if form == "exact":
            self._bytes = byte_level.Encoder(self._tokenizer)
            self._lengths_V = byte_level.lengths(self._tokenizer)
        else:
            self._without_cuts = specials.plain(tokenizer.without_cuts(self._tokenizer))
            self._unk = specials.find(self._tokenizer, name).unk

    def __call__(self, texts: list[str]) -> list[Encoded]:
        """Encodes documents; the result for each does not depend on the others.

        Raises:
            InputError: the tokenizer fails; or the form is exact, and it loses some of the text.
        """
        with tokenizer_file.explained(f"{self._name} fails on a document"):
            return self._exact(texts) if self._form == "exact" else self._by_sentence(texts)

    def _by_sentence(self, texts: list[str]) -> list[Encoded]:
        cut = [sentences(text) for text in texts]
        encoded = iter(self._encode([sentence for of_document in cut for sentence in of_document]))
        documents = []
        for of_document in cut:
            ids, ends, unknown = array.array("I"), list[int](), 0
            for of_sentence, unknown_here in itertools.islice(encoded, len(of_document)):
                if of_sentence:  # a sentence of control characters has no tokens
                    ids.extend(of_sentence)
                    ends.append(len(ids))
                    unknown += unknown_here
            if ids:
                ids.extend(self._marks)
            documents.append(Encoded(ids, ends, unknown))
        return documents

    def _encode(self, texts: list[str]) -> list[tuple[list[int], int]]:
        """Returns the ids of each text, and how many characters became [UNK].

        Offsets and the pre-tokenizer that cuts long words make tokenizing 20% and 10% slower, so
        only texts in which [UNK] occurs without that pre-tokenizer are encoded with both.
        """
        fast = self._without_cuts.encode_batch_fast(texts, add_special_tokens=False)
        result = [(of_text.ids, 0) for of_text in fast]
        again = [at for at, (ids, _) in enumerate(result) if self._unk in ids]
        slow = self._tokenizer.encode_batch([texts[at] for at in again], add_special_tokens=False)
        for at, of_text in zip(again, slow, strict=True):
            spans = zip(of_text.ids, of_text.offsets, strict=True)
            unknown = sum(end - start for token_id, (start, end) in spans if token_id == self._unk)
            result[at] = of_text.ids, unknown
        return result

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
            documents.append(Encoded(ids, [], 0))
        return documents


def sentences(document: str) -> list[str]:
    """Splits a document into sentences.

    This is a rule of thumb: packed sequences preferably begin and end at these places, and nothing
    else depends on them. Joined, the sentences are the document without the white space between
    them.
    """
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(document):
        parts.append(document[start : match.end()].strip())
        start = match.end()
    parts.append(document[start:].strip())
    return [part for part in parts if part]
