"""Generates random token batches in the format of the text pipeline."""

from typing import Any

import numpy as np

from jaxtrain.data.text import masking
from jaxtrain.data.text.specials import CLS, NAMES, SEP, Specials


def masked(model: Any, batch_size: int, count: int) -> list[dict[str, np.ndarray]]:
    """Generates masked tokens by Zipf's law, for the masked language model.

    Unused slots repeat a used one, so that a PyTorch label tensor contains every target once.

    Args:
        model: ``jaxtrain.models.mlm.Config``.
        batch_size: examples per batch.
        count: number of batches.
    """
    rng = np.random.default_rng(0)
    shares = _shares(model.vocab_size - len(NAMES))

    def example() -> dict[str, np.ndarray]:
        words = rng.choice(len(shares), model.sequence_length, p=shares) + len(NAMES)
        words[0], words[-1] = CLS, SEP
        return masking.mask(
            words.astype(np.int32),
            rng,
            mask_fraction=model.mask_fraction,
            random_share=0.1,
            keep_share=0.1,
            vocab_size=model.vocab_size,
            specials=Specials(),
        )

    def batch() -> dict[str, np.ndarray]:
        examples = [example() for _ in range(batch_size)]
        stacked = {name: np.stack([one[name] for one in examples]) for name in examples[0]}
        unused = stacked["target_weights"] == 0
        for name in ("positions", "targets"):
            stacked[name] = np.where(unused, stacked[name][:, :1], stacked[name])
        return stacked | {"weight": np.ones(batch_size, np.float32)}

    return [batch() for _ in range(count)]


def following(model: Any, batch_size: int, count: int) -> list[dict[str, np.ndarray]]:
    """Generates tokens by Zipf's law with next-token targets, for causal models.

    Args:
        model: ``jaxtrain.models.gpt.Config`` or ``llama.Config``.
        batch_size: examples per batch.
        count: number of batches.
    """
    rng = np.random.default_rng(0)
    shares = _shares(model.vocab_size)

    def batch() -> dict[str, np.ndarray]:
        size = (batch_size, model.sequence_length + 1)
        words = rng.choice(len(shares), size, p=shares).astype(np.int32)
        targets = words[:, 1:]
        return {
            "tokens": words[:, :-1],
            "targets": targets,
            "target_bytes": np.ones_like(targets),
            "weight": np.ones(batch_size, np.float32),
        }

    return [batch() for _ in range(count)]


def _shares(count: int) -> np.ndarray:
    """Returns the probabilities of tokens by Zipf's law."""
    shares = 1 / np.arange(1, count + 1)
    return shares / shares.sum()
