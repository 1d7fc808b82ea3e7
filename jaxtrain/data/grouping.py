"""Divides many inputs into groups of about one size, which change little if inputs are added.

Inputs are grouped by the bits of the hashes of their names: a group that is too large is divided by
the next bit. So groups depend on nothing but names and sizes, and an input that is added changes
one group, or divides it.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Input = TypeVar("Input")
_BITS = 256


def hash_of(name: str) -> bytes:
    """Returns the hash of a name, whose bits divide."""
    return hashlib.sha256(os.fsencode(name)).digest()


def divided(
    inputs: Sequence[Input],
    name_of: Callable[[Input], str],
    size_of: Callable[[Input], int],
    max_size: int,
) -> Iterator[tuple[str, list[Input]]]:
    """Yields the bits that the hashes of a group's names begin with, as text, and the group.

    Args:
        inputs: with different names.
        max_size: of a group, if it has more than one input.
    """
    hashed = sorted(((hash_of(name_of(item)), item) for item in inputs), key=lambda pair: pair[0])
    yield from _divided(hashed, size_of, max_size, "")


def _divided(
    hashed: list[tuple[bytes, Input]], size_of: Callable[[Input], int], max_size: int, bits: str
) -> Iterator[tuple[str, list[Input]]]:
    bit = len(bits)
    if len(hashed) > 1 and sum(size_of(item) for _, item in hashed) > max_size and bit < _BITS:
        sides: tuple[list[tuple[bytes, Input]], list[tuple[bytes, Input]]] = [], []
        for digest, item in hashed:
            sides[digest[bit // 8] >> (7 - bit % 8) & 1].append((digest, item))
        for number, side in enumerate(sides):
            yield from _divided(side, size_of, max_size, f"{bits}{number}")
    elif hashed:
        yield bits, [item for _, item in hashed]
