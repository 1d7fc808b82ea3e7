"""Reads a ``tokenizer.json`` from an untrusted source.

The library that reads it is written in Rust. Unexpected content causes a panic, which is not a
Python ``Exception``, or a failed allocation, which ends the process. So the file is parsed and
checked here first, and the library gets the checked content, not the file.
"""

import base64
import binascii
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic

_PANIC = "PanicException"  # of pyo3_runtime, which cannot be imported
_MOST_IDS = 2**24  # many times the largest vocabulary; bounds the tables with one entry per id
_MOST_GROWTH = 64  # length factor; replacements in real tokenizers stay far below
_LONGEST_ENTRY = 1000  # characters; entries of GPT-4 and Llama 3 have up to 128
# Largest number of characters that one character is normalized to: ligature U+FDFA has 18 letters.
_UNICODE_GROWTH = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 2, "BertNormalizer": 24}
# Varied text that reveals a broken tokenizer.
_PROBE = "The quick  brown fox,\tjumps over\n\nthe 2 lazy dogs. Ünïcode ☃ 日本語 🙂 ﷺ x́ [MASK]"


def read(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer, without its padding and truncation.

    Raises:
        InputError: the file cannot be read, is not a tokenizer, or would take unbounded memory.
    """
    try:
        content = atomic.read_json(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; pass a tokenizer.json"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not a tokenizer.json: {error}") from error
    _check(content, path)
    content |= {"padding": None, "truncation": None}
    with explained(f"{path}: not a tokenizer.json", quiet=True):
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    vocabulary = tokenizer.get_vocab()
    ids = vocabulary.values()
    if not ids or max(ids) >= _MOST_IDS:
        found = f"has the id {max(ids):,}, and the limit is {_MOST_IDS:,}" if ids else "is empty"
        raise InputError(f"{path}: not a tokenizer.json: its vocabulary {found}")
    longest = max(vocabulary, key=len)
    if len(longest) > _LONGEST_ENTRY:
        raise InputError(
            f"{path}: the vocabulary entry {longest[:20]!a}... has {len(longest):,} "
            f"characters, and the limit is {_LONGEST_ENTRY:,}: remove it"
        )
    with explained(f"{path}: a damaged tokenizer.json", quiet=True):
        try:
            tokenizer.decode(tokenizer.encode(_PROBE).ids)
        except Exception:  # it may not support these characters, and never need to
            return tokenizer
    return tokenizer


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text, without special tokens around it.

    Raises:
        InputError: the text is not UTF-8, or the tokenizer fails on it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the text is not UTF-8: convert it, for example with iconv") from None
    with explained("the tokenizer fails on the text", quiet=True):
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found


@contextlib.contextmanager
def explained(name: str, *, quiet: bool = False) -> Iterator[None]:
    """Turns errors and panics of the library inside the block into one line.

    Args:
        name: start of the message.
        quiet: hide what Rust prints about a panic. Other output to standard error is held back
            until the block ends, so the block should be short.

    Raises:
        InputError: with the library's message.
    """
    with contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(_without_panics())
        try:
            yield
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != _PANIC:
                raise
            raise InputError(f"{name}: {first_line(error)}") from None


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Drops output to standard error if the block ends with InputError."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        own = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        dropped = False
        try:
            yield
        except InputError:
            dropped = True
            raise
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            if not dropped and (output := held.read()):
                os.write(2, output)


def _check(content: dict[str, Any], path: Path) -> None:
    """Rejects content that could take unbounded memory."""
    before = list(_nodes([content.get("normalizer"), content.get("pre_tokenizer")]))
    for part in (before, list(_nodes(content.get("decoder")))):
        seen: set[Any] = set()
        growth = 1
        for node in part:
            kind = str(node.get("type"))
            growth *= _growth(node, path)
            # One pass is bounded by Unicode; repeated between replacements it is not.
            growth *= _UNICODE_GROWTH.get(kind, 1) if kind in seen else 1
            seen.add(kind)
        if growth > _MOST_GROWTH:
            raise InputError(
                f"{path}: its replacements can make a text {growth:,} times as long, and the limit "
                f"is {_MOST_GROWTH}: remove them"
            )


def _nodes(content: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects at any depth (:func:`jaxtrain.storage.atomic.parse_json` limits it)."""
    if isinstance(content, dict):
        yield content
        content = list(content.values())
    if isinstance(content, list):
        for inner in content:
            yield from _nodes(inner)


def _growth(node: dict[str, Any], path: Path) -> int:
    """Returns the factor by which a processing step can lengthen a text."""
    kind = node.get("type")
    if kind == "Replace":
        length = len(str(node.get("content", "")))
        pattern = node.get("pattern")
        fixed = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, length) if fixed else 1 + length  # a regex may match between characters
    if kind == "Prepend":
        return 1 + len(str(node.get("prepend", "")))  # before each part between special tokens
    if kind == "Precompiled":
        return _longest_precompiled(node.get("precompiled_charsmap"), path)
    return 2 if kind == "ByteLevel" else 1  # a byte becomes a character of up to two bytes


def _longest_precompiled(charsmap: Any, path: Path) -> int:
    """Returns the length in characters of the longest replacement in a SentencePiece map.

    The map begins with the size of a trie in bytes, uint32, little-endian; the library allocates
    that much memory before it reads anything. The replacements follow the trie, each ending with
    a NUL.
    """
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error):
        data = b""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 4 or not size:
        raise InputError(
            f"{path}: a damaged tokenizer.json: its precompiled_charsmap has {len(data):,} bytes, "
            f"but its trie should have {size:,}"
        )
    texts = data[4 + size :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
