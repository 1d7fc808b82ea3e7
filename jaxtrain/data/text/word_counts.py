"""Counts of words to learn a vocabulary from, in bounded memory, in an order of their own."""

from collections import Counter
from collections.abc import Iterator

# Distinct words that are counted and learned from. What is rarer decides nothing in a vocabulary of
# some 100,000 entries, and memory stays below a GiB.
MOST_COUNTED, MOST_LEARNED = 1_000_000, 500_000


def forget_rare(words: Counter[str]) -> None:
    """Drops words seen once, then twice and so on, where there are more than memory has room for.

    What is dropped depends on the order of the text alone.
    """
    least = 2
    while len(words) > MOST_COUNTED:
        for word in [word for word, count in words.items() if count < least]:
            del words[word]
        least += 1


def most_frequent(words: Counter[str]) -> list[tuple[str, int]]:
    """The words to learn from, most frequent first, of equals the alphabet's first."""
    return sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MOST_LEARNED]


def repeat(words: dict[str, int]) -> Iterator[str]:
    """Lines of text in which each word occurs as often as counted."""
    for word, count in words.items():
        while count > 0:
            part = min(count, 10_000)
            yield " ".join([word] * part)
            count -= part
