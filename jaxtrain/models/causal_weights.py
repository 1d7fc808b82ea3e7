"""Converts causal language models to other implementations' names and transformers' config.json.

Other implementations' linear layers are [out, in], ours [in, out]; embedding, output layer and
norms have the same layout.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxtrain import errors
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.storage import tensor_files

Tensors = Mapping[str, np.ndarray]
_LISTED = 4
_NAMED = 10  # most differences in a message
_FULL = "full_attention"
_BASE = "rope_theta"
_ROTARY = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Another implementation's names for the parameters of a model.

    Attributes:
        ours: our name for the list of blocks.
        theirs: their name for it.
        whole: our dotted paths outside the blocks -> their names.
        of_block: our names in a block -> theirs.
        unused: substrings of names of arrays that are not parameters, such as tables of angles.
        tied: aliases, their names of tied arrays -> one of the names above.
    """

    ours: str
    theirs: str
    whole: Mapping[str, str]
    of_block: Mapping[str, str]
    unused: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def outward(self, params: Tensors) -> dict[str, np.ndarray]:
        """Converts parameters by dotted path to their state dict."""
        return {self._name(path): self._turned(path, array) for path, array in params.items()}

    def inward(
        self, tensors: Tensors, expected: Mapping[str, tuple[int, ...]], source: str, cure: str
    ) -> dict[str, np.ndarray]:
        """Converts back, to float32.

        Args:
            tensors: their state dict.
            expected: dotted path -> shape of each of the model's parameters.
            source: origin of the tensors, for messages.
            cure: how to fix a mismatch, for messages.

        Raises:
            InputError: lists arrays that are missing, extra or misshapen.
        """
        given = self._once(tensors, source)
        tensor_files.check_real(given, source)
        wanted = {
            self._name(path): shape if path in self.whole else shape[::-1]
            for path, shape in expected.items()
        }
        wrong = [f"{name} is missing" for name in wanted if name not in given]
        wrong += [f"{name} is not part of this model" for name in given if name not in wanted]
        wrong += [
            f"{name} has shape {given[name].shape} instead of {shape}"
            for name, shape in wanted.items()
            if name in given and given[name].shape != shape
        ]
        if wrong:
            more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise InputError(
                f"{source} does not fit this model: {'; '.join(wrong[:_LISTED])}{more}: {cure}"
            )
        return {
            path: self._turned(path, np.asarray(given[self._name(path)], np.float32))
            for path in expected
        }

    def layers(self, tensors: Tensors) -> int:
        """Returns the number of blocks in a state dict."""
        number = re.compile(rf"{re.escape(self.theirs)}\.(\d+)\.")
        return len({match[1] for name in tensors if (match := number.match(name))})

    def _once(self, tensors: Tensors, source: str) -> dict[str, np.ndarray]:
        """Skips unused arrays and aliases; an alias alone stands for its array."""
        found = {
            name: array
            for name, array in tensors.items()
            if name not in self.tied and not any(part in name for part in self.unused)
        }
        for name, own in self.tied.items():
            if name not in tensors:
                continue
            if not np.array_equal(found.setdefault(own, tensors[name]), tensors[name]):
                raise InputError(
                    f"{source}: {name} differs from {own}, but this model has one array for both "
                    "(tie_word_embeddings)"
                )
        return found

    def _name(self, path: str) -> str:
        if path in self.whole:
            return self.whole[path]
        number, _, part = path.removeprefix(f"{self.ours}.").partition(".")
        return f"{self.theirs}.{number}.{self.of_block[part]}.weight"

    def _turned(self, path: str, array: np.ndarray) -> np.ndarray:
        return np.asarray(array) if path in self.whole else np.ascontiguousarray(array.T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The contents of transformers' config.json of a causal language model.

    Attributes:
        vocab_size: vocabulary size.
        sequence_length: positions that the model was trained for.
        hidden: hidden width.
        layers: number of blocks.
        heads: query heads; they divide `hidden`.
        kv_heads: key and value heads.
        ff: width of the feed-forward layers.
        norm_eps: added to the mean square in each norm.
        rotary_base: base of the angles of rotary positions.
    """

    vocab_size: int
    sequence_length: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    norm_eps: float
    rotary_base: float

    def to_settings(
        self, model_type: str, architecture: str, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the config.json; :mod:`jaxtrain.interop.huggingface` adds ids of special tokens.

        Args:
            model_type: transformers' name of the kind of model.
            architecture: transformers' name of the class.
            fixed: properties of the network at any size.
        """
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
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
    ) -> "Shape":
        """Converts back; ignores settings only for training, such as `attention_dropout`.

        Args:
            content: the config.json, with transformers' default for each entry of `fixed` that is
                missing in the file.
            fixed: properties of our network at any size.
            source: the file, for messages.

        Raises:
            InputError: an entry is missing, or it describes another network.
        """

        def whole(name: str, within: bounds.Bounds) -> int:
            return bounds.entry(content, name, within, source)

        rotary = _rotary(content, source)
        hidden = whole("hidden_size", bounds.WIDTH)
        heads = whole("num_attention_heads", bounds.HEADS)
        given = content.get("num_key_value_heads") is not None
        kv_heads = whole("num_key_value_heads", bounds.HEADS) if given else heads
        eps, base = content.get("rms_norm_eps", 1e-6), rotary.get(_BASE, 10_000.0)
        bounds.check(f"{source}: rms_norm_eps", eps, bounds.EPSILON, float)
        bounds.check(f"{source}: {_BASE}", base, bounds.ROTARY, float)
        shape = cls(
            vocab_size=whole("vocab_size", bounds.WORDS),
            sequence_length=whole("max_position_embeddings", bounds.TOKENS),
            hidden=hidden,
            layers=whole("num_hidden_layers", bounds.LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            ff=whole("intermediate_size", bounds.WIDTH),
            norm_eps=eps,
            rotary_base=float(base),
        )
        other = [
            f"{name}={errors.shown(content[name])} (here {wanted!r})"
            for name, wanted in fixed.items()
            if content.get(name, wanted) != wanted
        ]
        width = content.get("head_dim")
        if width is not None and whole("head_dim", bounds.WIDTH) * heads != hidden:
            other.append(f"head_dim={width} (here hidden_size / num_attention_heads)")
        other += [
            f"{errors.shown(name)[1:-1]}={errors.shown(value)} of its rotary positions (here "
            f"{_ROTARY.get(name)!r})"
            for name, value in rotary.items()
            if name != _BASE and value not in (None, _ROTARY.get(name))
        ]
        other += [
            f"{name}={errors.shown(content[name])} (here None)"
            for name in ("sliding_window", "quantization_config")
            if content.get(name) is not None
        ]
        types = content.get("layer_types") or []
        if not isinstance(types, list):
            raise InputError(f"{source}: layer_types is not a list")
        kind = next((kind for kind in types if kind != _FULL), None)
        if kind is not None:
            other.append(f"layer_types with {errors.shown(kind)} (here only {_FULL!r})")
        if other:
            raise InputError(
                f"{source}: this network is not supported: {'; '.join(other[:_NAMED])}"
            )
        return shape


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns dotted path -> shape of each parameter of a model, from its config."""
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    paths = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value().shape for path, leaf in paths}


def _rotary(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the entries on rotary positions, from where transformers 4 and 5 write them."""
    names = (_BASE, "partial_rotary_factor")
    found = {name: content[name] for name in names if name in content}
    for name in ("rope_scaling", "rope_parameters"):
        entries = content.get(name) or {}
        if not isinstance(entries, Mapping):
            raise InputError(f"{source}: {name} is not an object")
        found |= entries
    return found
