"""From documents to sentences and token ids: which white space stays, what stands between them.

See :data:`jaxtrain.data.text.specials.Form`.
"""

import array
import dataclasses
import functools
import re
from pathlib import Path

import numpy as np
import tokenizers

from jaxtrain.data.text import byte_level, specials, tokenizer_file
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import SPLITS
from jaxtrain.errors import InputError

# A sentence ends at a blank line, at a mark of the end with its closing quotes and white space (not
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
        texts: (split, document) in order.
        after: number of the first document behind them.
    """

    texts: list[tuple[int, str]]
    after: int


@dataclasses.dataclass
class Part:
    """What a chunk adds to one split.

    Attributes:
        ids: tokens, as bytes of the stream's dtype.
        ends: uint64 positions after each sentence, or after each document of the exact form, from
            the part's begin.
        documents: with text in them.
        text_bytes: of the documents, as UTF-8.
    """

    ids: bytes
    ends: np.ndarray
    documents: int
    text_bytes: int


@functools.lru_cache(maxsize=1)
def _words(path: str) -> tokenizers.Tokenizer:
    # So that a literal "[SEP]" in the text becomes ordinary pieces, not a special token.
    return specials.plain(tokenizer_file.read(Path(path)))


@functools.lru_cache(maxsize=1)
def _exact(path: str) -> tuple[byte_level.Encoder, np.ndarray]:
    return byte_level.Encoder(_words(path)), byte_level.lengths(_words(path))


def encode(chunk: Chunk, path: str, dtype: str, form: Form, mark: int) -> tuple[int, list[Part]]:
    """Tokenise a chunk: the number of the document behind it, and what each split gets.

    Args:
        chunk: the documents.
        path: of a ``tokenizer.json``.
        dtype: of the ids.
        form: what is kept of the documents.
        mark: the special token between them: after each one, or before each of the exact form.

    Raises:
        InputError: the form is exact, and the tokenizer loses some of the text.
    """
    parts = []
    for side in range(len(SPLITS)):
        texts = [text for its_side, text in chunk.texts if its_side == side]
        ids, ends, count = array.array("I"), array.array("Q"), 0
        with tokenizer_file.explained(f"{path} fails on a document"):
            if form == "exact":
                _add_whole(texts, path, mark, ids, ends)
                count = len(texts)
            else:
                count = _add_sentences(texts, path, mark, ids, ends)
        parts.append(
            Part(
                ids=np.frombuffer(ids, np.uint32).astype(dtype).tobytes(),
                ends=np.frombuffer(ends, np.uint64).copy(),
                documents=count,
                text_bytes=sum(len(text.encode()) for text in texts),
            )
        )
    return chunk.after, parts


def sentences(document: str) -> list[str]:
    """The sentences of a document.

    A rule of thumb: an example of a packed sequence preferably begins and ends at these places,
    nothing else depends on them. Their join is the document without the white space between them.
    """
    parts, start = [], 0
    for match in _SENTENCE_END.finditer(document):
        parts.append(document[start : match.end()].strip())
        start = match.end()
    parts.append(document[start:].strip())
    return [part for part in parts if part]


def _add_sentences(
    texts: list[str], path: str, sep: int, ids: "array.array[int]", ends: "array.array[int]"
) -> int:
    """Returns how many of the documents give a token."""
    count = 0
    cut = [sentences(text) for text in texts]
    encoded = iter(
        _words(path).encode_batch_fast(
            [sentence for of_document in cut for sentence in of_document], add_special_tokens=False
        )
    )
    for of_document in cut:
        before = len(ids)
        for _ in of_document:
            sentence = next(encoded).ids
            if sentence:  # control characters alone give no token
                ids.extend(sentence)
                ends.append(len(ids))
        if len(ids) > before:
            ids.append(sep)
            count += 1
    return count


def _add_whole(
    texts: list[str], path: str, begin: int, ids: "array.array[int]", ends: "array.array[int]"
) -> None:
    encoder, lengths_V = _exact(path)
    for text, of_text in zip(texts, encoder(texts), strict=True):
        found, wanted = int(lengths_V[of_text].sum()), len(text.encode())
        if found != wanted:
            raise InputError(
                f"the tokenizer loses text: of the {wanted:,} bytes of the document that begins "
                f"with {text[:40]!r} its tokens stand for {found:,}; name another one with "
                "--data.tokenizer, or leave it out to learn one"
            )
        ids.append(begin)
        ids.extend(of_text)
        ends.append(len(ids))
