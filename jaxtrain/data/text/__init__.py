"""Text data sets: documents, tokenizers, windows of token streams, and masking."""

from jaxtrain.data.text.config import Causal, Masked

__all__ = ["Causal", "Masked"]
