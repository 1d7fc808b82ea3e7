"""The step: the same numbers on any mesh, in any sharding mode, with any accumulation."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from jaxtrain import config
from jaxtrain.training.state import bytes_per_device


def recording() -> optax.GradientTransformation:
    """Changes nothing and keeps the gradients in its state, for a test to look at."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


@functools.cache
def recorder(model: Any, batch_size: int, **how: Any) -> toy.Stepper:
    """A step of ``model`` that records gradients; compiled once for all tests."""
    return toy.stepper(model, optimizer=recording(), batch_size=batch_size, **how)


def gradients(model: Any, batch: dict[str, np.ndarray], **how: Any) -> tuple[float, Any]:
    """Loss and gradients of one step, computed as ``how`` says."""
    stepper = recorder(model, len(batch["weight"]), **how)
    loss = stepper(batch)["loss"]
    return loss, {name: np.asarray(grad) for name, grad in stepper.state.opt.items()}


def assert_same_gradients(left: Any, right: Any) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-5)
    # A gradient that is zero but for rounding (a key's bias, say) has no digits to compare: the
    # floor is what rounding leaves of the largest gradient.
    largest = max(np.linalg.norm(grad) for grad in right[1].values())
    for name, grad in right[1].items():
        distance = np.linalg.norm(left[1][name] - grad)
        assert distance <= 1e-5 * np.linalg.norm(grad) + 1e-7 * largest, name


