"""Reading a ``tokenizer.json`` that a stranger may have made.

The library that reads it is written in Rust. What it does not expect ends in a panic, which is no
Python ``Exception``, or in an allocation that fails, which ends the process. So the file is parsed
and checked here first, and the library gets what was checked, not the file.
"""

import base64
import binascii
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jaxtrain import files
from jaxtrain.errors import InputError, first_line

_PANIC = "PanicException"  # of pyo3_runtime, which cannot be imported
_MOST_IDS = 2**24  # many times the largest vocabulary; tables of so many entries are made
_MOST_GROWTH = 64  # times; no replacement that is in use makes a text longer by more than a few
_LONGEST_STRING = 1000  # characters, that are put before a text
# Text of several kinds, on which what is wrong with a tokenizer shows.
_PROBE = "The quick  brown fox,\tjumps over\n\nthe 2 lazy dogs. Ünïcode ☃ 日本語 🙂 ﷺ x́ [MASK]"


def read(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer, without its padding and truncation.

    Raises:
        InputError: it cannot be read, is no tokenizer, or would take unbounded memory.
    """
    try:
        content = files.read_json(path)
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
    ids = tokenizer.get_vocab().values()
    if not ids or max(ids) >= _MOST_IDS:
        found = f"has the id {max(ids):,}, and the limit is {_MOST_IDS:,}" if ids else "is empty"
        raise InputError(f"{path}: not a tokenizer.json: its vocabulary {found}")
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
    for node in before:
        if node.get("type") == "Precompiled":
            _check_precompiled(node.get("precompiled_charsmap"), path)
    for part in (before, list(_nodes(content.get("decoder")))):
        growth = math.prod(map(_growth, part))
        if growth > _MOST_GROWTH:
            raise InputError(
                f"{path}: its replacements may make a text {growth:,} times as long, and the limit "
                f"is {_MOST_GROWTH}: remove them"
            )
        for node in part:
            if len(str(node.get("prepend", ""))) > _LONGEST_STRING:
                raise InputError(
                    f"{path}: it puts more than {_LONGEST_STRING:,} characters before each text: "
                    "shorten them"
                )


def _nodes(content: Any) -> Iterator[dict[str, Any]]:
    """All objects inside, of any depth (:func:`jaxtrain.files.parse_json` has a limit)."""
    if isinstance(content, dict):
        yield content
        content = list(content.values())
    if isinstance(content, list):
        for inner in content:
            yield from _nodes(inner)


def _growth(node: dict[str, Any]) -> int:
    """How many times as long a step may make a text."""
    if node.get("type") == "Replace":
        return max(1, len(str(node.get("content", ""))))
    return 2 if node.get("type") == "ByteLevel" else 1  # a byte becomes a character of up to two


def _check_precompiled(charsmap: Any, path: Path) -> None:
    """Refuses a map of SentencePiece's that promises more than it holds.

    It begins with the size of a trie in bytes, uint32, little-endian; memory for so much is
    allocated before anything is read.
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
