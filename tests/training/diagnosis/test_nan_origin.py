"""Where the first NaN of a step is computed, and which losses and gradients are NaN/Inf."""

import dataclasses
import re
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import toy

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.ops import layers, per_device
from jaxtrain.sharding import ShardingRule, batch_sharding, replicated
from jaxtrain.training.diagnosis import nan_origin
from jaxtrain.training.diagnosis.nan_origin import Origin
from jaxtrain.training.state import ModelDefinition
from jaxtrain.training.step import build_gradients

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
        }


def _placed(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array on devices; device_put compares it between processes, and NaN is unequal."""
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


class Examined:
    """The second computation of a step of a faulty model."""

    def __init__(
        self,
        kind: str,
        *,
        data: int = 1,
        fsdp: int = 1,
        accumulate: int = 1,
        precision: Any = "float32",
    ) -> None:
        self.mesh = toy.mesh_of(data, fsdp)
        settings = config.Mesh(data=data, fsdp=fsdp, shard="params", min_shard_elements=1)
        self.rule = ShardingRule(self.mesh, settings)
        self.definition = ModelDefinition(Config(kind=kind).build)
        self.gradients = build_gradients(
            self.definition,
            self.rule,
            precision=precision,
            accumulate=accumulate,
            seed=1,
            receive=lambda batch: batch,
        )

    def __call__(self, bad: tuple[int, ...] = (), **changed: Any) -> Origin:
        """Examines a step with the examples ``bad``, and changed parameters or arrays."""
        params, extras = self.definition.init(jax.random.key(0))
        batch: dict[str, Any] = {
            "x": np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32),
            "bad": np.isin(np.arange(ROWS), bad).astype(np.float32),
        }
        for name, change in changed.items():
            arrays = batch if name in batch else params
            arrays[name.replace("__", ".")] = change(arrays[name.replace("__", ".")])
        stored, whole = self.definition.param_shardings(self.rule), replicated(self.mesh)
        return nan_origin.examine(
            self.gradients,
            self.mesh,
            {name: _placed(params[name], stored[name]) for name in params},
            {name: _placed(array, whole) for name, array in extras.items()},
            {name: _placed(array, batch_sharding(self.mesh)) for name, array in batch.items()},
            48,
        )


def line(kind: str) -> str:
    """Returns the place of a marked line of this file, as it is printed."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if text.endswith(f"# in {kind}")]
    return f"tests/training/diagnosis/{Path(__file__).name}:{number}"


UNLESS = ", unless a later operation masks it; "
EVERY = "NaN in the gradient of first.bias, first.kernel, scale"
LAYER = "NaN in the gradient of first.bias, first.kernel"
SHARDED = {"data": 1, "fsdp": 2, "accumulate": 2, "precision": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "how", "operation", "effects"),
    [
        ("forward", SHARDED, "div", f"NaN in loss; {EVERY}"),
        ("within", {"data": 2, "fsdp": 2}, "log", f"NaN in loss; {EVERY}"),
        # A row in which everything is masked: Inf - Inf.
        ("masked", {}, "sub", "NaN in loss; NaN in the gradient of scale"),
        # Not the -inf of the masks, which are legal.
        ("mask", {}, "div", f"NaN in loss; {EVERY}"),
        # An Inf becomes a NaN in the next layer, and in the backward pass.
        ("scanned", {}, "dot_general", f"NaN in loss; {LAYER}"),
        ("in_ops", {}, "mul in jaxtrain/ops/layers.py:N", f"NaN in loss; {EVERY}"),
        ("backward", {}, "mul", f"the loss is finite; {LAYER}"),
    ],
    ids=str,
)
def test_the_first_operation_is_named(kind: str, how: Any, operation: str, effects: str) -> None:
    origin = Examined(kind, **how)((3, 7))
    found = re.sub(r"layers.py:\d+", "layers.py:N", origin.text)
    assert origin.rows == (3, 7)
    assert found.startswith(
        f"the first NaN is computed at {line(kind)} ({operation}){UNLESS}{effects}"
    )