def video_batch(spec: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = spec["weight"].shape[0]
    return {
        "video": rng.integers(0, 256, spec["video"].shape).astype(np.uint8),
        "augment": np.tile(np.float32([1.1, 0.9, 1.05, 0.02, 0.5]), (rows, 1)),
        "weight": np.ones(rows, np.float32),
    }


def mlm_batch(spec: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, length = spec["tokens"].shape
    slots = spec["positions"].shape[1]
    tokens = rng.integers(5, 50, (rows, length)).astype(np.int32)
    weights = (rng.random((rows, slots)) < 0.7).astype(np.float32)
    weights[: rows // 2] = 1  # rows, and so microbatches and devices, weigh differently
    return {
        "tokens": tokens,
        "positions": np.stack([rng.permutation(length)[:slots] for _ in range(rows)]).astype(
            np.int32
        ),
        "targets": rng.integers(5, 50, (rows, slots)).astype(np.int32),
        "target_weights": weights,
        "weight": np.ones(rows, np.float32),
    }


def tiny(name: str) -> Any:
    """The model of a shipped config, small enough for a test and without dropout."""
    small = config.named(name).model.tiny()
    # One layer: a second doubles what XLA compiles and shows nothing more here.
    return dataclasses.replace(small, layers=1, dropout=0.0) if name.startswith("mlm") else small


MODELS = {
    "toy": (toy.Config(), toy.random_batch),
    "mlm": (tiny("mlm_h200_8"), mlm_batch),
    "video_ae": (tiny("h100_16"), video_batch),
}


@functools.cache
def reference(name: str, rows: int) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the whole batch on one device."""
    return gradients(*example_of(name, rows))


def example_of(name: str, rows: int = 16) -> tuple[Any, dict[str, np.ndarray]]:
    """A small model and a batch for it."""
    model, batch = MODELS[name]
    return model, batch(model.batch_spec(rows))


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG) if name == "video_ae" else name for name in MODELS]
)
def test_eight_devices_give_the_gradients_of_one(name: str) -> None:
    model, batch = example_of(name)
    assert_same_gradients(gradients(model, batch, fsdp=8), reference(name, 16))


def test_eight_devices_give_the_parameters_of_one() -> None:
    """After one update, to a hundredth of the learning rate (AdamW divides by tiny gradients)."""
    model, batch = example_of("toy")
    one, eight = toy.stepper(model), toy.stepper(model, fsdp=8)
    one(batch)
    eight(batch)
    for path, array in one.params().items():
        np.testing.assert_allclose(
            eight.params()[path], array, atol=1e-2 * toy.OPTIM.peak_lr, rtol=0, err_msg=path
        )


@pytest.mark.parametrize("shard", ["params", "optimizer", "none"])
@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_mode_gives_the_same_gradients(
    shard: str, data: int, fsdp: int, accumulate: int
) -> None:
    model, batch = example_of("toy", rows=32)
    how = {"data": data, "fsdp": fsdp, "shard": shard, "accumulate": accumulate}
    assert_same_gradients(gradients(model, batch, **how), reference("toy", 32))


@pytest.mark.parametrize("name", ["toy", "mlm"])
def test_four_microbatches_give_the_gradients_of_one_batch(name: str) -> None:
    """Also where microbatches weigh differently, as those of both models' batches do."""
    model, batch = example_of(name)
    assert_same_gradients(gradients(model, batch, accumulate=4), reference(name, 16))


def test_a_microbatch_takes_every_ath_row_of_each_device() -> None:
    """Rows m::A of a device's part; so no row travels."""
    from jaxtrain.training.step import _microbatches

    mesh = toy.mesh_of(1, 4)
    rows = jnp.arange(24)
    parts = jax.jit(lambda x: _microbatches(x, 3, mesh))(rows)
    for device in range(4):
        own = np.arange(24)[6 * device : 6 * device + 6]
        for number in range(3):
            np.testing.assert_array_equal(
                parts[number, 2 * device : 2 * device + 2], own[number::3]
            )


def collectives(text: str) -> list[tuple[str, str]]:
    """(kind, result types) of each collective of a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("toy", "params"),
        ("mlm", "params"),
        # The golden plan of h100_16 (tests/gpu_programs) counts what that model gathers.
        pytest.param("video_ae", "params", marks=LONG),
        pytest.param("mlm", "optimizer", marks=pytest.mark.slow),
    ],
)
def test_only_parameters_are_gathered(name: str, shard: str) -> None:
    """No activation travels: what is gathered has a parameter's shape, whole."""
    stepper = recorder(example_of(name)[0], 16, fsdp=8, shard=shard)
    shapes = {tuple(array.shape) for array in stepper.definition.params.values()}
    found = collectives(stepper.compiled.as_text())
    gathered = [types for types, kind in found if kind == "all-gather"]
    assert gathered, "nothing is gathered: the parameters are not sharded"
    for types in gathered:
        for dimensions in re.findall(r"\w+\[([\d,]*)\]", types):
            shape = tuple(int(size) for size in dimensions.split(",") if size)
            assert shape in shapes or math.prod(shape) < 64, types
    assert not [kind for _, kind in found if kind in ("all-to-all", "collective-permute")]


@pytest.mark.parametrize("shard", ["params", "optimizer", "none"])
def test_the_whole_state_is_donated(shard: str) -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8, shard=shard)
    memory = stepper.compiled.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_per_device(stepper.target)


def test_sharded_state_is_an_eighth_on_each_device() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8)
    for array in stepper.state.params.values():
        assert array.addressable_shards[0].data.size * 8 == array.size
    moments = [leaf for leaf in jax.tree.leaves(stepper.state.opt) if leaf.ndim]
    assert moments
    assert all(leaf.addressable_shards[0].data.size * 8 == leaf.size for leaf in moments)


def test_bfloat16_computes_close_and_keeps_float32_state() -> None:
    model, batch = example_of("toy")
    exact, rough = toy.stepper(model), toy.stepper(model, fsdp=8, precision="bfloat16")
    assert rough(batch)["loss"] == pytest.approx(exact(batch)["loss"], rel=0.02)
    assert rough(batch)["loss"] != exact(batch)["loss"]
    assert {leaf.dtype for leaf in jax.tree.leaves(rough.state.params)} == {jnp.dtype("float32")}


def test_a_step_counts_updates_and_examples() -> None:
    model, batch = example_of("toy")
    stepper = toy.stepper(model)
    stepper(batch)
    stepper(batch)
    assert (int(stepper.state.step), int(stepper.state.examples_seen)) == (2, 32)


def test_randomness_is_a_function_of_the_examples_seen() -> None:
    """Dropout differs from step to step, and comes again where the same examples come again."""
    model = dataclasses.replace(tiny("mlm_h200_8"), dropout=0.5)
    batch = mlm_batch(model.batch_spec(16))
    stepper = toy.stepper(model, optimizer=recording())  # which leaves the parameters alone
    first, second = stepper(batch)["loss"], stepper(batch)["loss"]
    assert first != second
    back = dataclasses.replace(stepper.state, examples_seen=jnp.uint32(0))
    stepper.state = jax.device_put(back, jax.tree.map(lambda leaf: leaf.sharding, stepper.target))
    assert stepper(batch)["loss"] == first


@pytest.mark.slow
def test_microbatches_draw_the_numbers_of_the_whole_batch() -> None:
    """Chance belongs to an example, not to how many are computed at once."""
    model = dataclasses.replace(tiny("mlm_h200_8"), dropout=0.5)
    batch = mlm_batch(model.batch_spec(16))
    whole, parts = gradients(model, batch), gradients(model, batch, accumulate=4, fsdp=4)
    assert_same_gradients(parts, whole)


def test_clipping_limits_the_norm_and_the_record_shows_it_unclipped() -> None:
    model, batch = example_of("toy")
    batch = batch | {"y": 1000 * batch["y"]}
    found = toy.stepper(model)(batch)
    assert found["grad_norm"] > 10 * toy.OPTIM.max_grad_norm
