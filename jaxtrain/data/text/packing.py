"""Packing: finds which documents together fill a sequence.

This is done once and stored, so reading any example is one look-up.
"""

import bisect
from typing import NamedTuple

import numpy as np


class Fitted(NamedTuple):
    """Documents that were fitted into rows.

    Attributes:
        pieces: int64 [pieces, 3]: start and stop in the stream, and 1 for a piece that continues a
            document, and so needs a begin token before it.
        rows: int64 [rows, 2]: the first piece of each row, and the one after its last.
        padding: number of positions without a token to predict.
    """

    pieces: np.ndarray
    rows: np.ndarray
    padding: int


def fit(lengths: np.ndarray, sequence_length: int) -> Fitted:
    """Fits documents into rows of `sequence_length + 1` tokens, each of which begins with one.

    Best-fit decreasing (https://arxiv.org/abs/2404.10830): the longest first, each into the row
    with the least space that is enough. A longer document is divided into pieces: all but the last
    fill a row each, and all but the first begin with an additional begin token. So nothing is lost:
    each token but the begin tokens that begin rows is predicted once, and from its own document.

    Args:
        lengths: tokens of each document of the stream, in order.
        sequence_length: tokens to predict per row, at least 1.
    """
    capacity = sequence_length + 1
    pieces = _pieces(lengths.astype(np.int64), capacity)
    sizes = pieces[:, 1] - pieces[:, 0] + pieces[:, 2]
    row_of = np.empty(len(pieces), np.int64)
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces: list[int] = []  # ascending, of which there are rows
    rows = 0
    descending = np.argsort(-sizes, kind="stable")
    changes = np.flatnonzero(np.diff(sizes[descending])) + 1
    # Pieces of one size together, so that time grows with the sizes: a row with the least space
    # that is enough has then the least space for the next one, too, until it has too little.
    for equal in np.split(descending, changes) if len(pieces) else []:
        size, at = int(sizes[equal[0]]), 0
        while at < len(equal):
            place = bisect.bisect_left(spaces, size)
            space = spaces[place] if place < len(spaces) else capacity
            each = space // size
            needed = -(-(len(equal) - at) // each)
            if place < len(spaces):
                having = with_space[space]
                taken = having[: -needed - 1 : -1]
                del having[-needed:]
                if not having:
                    del spaces[place]
            else:
                taken = list(range(rows, rows + needed))
                rows += needed
            count = min(len(equal) - at, each * len(taken))
            row_of[equal[at : at + count]] = np.repeat(taken, each)[:count]
            at += count
            complete, more = divmod(count, each)
            for of_rows, used in ((taken[:complete], each), (taken[complete:], more)):
                left = space - used * size
                if of_rows and left:
                    if not with_space[left]:
                        bisect.insort(spaces, left)
                    with_space[left].extend(of_rows)
    # In the order of the documents, which is random: the first rows are as good as any.
    firsts = np.full(rows, len(pieces))
    np.minimum.at(firsts, row_of, np.arange(len(pieces)))
    order = np.lexsort((np.arange(len(pieces)), firsts[row_of]))
    counts = np.bincount(row_of, minlength=rows)[np.argsort(firsts)]
    stops = np.cumsum(counts)
    padding = rows * capacity - int(sizes.sum())
    return Fitted(pieces[order], np.stack([stops - counts, stops], 1), padding)


def _pieces(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Divides documents that do not fit: see :class:`Fitted`."""
    stops = np.cumsum(lengths)
    more = np.maximum(-(-(lengths - capacity) // (capacity - 1)), 0)  # pieces after the first
    document = np.repeat(np.arange(len(lengths)), more + 1)
    number = np.arange(len(document)) - np.repeat(np.cumsum(more + 1) - more - 1, more + 1)
    begins = stops[document] - lengths[document]
    # The first has `capacity` tokens, the others one less and a begin token.
    starts = begins + np.where(number, number * (capacity - 1) + 1, 0)
    ends = np.minimum(begins + (number + 1) * (capacity - 1) + 1, stops[document])
    return np.stack([starts, ends, np.minimum(number, 1)], 1)
