"""A GPT whose size follows from its depth: nanochat's model of October 2025, or of July 2026.

Of the network in :mod:`jaxtrain.models.causal`, it has norms without parameters, also after the
embedding and of queries and keys, squared ReLU, an untied output layer, and logits capped at 15.
`depth` sets the number of layers and, unless they are set, width and heads. Source:
https://github.com/karpathy/nanochat at c75fe54 (2025-10-25).

The model of 2026 (at 92d63d4, 2026-07-03) is the same network with what the fields from
`rotary_base` to `recipe` add; `Config.of_2026` sets all of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import causal
from jaxtrain.models.causal_settings import Sizes
from jaxtrain.models.weight_table import MATRIX, Row, WeightTable
from jaxtrain.ops import attention
from jaxtrain.ops.init import normal_init, uniform_init
from jaxtrain.ops.layers import Remat

_ASPECT = 64  # width / depth
_HEAD = 128  # largest head width
_ROTARY_BASE = 10_000.0
_CAP = 15.0
_FF = 4  # feed-forward width / width
# Optimizer rates are set for this width (depth 12); they scale with (width / 768)^-0.5.
_RATE_WIDTH = 768
_RATE_DEPTH = 12
_RATE_BATCH = 2**19  # tokens per step
_TILE = 128  # windows are multiples of what fused attention computes together
_OUTPUT = "lm_head.weight"


def _table(word: str, block: str, **kernels: str) -> WeightTable:
    rows = [
        Row(f"{block}.{{}}.{name}.weight", f"blocks.{{}}.{ours}", MATRIX)
        for ours, name in kernels.items()
    ]
    extras = [
        Row(name, name, optional=True) for name in ("resid_lambdas", "x0_lambdas", "backout_lambda")
    ]
    extras += [
        Row("smear_lambda", "smear.scale", optional=True),
        Row("smear_gate.weight", "smear.gate", MATRIX, optional=True),
        Row("value_embeds.{}.weight", "value_embeds.{}.table"),
    ]
    return WeightTable(
        rows=(Row(word, "wte.table"), *rows, *extras, Row(_OUTPUT, "lm_head.words")),
        unused=("rotary_emb.inv_freq",),
    )


NANOCHAT = _table(
    "transformer.wte.weight",
    "transformer.h",
    q="attn.c_q",
    k="attn.c_k",
    v="attn.c_v",
    value_gate="attn.ve_gate",
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
TRANSFORMERS = _table(
    "model.embed_tokens.weight",
    "model.layers",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.o_proj",
    up="mlp.fc1",
    down="mlp.fc2",
)


def _reading(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    deviation = min(1.0, math.sqrt(outputs / inputs)) / math.sqrt(inputs)
    return normal_init(rngs, (inputs, outputs), deviation)


def _zeros(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros((inputs, outputs)))


def _even(scale: float) -> causal.Kernel:
    """Returns uniform kernels with standard deviation `scale / in^0.5`: without outliers."""

    def kernel(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
        return uniform_init(rngs, (inputs, outputs), scale * math.sqrt(3 / inputs))

    return kernel


_KIND = causal.Kind(
    norm_scales=False,
    qk_norm=True,
    swiglu=False,
    tied=False,
    cap=_CAP,
    clockwise=True,
    embedding_std=1.0,
    reading=_reading,
    feeding=_reading,
    writing=_zeros,
)
_KINDS = {
    "2025": _KIND,
    "2026": dataclasses.replace(
        _KIND, embedding_std=0.8, head_std=0.001, reading=_even(1.0), feeding=_even(0.4)
    ),
}
_OF_2026 = MappingProxyType(
    {
        "rotary_base": 100_000.0,
        "qk_scale": 1.2,
        "window_pattern": "SSSL",
        "value_embeddings": True,
        "residual_scalars": True,
        "smear": True,
        "backout": True,
        "recipe": "2026",
    }
)
# beta1, beta2 and weight decay.
_ADAMW_2026 = {
    "wte": (0.8, 0.995, 0.001),
    "lm_head": (0.8, 0.96, 0.01),
    "value_embeds": (0.8, 0.995, 0.01),
    "resid": (0.8, 0.95, 0.05),
    "x0": (0.96, 0.95, 0.0),
    "smear": (0.8, 0.95, 0.0),
    "backout": (0.8, 0.95, 0.0),
}


class Scaling(NamedTuple):
    """What follows from depth, by the rules of nanochat at 92d63d4; see :meth:`Config.scaling`.

    Attributes:
        batch_tokens: tokens per step.
    """

    tokens: int
    batch_tokens: int
    steps: int
    rate_scale: float
    decay_scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(causal.CausalConfig):
    """The GPT."""

    vocab_size: bounds.Words
    """Vocabulary size, including special tokens (rows of the embedding)."""
    sequence_length: bounds.Tokens
    """Tokens per sequence."""
    depth: bounds.Layers
    """Number of layers; width and heads follow from it."""
    width: bounds.Width | None = None
    """Hidden width. None uses 64 x depth, with recipe 2026 rounded up to a multiple of 128."""
    heads: bounds.Heads | None = None
    """Query heads; must divide the width. None uses width / 128, rounded up to a divisor."""
    kv_heads: bounds.Heads | None = None
    """Key and value heads; must divide the query heads. None uses as many as query heads."""
    dropout: bounds.Fraction = 0.0
    """Dropout rate of embeddings, squared ReLU activations, and layer outputs, 0 to 1."""
    remat: Remat = "none"
    """Activation checkpointing. block: keep each layer's input and recompute the layer in the
    backward pass; none: keep everything."""
    norm_eps: bounds.Epsilon = float(jnp.finfo(jnp.float32).eps)
    """Epsilon that is added to the mean square in each norm."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a weights file, a
    transformers folder (NanoChatForCausalLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face
    Hub."""
    rotary_base: bounds.RotaryBase = _ROTARY_BASE
    """Base of the rotary angles position / rotary_base^(2 i / K) of pair i, with head width K."""
    qk_scale: bounds.Positive = 1.0
    """Factor on normalized queries and on normalized keys; a larger one sharpens attention."""
    window_pattern: str | None = None
    """Sliding windows: a letter per layer, repeated; the last layer is always L. L: a token attends
    to all tokens before it; S: to the nearest quarter of the sequence length, rounded up to a
    multiple of 128. None uses L for all layers."""
    value_embeddings: bool = False
    """Give every second layer, the last one included, an embedding of its own, which is added to
    its values with a gate per head."""
    residual_scalars: bool = False
    """Let each layer read a x + b x0, with the residual stream x, the embedding x0, and trained a
    and b."""
    smear: bool = False
    """Add a gated part of each embedding to the next one."""
    backout: bool = False
    """Subtract a trained part of the residual stream after the middle layer from the last one's."""
    recipe: Literal["2025", "2026"] = "2025"
    """Initial values, and with optim.muon betas and weight decays of AdamW. 2025: normal kernels,
    output layer zero, one optim.b1 and optim.b2; 2026: uniform kernels, smaller in the feed-forward
    layers, a small output layer, and betas and decays for each group of parameters."""

    model_type = "nanochat"  # in transformers' config.json
    architecture = "NanoChatForCausalLM"
    fixed = MappingProxyType(
        {
            "hidden_act": "relu2",
            "attention_bias": False,
            "final_logit_softcapping": _CAP,
            "tie_word_embeddings": False,
        }
    )
    theirs = MappingProxyType[str, Any]({"final_logit_softcapping": 15.0})
    width_field, most_head_width = "width", _HEAD
    in_weights = ("depth", "vocab_size", "value_embeddings", "residual_scalars", "smear", "backout")
    not_in_weights = (
        ("heads", "query_heads"),
        *((name, name) for name in ("norm_eps", "rotary_base", "qk_scale", "window_pattern")),
    )

    def check(self) -> None:
        """Checks the window pattern, too."""
        super().check()
        if self.window_pattern is not None and not (
            self.window_pattern and set(self.window_pattern) <= set("SL")
        ):
            raise InputError(
                f"model.window_pattern={self.window_pattern} must have letters S and L only, such "
                "as SSSL",
                about="model.window_pattern",
            )

    @classmethod
    def of_2026(cls, **fields: Any) -> "Config":
        """Returns the model of 2026."""
        return cls(**{**_OF_2026, **fields})

    @property
    def kind(self) -> causal.Kind:
        """Returns the kind of network."""
        return dataclasses.replace(_KINDS[self.recipe], qk_scale=self.qk_scale)

    @property
    def extras(self) -> causal.Extras:
        """Returns what the network adds to its kind."""
        short = -(-self.sequence_length // (4 * _TILE)) * _TILE
        pattern = self.window_pattern or "L"
        windows = [
            short if pattern[number % len(pattern)] == "S" else None
            for number in range(self.depth - 1)
        ]
        return causal.Extras(
            windows=(*windows, None),
            value_embeddings=self.value_embeddings,
            residual_scalars=self.residual_scalars,
            smear=self.smear,
            backout=self.backout,
        )

    @property
    def in_transformers(self) -> bool:
        """Returns whether it is `NanoChatForCausalLM`, which has none of the fields of 2026."""
        return self == dataclasses.replace(
            self,
            rotary_base=_ROTARY_BASE,
            qk_scale=1.0,
            window_pattern=None,
            value_embeddings=False,
            residual_scalars=False,
            smear=False,
            backout=False,
        )

    def scaling(self, tokens_per_parameter: float) -> Scaling:
        """Returns length, batch and factors for this depth, relative to depth 12.

        The batch grows with the tokens to the power of 0.383 (https://arxiv.org/abs/2505.13738),
        and is a power of two. Rates grow with the square root of the batch, and the weight decay
        keeps the time scale of AdamW's average (https://arxiv.org/abs/2405.13698).

        Args:
            tokens_per_parameter: counts :attr:`scaling_parameters`; embeddings do not matter for
                the best length.
        """
        reference = dataclasses.replace(self, depth=_RATE_DEPTH, width=None, heads=None)
        tokens, of_reference = (
            tokens_per_parameter * model.scaling_parameters for model in (self, reference)
        )
        batch = 2 ** round(math.log2(_RATE_BATCH * (tokens / of_reference) ** 0.383))
        rate = math.sqrt(batch / _RATE_BATCH)
        steps = max(1, int(tokens) // batch)
        return Scaling(int(tokens), batch, steps, rate, rate * of_reference / tokens)

    @property
    def scaling_parameters(self) -> int:
        """Returns the number of parameters in matrices of layers and output layer."""
        return self.depth * self._layer + self.vocab_size * self.hidden + self._gates

    @property
    def _layer(self) -> int:
        d, n, h = self.hidden, self.query_heads, self.shared_heads
        return 2 * d * (d + h * d // n) + 2 * _FF * d * d

    @property
    def _gates(self) -> int:
        each = min(causal.VALUE_CHANNELS, self.hidden) * self.shared_heads
        return self._values * each

    @property
    def _values(self) -> int:
        return -(-self.depth // 2) if self.value_embeddings else 0

    @property
    def hidden(self) -> int:
        """Returns the hidden width."""
        if self.width is not None:
            return self.width
        unit = _HEAD if self.recipe == "2026" else _ASPECT  # as nanochat: heads of 2026 are equal
        return unit * math.ceil(_ASPECT * self.depth / unit)

    @property
    def query_heads(self) -> int:
        """Returns the number of query heads."""
        return attention.fewest_heads(self.hidden, _HEAD) if self.heads is None else self.heads

    @property
    def shared_heads(self) -> int:
        """Returns the number of key and value heads."""
        return self.query_heads if self.kv_heads is None else self.kv_heads

    @property
    def rate_scale(self) -> float:
        """Returns the factor of the embedding's and output layer's rates: (width / 768)^-0.5."""
        return float((self.hidden / _RATE_WIDTH) ** -0.5)

    def notes(self) -> list[str]:
        """Lists the numbers that follow from `depth`, with their formulas."""

        def origin(value: int | None, formula: str) -> str:
            return formula if value is None else "as set"

        d, n, h, v = self.hidden, self.query_heads, self.shared_heads, self.vocab_size
        rounded = d != _ASPECT * self.depth
        width = f"{_ASPECT} x depth" + f", up to a multiple of {_HEAD}" * rounded
        smear = min(causal.SMEAR_CHANNELS, d) + 1
        values = self._values * v * h * (d // n)
        small = 2 * self.depth * self.residual_scalars + smear * self.smear + self.backout
        more = f" + {self._values} value embeddings {values:,}" if values else ""
        more += f" + {self._gates + small:,} of gates and scalars" if self._gates + small else ""
        total = 2 * v * d + self.depth * self._layer + values + self._gates + small
        return [
            f"depth {self.depth}: width {d} ({origin(self.width, width)}), "
            f"{n} query heads ({origin(self.heads, f'width / {_HEAD}, up to a divisor')}) of width "
            f"{d // n}, {h} key-value heads ({origin(self.kv_heads, 'query heads')})",
            f"parameters {total:,} (2 x {v} tokens x {d} + {self.depth} layers x {self._layer:,}"
            f"{more})",
            f"with optim.muon: rates of embedding and output layer x {self.rate_scale:.4g} "
            f"((width / {_RATE_WIDTH})^-0.5)",
        ]

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the network, which follow from the depth where they are not set."""
        return Sizes(
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
            hidden=self.hidden,
            layers=self.depth,
            heads=self.query_heads,
            kv_heads=self.shared_heads,
            ff=_FF * self.hidden,
            norm_eps=self.norm_eps,
            rotary_base=self.rotary_base,
        )

    @classmethod
    def from_sizes(cls, sizes: Sizes) -> "Config":
        """Returns the config of a network; a field that follows from the depth is None."""
        for name, value, ours in (
            ("intermediate_size", sizes.ff, _FF * sizes.hidden),
            ("rope_theta", sizes.rotary_base, _ROTARY_BASE),
        ):
            if value != ours:
                raise InputError(f"this network is not supported: {name}={value} (here {ours})")
        usual = attention.fewest_heads(sizes.hidden, _HEAD)
        return cls(
            vocab_size=sizes.vocab_size,
            sequence_length=sizes.sequence_length,
            depth=sizes.layers,
            width=None if sizes.hidden == _ASPECT * sizes.layers else sizes.hidden,
            heads=None if sizes.heads == usual else sizes.heads,
            kv_heads=None if sizes.kv_heads == sizes.heads else sizes.kv_heads,
            norm_eps=sizes.norm_eps,
        )

    def build(self, rngs: nnx.Rngs) -> "GPT":
        """Builds the module, with new float32 parameters."""
        return GPT(self, rngs)

    def optimizer_groups(self) -> Mapping[str, config.Group | config.Role]:
        """Returns the role of each parameter for `optim.muon`."""
        scale, values = self.rate_scale, 0.5 * self.rate_scale
        roles = {
            "matrices": config.Role(prefix="blocks.", role="matrix"),
            "wte": config.Role(prefix="wte.", role="embedding", scale=scale),
            "lm_head": config.Role(prefix="lm_head.", role="unembedding", scale=scale),
            "value_embeds": config.Role(prefix="value_embeds.", role="embedding", scale=values),
            "resid": config.Role(prefix="resid_lambdas", role="scalar", scale=0.01),
            "x0": config.Role(prefix="x0_lambdas", role="scalar"),
            "smear": config.Role(prefix="smear.", role="scalar", scale=0.4),
            "backout": config.Role(prefix="backout_lambda", role="scalar", scale=0.4),
        }
        exists = {
            "value_embeds": self.value_embeddings,
            "resid": self.residual_scalars,
            "x0": self.residual_scalars,
            "smear": self.smear,
            "backout": self.backout,
        }
        roles = {name: role for name, role in roles.items() if exists.get(name, True)}
        if self.recipe == "2026":
            for name in _ADAMW_2026.keys() & roles.keys():
                b1, b2, decay = _ADAMW_2026[name]
                roles[name] = dataclasses.replace(roles[name], b1=b1, b2=b2, weight_decay=decay)
        return roles

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of nanochat, and of `NanoChatForCausalLM`."""
        return NANOCHAT, TRANSFORMERS

    @classmethod
    def guess(cls, tensors: Mapping[str, np.ndarray], source: str) -> "Config":
        """Infers the config from weights; assumes that the heads follow from the width."""
        table = TRANSFORMERS if any(name.startswith("model.") for name in tensors) else NANOCHAT
        word, keys_of = table.name("lm_head.words"), table.name("blocks.{}.k")
        key = keys_of.format(0)
        for name in (word, key):
            if name not in tensors:
                raise InputError(f"{source} is not a GPT of this kind: it has no {name}")
        vectors, keys = tensors[word], tensors[key]
        if vectors.ndim != 2 or keys.ndim != 2 or not 0 < vectors.shape[1] <= 2**20:
            raise InputError(
                f"{source} is not a GPT of this kind: {word} has shape {vectors.shape} and {key} "
                f"has shape {keys.shape}"
            )
        vocab, width = vectors.shape
        heads = attention.fewest_heads(width, _HEAD)
        # What no array shows is as in the model of the same year.
        extras = dict[str, Any](_OF_2026 if "resid_lambdas" in tensors else {})
        if extras:
            extras["value_embeddings"] = any(name.startswith("value_embeds.") for name in tensors)
            extras |= {
                field: name in tensors
                for field, name in (("smear", "smear_lambda"), ("backout", "backout_lambda"))
            }
        try:
            return cls(
                **extras,
                vocab_size=vocab,
                sequence_length=2048,
                depth=next(n for n in itertools.count() if keys_of.format(n) not in tensors),
                width=width,
                kv_heads=keys.shape[0] * heads // width,
            )
        except InputError as error:
            raise InputError(f"{source} does not have weights of this model: {error}") from error

    @classmethod
    def tiny(cls) -> "Config":
        """Returns two layers of width 16 with two heads, 16 tokens per sequence, vocabulary 50."""
        return cls(vocab_size=50, sequence_length=16, depth=2, width=16, heads=2)


class GPT(causal.CausalModel):
    """Embedding, blocks, and output layer.

    Kernels that read the residual stream are normal with standard deviation
    `min(1, (out / in)^0.5) / in^0.5`, or (recipe 2026) uniform with `1 / in^0.5` in attention and
    `0.4 / in^0.5` in the feed-forward layers; those that write to it start as zeros.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.wte = causal.Embedding(config, rngs)
        self.blocks = nnx.List([causal.Block(config, rngs, n) for n in range(config.depth)])
        self.lm_head = causal.Head(config, rngs)

    def components(self) -> tuple[causal.Embedding, nnx.List[causal.Block], causal.Head]:
        """Returns embedding, blocks, and head."""
        return self.wte, self.blocks, self.lm_head
