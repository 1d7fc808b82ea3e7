"""One split of a token cache as masked sequences."""

import dataclasses

import numpy as np

from jaxtrain.data.text import masking, packing
from jaxtrain.data.text.specials import Specials


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSource:
    """One split as masked sequences; see :class:`jaxtrain.data.source.Source`.

    Attributes:
        packed: reads the sequences.
        examples: their number.
        sequence_length: tokens of an example, padding included.
        vocab_size: ids that the tokenizer has; no other one is ever given.
        specials: its special tokens.
        mask_fraction: share of the ordinary tokens that is chosen.
        random_share: share of the chosen that become a random token.
        keep_share: share of the chosen that stay.
        with_segments: examples say which tokens are of one document.
        fingerprint: digest of the token stream, the tokenizer and the packing. Masking is not in
            it: it changes no example's text, order or number, so a run may resume with another.
        tokenizer_path: the ``tokenizer.json`` of the ids.
    """

    packed: packing.Packed
    examples: int
    sequence_length: int
    vocab_size: int
    specials: Specials
    mask_fraction: float
    random_share: float
    keep_share: float
    with_segments: bool
    fingerprint: str
    tokenizer_path: str

    def __len__(self) -> int:
        return self.examples

    def sequence(self, index: int) -> np.ndarray:
        """Example ``index`` without masking: [CLS] tokens [SEP] and padding, int32 [S]."""
        text = self.packed[index]
        sequence_S = np.full(self.sequence_length, self.specials.pad, np.int32)
        sequence_S[0] = self.specials.cls
        sequence_S[1 : len(text) + 1] = text
        sequence_S[len(text) + 1] = self.specials.sep
        return sequence_S

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Example ``index``, masked by ``rng``: see :func:`jaxtrain.data.text.masking.mask`."""
        sequence_S = self.sequence(index)
        masked = masking.mask(
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
    """Which document of a sequence each token belongs to, int32 [S]: 1, 2, ...; 0 is padding.

    A document ends with its [SEP]; [CLS] belongs to the first one.
    """
    ends_S = sequence_S == specials.sep
    segments_S = 1 + np.cumsum(ends_S, dtype=np.int32) - ends_S.astype(np.int32)
    segments_S[sequence_S == specials.pad] = 0
    return segments_S
