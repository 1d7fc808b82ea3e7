"""Turns documents into token ids, either by sentence or without any loss.

See :data:`jaxtrain.data.text.specials.Form`.
"""

import array
import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import tokenizers

from jaxtrain.data.text import byte_level, specials, tokenizer, tokenizer_file
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import SPLITS
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


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Documents to tokenize together.

    Attributes:
        texts: (split, document) pairs in order.
        after: number of the first document after the chunk.
    """

    texts: list[tuple[int, str]]
    after: int


@dataclasses.dataclass
class Part:
    """The tokens of a chunk that belong to one split.

    Attributes:
        ids: token ids as bytes, in the stream's dtype.
        ends: uint64 positions after each sentence (each document in the exact form), relative to
            the start of the part.
        documents: number of documents with text.
        text_bytes: size of the documents in bytes of UTF-8.
        characters: number of characters in the documents.
        unknown: number of those that become [UNK].
    """

    ids: bytes | memoryview
    ends: np.ndarray
    texts: int
    documents: int
    text_bytes: int
    characters: int
    unknown: int


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str) -> tokenizers.Tokenizer:
    # Plain, so that a literal "[SEP]" in the text becomes ordinary tokens, not the special one.
    return specials.plain(tokenizer_file.read(Path(path)))


@functools.lru_cache(maxsize=1)
def _without_cuts(path: str) -> tokenizers.Tokenizer:
    return specials.plain(tokenizer.without_cuts(_tokenizer(path)))


@functools.lru_cache(maxsize=1)
def _unk(path: str) -> int:
    return specials.find(_tokenizer(path), path).unk


@functools.lru_cache(maxsize=1)
def _exact(path: str) -> tuple[byte_level.Encoder, np.ndarray]:
    return byte_level.Encoder(_tokenizer(path)), byte_level.lengths(_tokenizer(path))


def encode(
    chunk: Chunk, path: str, dtype: str, form: Form, marks: tuple[int, ...]
) -> tuple[int, list[Part]]:
    """Tokenizes a chunk.

    Args:
        chunk: the documents.
        path: path of a ``tokenizer.json``.
        dtype: dtype of the ids.
        form: which parts of the documents to keep.
        marks: special tokens after each document, or before each one in the exact form.

    Returns:
        The chunk's ``after``, and one part for each split.

    Raises:
        InputError: the form is exact, but the tokenizer loses some of the text.
    """
    parts = []
    for side in range(len(SPLITS)):
        texts = [text for its_side, text in chunk.texts if its_side == side]
        ids, ends, count, unknown = array.array("I"), array.array("Q"), 0, 0
        with tokenizer_file.explained(f"{path} fails on a document"):
            if form == "exact":
                _add_exact(texts, path, marks, ids, ends)
                count = len(texts)
            else:
                count, unknown = _add_sentences(texts, path, marks, ids, ends)
        parts.append(
            Part(
                ids=np.frombuffer(ids, np.uint32).astype(dtype).tobytes(),
                ends=np.frombuffer(ends, np.uint64).copy(),
                texts=len(texts),
                documents=count,
                text_bytes=sum(len(text.encode()) for text in texts),
                characters=sum(map(len, texts)),
                unknown=unknown,
            )
        )
    return chunk.after, parts


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


def _add_sentences(
    texts: list[str],
    path: str,
    after: tuple[int, ...],
    ids: "array.array[int]",
    ends: "array.array[int]",
) -> tuple[int, int]:
    """Appends the documents' tokens.

    Returns:
        How many documents have any, and how many characters became [UNK].
    """
    count = 0
    cut = [sentences(text) for text in texts]
    encoded, unknown = _encode([sentence for of_document in cut for sentence in of_document], path)
    of_sentences = iter(encoded)
    for of_document in cut:
        before = len(ids)
        for _ in of_document:
            sentence = next(of_sentences)
            if sentence:  # a sentence of control characters has no tokens
                ids.extend(sentence)
                ends.append(len(ids))
        if len(ids) > before:
            ids.extend(after)
            count += 1
    return count, unknown


def _encode(texts: list[str], path: str) -> tuple[list[list[int]], int]:
    """Returns the ids of each text, and how many characters became [UNK].

    Offsets and the pre-tokenizer that cuts long words make tokenizing 20% and 10% slower, so only
    texts in which [UNK] occurs without that pre-tokenizer are encoded with both.
    """
    unk, unknown = _unk(path), 0
    encoded = _without_cuts(path).encode_batch_fast(texts, add_special_tokens=False)
    ids: list[list[int]] = [of_text.ids for of_text in encoded]
    again = [at for at, of_text in enumerate(ids) if unk in of_text]
    encoded = _tokenizer(path).encode_batch([texts[at] for at in again], add_special_tokens=False)
    for at, of_text in zip(again, encoded, strict=True):
        ids[at] = of_text.ids
        spans = zip(of_text.ids, of_text.offsets, strict=True)
        unknown += sum(end - start for token_id, (start, end) in spans if token_id == unk)
    return ids, unknown


def _add_exact(
    texts: list[str],
    path: str,
    before: tuple[int, ...],
    ids: "array.array[int]",
    ends: "array.array[int]",
) -> None:
    encoder, lengths_V = _exact(path)
    for text, of_text in zip(texts, encoder(texts), strict=True):
        found, expected = int(lengths_V[of_text].sum()), len(text.encode())
        if found != expected:
            raise InputError(
                f"the tokenizer loses text: the document that begins with {text[:40]!r} has "
                f"{expected:,} bytes, but its tokens stand for {found:,}; pass another tokenizer "
                "with --data.tokenizer, or omit it to train one"
            )
        ids.extend(before)
        ids.extend(of_text)
        ends.append(len(ids))
