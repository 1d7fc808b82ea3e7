"""Word counts for training tokenizers, in bounded memory and in a deterministic order."""

from collections import Counter
from collections.abc import Iterator

# Distinct words to count and to train on. Rarer words do not affect a vocabulary of some 100,000
# entries, and memory stays below a GiB.
MOST_COUNTED, MOST_LEARNED = 1_000_000, 500_000


def forget_rare(words: Counter[str]) -> None:
    """Drops words seen once, then twice, and so on, until at most ``MOST_COUNTED`` remain.

    The result depends only on the order of the text.
    """
    least = 2
    while len(words) > MOST_COUNTED:
        for word in [word for word, count in words.items() if count < least]:
            del words[word]
        least += 1


def most_frequent(words: Counter[str]) -> list[tuple[str, int]]:
    """Returns the words to train on, most frequent first; ties are sorted alphabetically."""
    return sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MOST_LEARNED]


def repeat(words: dict[str, int]) -> Iterator[str]:
    """Yields lines of text in which each word occurs as often as it was counted."""
    for word, count in words.items():
        while count > 0:
            part = min(count, 10_000)
            yield " ".join([word] * part)
            count -= part
