"""Reads a ``tokenizer.json``, and turns the library's errors into one line.

The library is written in Rust. Unexpected content may cause a panic, which is not a Python
``Exception``.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic

_PANIC = "PanicException"  # of pyo3_runtime, which cannot be imported
_MOST_BYTES = 2**30  # the largest known have some 35 MB


def read(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer, without its padding and truncation.

    Raises:
        InputError: the file cannot be read, or is not a tokenizer.
    """
    try:
        content = atomic.read_regular(path, _MOST_BYTES).decode()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; pass a tokenizer.json"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not a tokenizer.json: {first_line(error)}") from error
    return parsed(content, str(path))


def parsed(content: str, name: str) -> tokenizers.Tokenizer:
    """Does the same with the content of a file.

    Raises:
        InputError: it is not a tokenizer.
    """
    with explained(f"{name}: not a tokenizer.json"):
        # Not from_file(), which takes only paths in UTF-8.
        tokenizer = tokenizers.Tokenizer.from_str(content)
    if not tokenizer.get_vocab():
        raise InputError(f"{name}: not a tokenizer.json: its vocabulary is empty")
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
    with explained("the tokenizer fails on the text"):
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns errors and panics of the library inside the block into one line.

    Raises:
        InputError: with the library's message.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        raise InputError(f"{name}: {first_line(error)}") from None
