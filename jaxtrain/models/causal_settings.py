"""Converts the sizes of causal language models to transformers' config.json, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain import errors
from jaxtrain.config import bounds
from jaxtrain.errors import InputError

_NAMED = 10  # most differences in a message
_FULL = "full_attention"
_BASE = "rope_theta"
_ROTARY = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a network, as in transformers' config.json."""

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    norm_eps: float
    rotary_base: float

    @property
    def head_width(self) -> int:
        """Returns the head width."""
        return self.hidden // self.heads

    def to_settings(
        self, model_type: str, architecture: str, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns config.json; :mod:`jaxtrain.interop.huggingface` adds ids of special tokens."""
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "intermediate_size": self.ff,
            "max_position_embeddings": self.sequence_length,
            "rms_norm_eps": self.norm_eps,
            _BASE: self.rotary_base,  # read by transformers 4
            "rope_parameters": {"rope_type": "default", _BASE: self.rotary_base},  # by 5
            "dtype": "float32",
            **fixed,
        }

    @classmethod
    def from_settings(
        cls, content: Mapping[str, Any], fixed: Mapping[str, Any], source: str
    ) -> "Sizes":
        """Converts back; ignores settings only for training, such as `attention_dropout`.

        Args:
            content: the config.json, with transformers' default for each entry of `fixed` that is
                missing in the file.
        """

        def integer(name: str, within: bounds.Bounds) -> int:
            return bounds.entry(content, name, within, source)

        rotary = _rotary(content, source)
        hidden = integer("hidden_size", bounds.WIDTH)
        heads = integer("num_attention_heads", bounds.HEADS)
        has_kv_heads = content.get("num_key_value_heads") is not None
        kv_heads = integer("num_key_value_heads", bounds.HEADS) if has_kv_heads else heads
        eps, base = content.get("rms_norm_eps", 1e-6), rotary.get(_BASE, 10_000.0)
        bounds.check(f"{source}: rms_norm_eps", eps, bounds.EPSILON, float)
        bounds.check(f"{source}: {_BASE}", base, bounds.ROTARY, float)
        sizes = cls(
            vocab_size=integer("vocab_size", bounds.WORDS),
            sequence_length=integer("max_position_embeddings", bounds.TOKENS),
            hidden=hidden,
            layers=integer("num_hidden_layers", bounds.LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            ff=integer("intermediate_size", bounds.WIDTH),
            norm_eps=eps,
            rotary_base=float(base),
        )
        other = bounds.differing(content, fixed)
        width = content.get("head_dim")
        if width is not None and integer("head_dim", bounds.WIDTH) * heads != hidden:
            other.append(f"head_dim={width} (here hidden_size / num_attention_heads)")
        other += [
            f"{errors.short_repr(name)[1:-1]}={errors.short_repr(value)} of its rotary positions "
            f"(here {_ROTARY.get(name)!r})"
            for name, value in rotary.items()
            if name != _BASE and value not in (None, _ROTARY.get(name))
        ]
        other += bounds.differing(content, {"sliding_window": None, "quantization_config": None})
        types = content.get("layer_types") or []
        if not isinstance(types, list):
            raise InputError(f"{source}: layer_types is not a list")
        kind = next((kind for kind in types if kind != _FULL), None)
        if kind is not None:
            other.append(f"layer_types with {errors.short_repr(kind)} (here only {_FULL!r})")
        if other:
            raise InputError(
                f"{source}: this network is not supported: {'; '.join(other[:_NAMED])}"
            )
        return sizes


def _rotary(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the entries on rotary positions, from where transformers 4 and 5 write them."""
    names = (_BASE, "partial_rotary_factor")
    settings = {name: content[name] for name in names if name in content}
    for name in ("rope_scaling", "rope_parameters"):
        entries = content.get(name) or {}
        if not isinstance(entries, Mapping):
            raise InputError(f"{source}: {name} is not an object")
        settings |= entries
    return settings
