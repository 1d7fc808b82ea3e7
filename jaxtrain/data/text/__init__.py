"""Text: documents, tokenizers, packing and masking; :class:`Masked` and :class:`Causal` in a config."""

from jaxtrain.data.text.config import Causal, Masked

__all__ = ["Causal", "Masked"]
