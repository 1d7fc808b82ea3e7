"""Masking for masked language modeling, in NumPy, and the source of masked examples.

A fixed fraction of the candidates (all tokens that are not special) is chosen. Most chosen tokens
become [MASK], some become a random ordinary token, and some stay unchanged; the model predicts the
original token at each chosen position only (BERT, https://arxiv.org/abs/1810.04805, section 3.1).

Shapes: S is the sequence length, M the number of prediction slots.
"""

import dataclasses
import math

import numpy as np

from jaxtrain.data.text.specials import Specials
from jaxtrain.data.text.streams import Streams


def masked_count(candidates: int, mask_fraction: float) -> int:
    """Returns how many of ``candidates`` to choose, rounded to nearest, halves up."""
    return math.floor(mask_fraction * candidates + 0.5)


def mask(
    tokens_S: np.ndarray,
    rng: np.random.Generator,
    *,
    mask_fraction: float,
    random_share: float,
    keep_share: float,
    vocab_size: int,
    specials: Specials,
) -> dict[str, np.ndarray]:
    """Chooses positions and masks them.

    Args:
        tokens_S: int32 [S], unmasked, including special tokens.
        rng: the only source of randomness.
        random_share: probability that a chosen token becomes a random ordinary token.
        keep_share: probability that a chosen token stays unchanged; otherwise it becomes [MASK].
        vocab_size: number of ids; random tokens are drawn from all but the special ones.
        specials: ids that are neither chosen nor drawn.

    Returns:
        ``tokens`` int32 [S]; ``positions`` int32 [M], ascending; ``targets`` int32 [M], the
        original ids; ``target_weights`` float32 [M], 1 for a chosen position. M is
        ``masked_count(S, mask_fraction)``; unused slots come last and are 0 in all three.
    """
    slots = masked_count(len(tokens_S), mask_fraction)
    special = specials.ids()
    candidates = np.flatnonzero(~np.isin(tokens_S, special))
    count = masked_count(len(candidates), mask_fraction)
    chosen = np.sort(rng.choice(candidates, count, replace=False, shuffle=False))
    draw = rng.random(count)
    random_ids = rng.integers(0, vocab_size - len(special), count)
    for special_id in special:  # ascending: the ordinary ids, numbered without gaps
        random_ids += random_ids >= special_id

    original = tokens_S[chosen]
    hidden = np.full(count, specials.mask, np.int32)
    hidden = np.where(draw < random_share + keep_share, random_ids, hidden)
    hidden = np.where(draw < keep_share, original, hidden)

    tokens = tokens_S.astype(np.int32, copy=True)
    tokens[chosen] = hidden
    positions, targets = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    weights = np.zeros(slots, np.float32)
    positions[:count], targets[:count], weights[:count] = chosen, original, 1.0
    return {
        "tokens": tokens,
        "positions": positions,
        "targets": targets,
        "target_weights": weights,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSource:
    """One split as masked sequences; see :class:`jaxtrain.data.source.Source`.

    Attributes:
        streams: of which a sequence has S - 2 tokens, with [CLS] and [SEP] around them.
        sequence_length: tokens per example, including padding.
        vocab_size: number of ids of the tokenizer; all ids in examples are below it.
        with_segments: add ``segments`` to examples: the document that each token belongs to.
        fingerprint: digest of the token streams, the tokenizer and S. It excludes masking,
            which does not change any example's text, order or number, so a run may resume with
            other masking.
    """

    streams: Streams
    sequence_length: int
    vocab_size: int
    specials: Specials
    mask_fraction: float
    random_share: float
    keep_share: float
    with_segments: bool
    fingerprint: str

    def __len__(self) -> int:
        return self.streams.examples

    def sequence(self, index: int) -> np.ndarray:
        """Returns example ``index`` unmasked: [CLS], tokens, [SEP], and padding, int32 [S]."""
        text = self._text(index)
        sequence_S = np.full(self.sequence_length, self.specials.pad, np.int32)
        sequence_S[0] = self.specials.cls
        sequence_S[1 : len(text) + 1] = text
        sequence_S[len(text) + 1] = self.specials.sep
        return sequence_S

    def has_targets(self) -> bool:
        """Returns whether any example has a token to predict; the first one almost always has."""
        special = self.specials.ids()
        return any(
            masked_count(int((~np.isin(self._text(index), special)).sum()), self.mask_fraction)
            for index in range(len(self))
        )

    def _text(self, index: int) -> np.ndarray:
        return self.streams.window(index, self.sequence_length - 2)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns example ``index``, masked with ``rng``: see :func:`mask`."""
        sequence_S = self.sequence(index)
        masked = mask(
            sequence_S,
            rng,
            mask_fraction=self.mask_fraction,
            random_share=self.random_share,
            keep_share=self.keep_share,
            vocab_size=self.vocab_size,
            specials=self.specials,
        )
        if self.with_segments:
            masked["segments"] = segments(sequence_S, self.specials)
        return masked


def segments(sequence_S: np.ndarray, specials: Specials) -> np.ndarray:
    """Numbers the document that each token belongs to, int32 [S]: 1, 2, ...; 0 is padding.

    A [SEP] belongs to the document before it; [CLS], and a [SEP] directly after it, to the document
    that follows.
    """
    ends_S = sequence_S == specials.sep
    ends_S[1] = False
    segments_S = 1 + np.cumsum(ends_S, dtype=np.int32) - ends_S.astype(np.int32)
    segments_S[sequence_S == specials.pad] = 0
    return segments_S
