"""Reading a ``tokenizer.json`` that a stranger may have made.

The library that reads it is written in Rust. What it does not expect ends in a panic, which is no
Python ``Exception``, or in an allocation that fails, which ends the process. So the file is parsed
and checked here first, and the library gets what was checked, not the file.
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
_MOST_IDS = 2**24  # many times the largest vocabulary; tables of so many entries are made
_MOST_GROWTH = 64  # times; no replacement that is in use makes a text longer by more than a few
_LONGEST_ENTRY = 1000  # characters; those of GPT-4 and Llama 3 have up to 128
# What normalizing makes of a character at most: the ligature U+FDFA has 18 letters.
_UNICODE_GROWTH = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 2, "BertNormalizer": 24}
# Text of several kinds, on which what is wrong with a tokenizer shows.
_PROBE = "The quick  brown fox,\tjumps over\n\nthe 2 lazy dogs. Ünïcode ☃ 日本語 🙂 ﷺ x́ [MASK]"


def read(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer, without its padding and truncation.

    Raises:
        InputError: it cannot be read, is no tokenizer, or would take unbounded memory.
    """
    try:
        content = atomic.read_json(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; give a tokenizer.json"
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
            f"{path}: the entry {longest[:20]!a}... of its vocabulary has {len(longest):,} "
            f"characters, and the limit is {_LONGEST_ENTRY:,}: remove it"
        )
    with explained(f"{path}: a damaged tokenizer.json", quiet=True):
        try:
            tokenizer.decode(tokenizer.encode(_PROBE).ids)
        except Exception:  # it may have no way to write these characters, and never need one
            return tokenizer
    return tokenizer


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """The tokens of a text, without special ones around it.

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
    """Turns what the library raises in the block into one line.

    Args:
        name: what it is of, for the message.
        quiet: keeps back what Rust itself prints of a panic. Anything else that is printed on
            standard error meanwhile comes after the block, so it must be a short one.

    Raises:
        InputError: with the library's words.
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
    """Drops what is written to standard error where the block ends with InputError."""
    sys.stderr.flush()
    try:
        own = os.dup(2)
    except OSError:  # there is none
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
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            if not dropped and (said := held.read()):
                os.write(2, said)


def _check(content: dict[str, Any], path: Path) -> None:
    """Refuses what would take memory without bound."""
    before = list(_nodes([content.get("normalizer"), content.get("pre_tokenizer")]))
    for part in (before, list(_nodes(content.get("decoder")))):
        seen: set[Any] = set()
        growth = 1
        for node in part:
            kind = str(node.get("type"))
            growth *= _growth(node, path)
            # Once they are bounded by Unicode; between replacements they grow without bound.
            growth *= _UNICODE_GROWTH.get(kind, 1) if kind in seen else 1
            seen.add(kind)
        if growth > _MOST_GROWTH:
            raise InputError(
                f"{path}: its replacements may make a text {growth:,} times as long, and the limit "
                f"is {_MOST_GROWTH}: remove them"
            )


def _nodes(content: Any) -> Iterator[dict[str, Any]]:
    """All objects inside, of any depth (:func:`jaxtrain.storage.atomic.parse_json` has a limit)."""
    if isinstance(content, dict):
        yield content
        content = list(content.values())
    if isinstance(content, list):
        for inner in content:
            yield from _nodes(inner)


def _growth(node: dict[str, Any], path: Path) -> int:
    """How many times as long a step may make a text."""
    kind = node.get("type")
    if kind == "Replace":
        length = len(str(node.get("content", "")))
        pattern = node.get("pattern")
        fixed = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, length) if fixed else 1 + length  # an expression may match between characters
    if kind == "Prepend":
        return 1 + len(str(node.get("prepend", "")))  # before each piece between special tokens
    if kind == "Precompiled":
        return _longest_precompiled(node.get("precompiled_charsmap"), path)
    return 2 if kind == "ByteLevel" else 1  # a byte becomes a character of up to two


def _longest_precompiled(charsmap: Any, path: Path) -> int:
    """Characters of the longest text that a map of SentencePiece's puts in a character's place.

    It begins with the size of a trie in bytes, uint32, little-endian; memory for so much is
    allocated before anything is read. The texts follow the trie, each with a NUL at its end.
    """
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error):
        data = b""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 4 or not size:
        raise InputError(
            f"{path}: a damaged tokenizer.json: its precompiled_charsmap has {len(data):,} bytes "
            f"and says that {size:,} of them are a trie"
        )
    texts = data[4 + size :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
