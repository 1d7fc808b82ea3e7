"""Word counts for training tokenizers: a map-reduce in bounded memory with deterministic results.

The text to train on is cut into parts. Workers count the words of each part, and the counts are
merged in the order of the parts, so the result does not depend on who counted which part.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

# Distinct words to count and to train on. Rarer words do not affect a vocabulary of some 100,000
# entries, and memory stays below a GiB.
MOST_COUNTED, MOST_LEARNED = 1_000_000, 500_000
PART_CHARACTERS = 1 << 22
"""Least length of a part of the text, except the last. Shorter parts have more words in total, and
merging them takes this process longer (benchmarks/RESULTS.md)."""
# Characters of a word used for training, and of a stretch that is counted as such. It determines
# the vocabulary, so another value gives another tokenizer for the same text.
LONGEST = 100


def count(
    documents: Iterable[str],
    cut: Callable[[str], list[str]],
    split: Callable[[str], Iterable[str]],
) -> Counter[str]:
    """Counts the words of documents; splits each distinct stretch of text only once.

    The result depends only on the documents. Words longer than ``LONGEST`` are omitted, unless
    ``split`` divides them.

    Args:
        documents: texts, in order.
        cut: cuts a document into stretches, only where a word ends.
        split: splits a stretch into words.
    """
    stretches: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for document in documents:
        found = cut(document)
        if max(map(len, found), default=0) <= LONGEST:
            stretches.update(found)  # twice as fast as one at a time
        else:
            for stretch in found:
                if len(stretch) <= LONGEST:
                    stretches[stretch] += 1
                else:  # text without spaces, too long to keep
                    words.update(word for word in split(stretch) if len(word) <= LONGEST)
        forget_rare(stretches)
        forget_rare(words)
    for stretch, times in stretches.items():
        for word in split(stretch):
            words[word] += times
    words = Counter({word: times for word, times in words.items() if len(word) <= LONGEST})
    forget_rare(words)
    return words


def merge(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Adds up the counts of parts, in their order."""
    words: Counter[str] = Counter()
    for part in parts:
        words.update(part)
        forget_rare(words)
    return words


def forget_rare(words: Counter[str]) -> None:
    """Drops words seen once, then twice, and so on, until at most ``MOST_COUNTED`` remain."""
    least = 2
    while len(words) > MOST_COUNTED:
        for word in [word for word, count in words.items() if count < least]:
            del words[word]
        least += 1


def most_frequent(
    words: Mapping[str, int], most_characters: float = math.inf
) -> list[tuple[str, int]]:
    """Returns the words to train on, most frequent first; ties are sorted alphabetically.

    Args:
        words: the counts.
        most_characters: limit of the sum of their lengths.
    """
    ranked = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MOST_LEARNED]
    sizes = itertools.accumulate(len(word) for word, _ in ranked)
    return ranked[: bisect.bisect_right(list(sizes), most_characters)]


def repeat(words: dict[str, int]) -> Iterator[str]:
    """Yields lines of text in which each word occurs as often as it was counted."""
    for word, count in words.items():
        while count > 0:
            part = min(count, 10_000)
            yield " ".join([word] * part)
            count -= part
