"""Where the first NaN of a step is computed, and which losses and gradients are NaN/Inf."""

import dataclasses
import re
import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import toy
from training.diagnosis.faulty import ROWS, WIDTH, Config, line

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.ops import per_device
from jaxtrain.sharding import ShardingRule, batch_sharding, replicated
from jaxtrain.training.diagnosis import nan_origin
from jaxtrain.training.diagnosis.nan_origin import Origin
from jaxtrain.training.state import ModelDefinition
from jaxtrain.training.step import build_gradients


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

    def broken(state: Any, batch: Any, scalars: Any) -> Any:
        params = dict(state.params)
        params["blocks.0.up.bias"] = jnp.full_like(params["blocks.0.up.bias"], jnp.nan)
        return dataclasses.replace(state, params=params), {}

    assert nan_origin.of_update(broken, stepper.state, batch, stepper.scalars()) == (
        "the gradients are finite, but the optimizer computes NaN in blocks.0.up.bias"
    )

    def same(state: Any, batch: Any, scalars: Any) -> Any:
        return state, {}

    assert nan_origin.of_update(same, stepper.state, batch, stepper.scalars()) == ""