def test_an_inf_of_a_loss_is_named_beside_the_nan_of_its_gradients() -> None:
    found = Examined("looped")((3, 7)).text
    assert "; NaN in the gradient of first.bias, first.kernel" in found
    assert "; Inf in loss;" in found


def test_a_nan_that_is_masked_may_be_named() -> None:
    found = Examined("where")((3, 7)).text
    assert found.startswith(
        f"the first NaN is computed at {line('where')} (log){UNLESS}Inf in loss"
    )
    fine = Examined("where")()
    assert fine.text.startswith("not reproduced: ")
    assert (fine.rows, fine.is_reproduced) == ((), False)


def test_an_inf_without_a_nan() -> None:
    def inf(array: jax.Array) -> jax.Array:
        return array * 1e30

    found = Examined("fine")(first__kernel=inf)
    assert found.text == "no NaN, but Inf in loss; Inf in the gradient of scale"
    assert found.rows == (0, 1, 2)  # all of them


def test_a_model_with_a_shard_map_of_the_program_is_examined() -> None:
    """As on GPUs: checkify cannot continue after a ``shard_map`` that follows another operation."""
    with per_device.tracing(platform="gpu"):
        found = Examined("with_shard_map", data=2, fsdp=2)((6,))
    assert found.rows == (6,)
    assert found.text.startswith(f"the first NaN is computed at {line('with_shard_map')} (div)")


def test_a_norm_that_overflows() -> None:
    found = Examined("large")()
    assert found.rows == ()
    assert found.text.startswith(
        "the gradients are finite, but their norm is not: the gradient of first."
    )


def test_a_parameter_with_nan() -> None:
    found = Examined("fine")(scale=lambda array: array.at[0, 2].set(jnp.nan))
    assert found.text.startswith(
        "NaN in the parameter scale before the step: an earlier step computed"
    )


def test_an_example_with_nan() -> None:
    def planted(x_BH: np.ndarray) -> np.ndarray:
        return np.where(np.arange(ROWS)[:, None] == 5, np.nan, x_BH).astype(np.float32)

    assert Examined("fine")(x=planted) == Origin("NaN is in the batch's x", (5,))


def test_an_installed_model_is_not_part_of_a_library() -> None:
    standard = sysconfig.get_path("stdlib")
    assert nan_origin._never_a_model(f"{standard}/contextlib.py")
    assert nan_origin._never_a_model(jax.numpy.__file__)
    assert not nan_origin._never_a_model(f"{standard}/site-packages/mine/model.py")
    assert not nan_origin._never_a_model(__file__)


def test_a_checked_step_reports_the_arrays_with_nan_or_inf() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8)
    kept: list[str] = []

    def keep(state: Any, batch: Any, why: str) -> str:
        kept.append(why)
        return "jaxtrain find-nan out"

    stepper.compiled = nan_origin.checked(stepper.compiled, "--rate", keep)  # type: ignore[assignment]
    batch = toy.random_batch(stepper.spec)
    stepper(batch)
    stepper(batch)
    batch["x"][3] = np.nan
    with pytest.raises(InputError, match=r"step 3 \(examples from 32 on\).*train/loss") as raised:
        stepper(batch)
    (why,) = kept
    assert (
        str(raised.value) == f"{why}: lower --rate, or find the cause with: jaxtrain find-nan out"
    )


def test_parameters_that_the_optimizer_makes_nan_are_named() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8)
    batch = jax.device_put(toy.random_batch(stepper.spec), batch_sharding(stepper.rule.mesh))

    def broken(state: Any, batch: Any) -> Any:
        params = dict(state.params)
        params["blocks.0.up.bias"] = jnp.full_like(params["blocks.0.up.bias"], jnp.nan)
        return dataclasses.replace(state, params=params), {}

    assert nan_origin.of_update(broken, stepper.state, batch) == (
        "the gradients are finite, but the optimizer computes NaN in blocks.0.up.bias"
    )
    assert nan_origin.of_update(lambda *given: given, stepper.state, batch) == ""  # type: ignore[arg-type, return-value]
