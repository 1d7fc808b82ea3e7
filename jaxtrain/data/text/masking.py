"""Masking for masked language modelling, in NumPy.

Of the candidates (every token that is not special) a fixed share is chosen. Most of the chosen
become [MASK], some a random ordinary token, some stay as they are; the model predicts the original
at every chosen position and at no other (BERT, https://arxiv.org/abs/1810.04805, section 3.1).

Shapes: S tokens of a sequence, M slots for predictions.
"""

import math

import numpy as np

from jaxtrain.data.text.specials import CLS, MASK, PAD, SEP, UNK, Specials

__all__ = ["CLS", "MASK", "PAD", "SEP", "UNK", "mask", "masked_count"]


def masked_count(candidates: int, mask_fraction: float) -> int:
    """Positions to choose among ``candidates``: their share rounded to nearest, halves up."""
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
    """Choose positions and hide them.

    Args:
        tokens_S: int32 [S], unmasked, with special tokens in place.
        rng: the only source of chance.
        mask_fraction: share of the candidates that is chosen.
        random_share: chance that a chosen token becomes a random ordinary token.
        keep_share: chance that a chosen token stays; with what is left it becomes [MASK].
        vocab_size: ids that exist; random tokens are drawn from them, without the special ones.
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
    for one in special:  # ascending: the ordinary ids, numbered without gaps
        random_ids += random_ids >= one

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
