"""Packing: finds where the tokens of each example of a given sequence length are in a stream.

This is done once and stored, so reading any example is one look-up. For masked models, an example
is one span of the stream (:func:`pack`); for causal ones, complete documents that together fill it
(:func:`fit`).
"""

import array
import bisect
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

_BLOCK = 1 << 18  # examples to collect before writing


class Packed(NamedTuple):
    """What was packed.

    Attributes:
        cut: number of examples that end inside a sentence.
    """

    examples: int
    padding: int
    cut: int


def pack(
    tokens: np.ndarray, ends: np.ndarray, sequence_length: int, sep: int, file: BinaryIO
) -> Packed:
    """Writes the spans of all examples: uint64 [examples, 2], start and end of each."""
    examples = padding = cut = 0
    for spans in span_blocks(tokens, ends, sequence_length, sep):
        file.write(spans.tobytes())
        lengths = spans[:, 1] - spans[:, 0]
        examples += len(spans)
        padding += len(spans) * (sequence_length - 2) - int(lengths.sum())
        complete = ends[np.searchsorted(ends, spans[:, 1])] == spans[:, 1]
        cut += len(spans) - int(np.count_nonzero(complete))
    return Packed(examples, padding, cut)


def span_blocks(
    tokens: np.ndarray, ends: np.ndarray, sequence_length: int, sep: int
) -> Iterator[np.ndarray]:
    """Packs sentences into sequences: RoBERTa's FULL-SENTENCES, with a bound on the padding.

    Sentences follow one another, across documents, with a [SEP] after each document
    (https://arxiv.org/abs/1907.11692, section 4.2). Two positions of a sequence are reserved, for
    [CLS] at the start and [SEP] at the end. A sentence that does not fit begins the next sequence;
    but if that would leave more than 1/50 of the sequence empty, it is cut and continues in the
    next one. So padding stays below 1% on average for any text; packing only complete sentences
    would leave 9% empty at length 256 (measured on English novels).

    Args:
        ends: ascending positions after each sentence.
        sequence_length: at least 3.

    Yields:
        uint64 [examples, 2], ascending. The spans cover every token once, except separators between
        two examples.
    """
    capacity, slack = sequence_length - 2, max(1, sequence_length // 50)
    spans = array.array("Q")
    start, first, total, sentences = 0, 0, len(tokens), len(ends)
    # Of a memoryview, an item is a Python integer, ten times as fast as NumPy's.
    tokens_at, ends_at = tokens.data, ends.data
    while start < total:
        if tokens_at[start] == sep:  # after an example's last document
            start += 1
            continue
        limit = start + capacity
        last = min(first + capacity + 2, sentences)  # a sentence has at least one token
        passed = bisect.bisect_right(ends_at, limit, first, last)
        end = ends_at[passed - 1] if passed > first else start
        if end <= start or (limit - end > slack and end + 1 < total):
            end = min(limit, total)
        spans.extend((start, end))
        first = bisect.bisect_right(ends_at, end, first, last)
        start = end
        if len(spans) >= 2 * _BLOCK:
            yield np.frombuffer(spans, np.uint64).reshape(-1, 2)
            spans = array.array("Q")
    if spans:
        yield np.frombuffer(spans, np.uint64).reshape(-1, 2)


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
