"""Text data sets: documents, tokenizers, packing, and masking."""

from jaxtrain.data.text.config import Causal, Masked

__all__ = ["Causal", "Masked"]
