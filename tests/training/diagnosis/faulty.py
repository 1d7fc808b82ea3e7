"""A model with a fault of some kind, data that make it show, and the config of a run with both."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import config
from jaxtrain.data.contract import DataConfig
from jaxtrain.data.source import ArrayTypes, Sources
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.ops import layers

LAYERS, WIDTH, ROWS = 4, 8, 16


class Faulty(Model):
    """A linear model with a fault of some kind, in examples that the batch marks as bad."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.kind = kind
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers_LHH = nnx.Param(jnp.stack([jnp.eye(WIDTH)] * LAYERS))
        self.scale = nnx.Param(jnp.ones((1, WIDTH)))

    def loss(self, batch: dict[str, jax.Array], keys_B: jax.Array) -> Any:
        del keys_B
        x_BH, bad_B1 = self.first(batch["x"]), batch["bad"][:, None].astype(self.scale.dtype)
        x_BH = getattr(self, self.kind)(x_BH, bad_B1) * self.scale
        error_B = jnp.square(x_BH).mean(-1)
        return error_B.sum(), jnp.float32(ROWS), {}

    def evaluate(self, batch: dict[str, jax.Array]) -> Any:
        total, weight, _ = self.loss(batch, jax.random.key(0))
        return {"loss": (total, weight)}

    def fine(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH

    def forward(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH * ((1 - bad_B1) / (1 - bad_B1))  # in forward

    def within(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        @jax.checkpoint
        @jax.jit
        def inside(x_BH: jax.Array) -> jax.Array:
            return jnp.log(x_BH * 0 + 1 - 2 * bad_B1)  # in within

        return inside(x_BH)

    def backward(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH + jnp.sqrt(x_BH * 0 + 1 - bad_B1)  # in backward

    def scanned(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        def layer(x_BH: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            number, weight_HH = of_layer
            x_BH = x_BH @ weight_HH  # in scanned
            return x_BH / (1 - bad_B1 * (number == 2)), None  # the next layer adds Inf - Inf

        return jax.lax.scan(layer, x_BH, (jnp.arange(LAYERS), self.layers_LHH[...]))[0]

    def looped(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        stopped_BH = jax.lax.stop_gradient(x_BH)
        return (
            x_BH
            + jax.lax.while_loop(
                lambda of: of[0] < 5,
                lambda of: (of[0] + 1, of[1] / (1 - bad_B1 * (of[0] == 3))),
                (0, stopped_BH),
            )[1]
        )

    def mask(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        hidden_H = jnp.arange(WIDTH)[None] > 5
        x_BH = jnp.where(hidden_H, -jnp.inf, x_BH) + jnp.log(1.0 - hidden_H)
        return jax.nn.softmax(x_BH / 1.5) / (1 - bad_B1)  # in mask

    def masked(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        hidden_BH = (jnp.arange(WIDTH)[None] > 5) | (bad_B1 > 0)
        x_BH = jnp.where(hidden_BH, -jnp.inf, x_BH)
        return jax.nn.softmax(x_BH)  # in masked

    def where(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        never_BH = jnp.log(jax.lax.stop_gradient(x_BH) * 0 - 1)  # in where
        return jnp.where(bad_B1 > 5, never_BH, x_BH) / (1 - bad_B1)

    def in_ops(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        one_1H = jnp.ones((1, WIDTH))
        return layers.layer_norm(x_BH * (1 - bad_B1), one_1H, one_1H, eps=0.0)  # in in_ops

    def with_shard_map(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        x_BH = layers.add_shared(x_BH, self.scale[0])  # a shard_map on GPUs, in the backward pass
        return x_BH * ((1 - bad_B1) / (1 - bad_B1))  # in with_shard_map

    def large(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return jnp.square(x_BH) * 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The model's config."""

    kind: str
    freeze: tuple[str, ...] = ()

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Faulty(self.kind, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "x": jax.ShapeDtypeStruct((batch_size, WIDTH), jnp.float32),
            "bad": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Examples of random numbers."""

    bad: tuple[int, ...]
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 64

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        del rng
        x_H = np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)
        return {"x": x_H, "bad": np.float32(index in self.bad)}  # type: ignore[dict-item]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(DataConfig):
    """The config of the numbers."""

    path: str = ""
    batch_size: int = ROWS
    workers: int | None = 0
    prefetch: int = 1
    max_bad_share: float = 0.1
    cache_dir: str | None = None
    bad: tuple[int, ...] = ()
    """The examples that make the fault show."""

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        source = Numbers(self.bad)
        return Sources(train=source, val=source, files=1, bad=(), summary="64 examples")

    def arrays(self, model: Any) -> ArrayTypes:
        return {"x": ((WIDTH,), "float32"), "bad": ((), "float32"), "weight": ((), "float32")}


def line(kind: str) -> str:
    """Returns the place of a marked line of this file, as it is printed."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if text.endswith(f"# in {kind}")]
    return f"tests/training/diagnosis/{Path(__file__).name}:{number}"


_base = config.named("demo_mlm")
run = dataclasses.replace(
    _base,
    model=Config(kind="fine"),
    data=Data(),
    optim=dataclasses.replace(
        _base.optim,
        peak_lr=1e-3,
        schedule="constant",
        warmup_steps=0,
        warmup_fraction=None,
        bad_updates="off",
    ),
    mesh=config.Mesh(data=1, fsdp=4, shard="params", min_shard_elements=1),
    loop=dataclasses.replace(_base.loop, steps=8, epochs=None, log_every=1, eval_every=None),
    checkpoint=dataclasses.replace(_base.checkpoint, every=100, best_metric=None),
)
