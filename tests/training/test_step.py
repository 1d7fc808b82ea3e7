"""The step computes the same on any mesh, in any sharding mode, with any accumulation."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import toy

from jaxtrain import config
from jaxtrain.training.state_size import bytes_per_device


@functools.cache
def recorder(model: Any, batch_size: int, **how: Any) -> toy.Stepper:
    """Returns a step of ``model`` that records gradients; compiled once for all tests."""
    return toy.stepper(model, optimizer=toy.recording(), batch_size=batch_size, **how)


def gradients(model: Any, batch: dict[str, np.ndarray], **how: Any) -> tuple[float, Any]:
    """Returns the loss and gradients of one step with the options ``how``."""
    stepper = recorder(model, len(batch["weight"]), **how)
    loss = stepper(batch)["loss"]
    return loss, {name: np.asarray(grad) for name, grad in stepper.state.opt.items()}


def assert_same_gradients(left: Any, right: Any) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-5)
    # A gradient that is zero except for rounding (such as a key's bias) has no digits to compare:
    # the tolerance is the rounding error of the largest gradient.
    largest = max(np.linalg.norm(grad) for grad in right[1].values())
    for name, grad in right[1].items():
        distance = np.linalg.norm(left[1][name] - grad)
        assert distance <= 1e-5 * np.linalg.norm(grad) + 1e-7 * largest, name


def video_batch(spec: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = spec["weight"].shape[0]
    return {
        "video": rng.integers(0, 256, spec["video"].shape).astype(np.uint8),
        "weight": np.ones(rows, np.float32),
    }


def mlm_batch(spec: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, length = spec["tokens"].shape
    slots = spec["positions"].shape[1]
    tokens = rng.integers(5, 50, (rows, length)).astype(np.int32)
    weights = (rng.random((rows, slots)) < 0.7).astype(np.float32)
    weights[: rows // 2] = 1  # examples, and so microbatches and devices, have different weights
    documents = np.sort(rng.integers(1, 4, (rows, length)), 1).astype(np.int32)
    return ({"segments": documents} if "segments" in spec else {}) | {
        "tokens": tokens,
        "positions": np.stack([rng.permutation(length)[:slots] for _ in range(rows)]).astype(
            np.int32
        ),
        "targets": rng.integers(5, 50, (rows, slots)).astype(np.int32),
        "target_weights": weights,
        "weight": np.ones(rows, np.float32),
    }


def tiny(name: str) -> Any:
    """Returns the model of a shipped config, reduced to a small size and without dropout."""
    small = config.named(name).model.tiny()
    # One layer: a second one doubles the compilation and tests nothing more.
    changes: dict[str, Any] = {"layers": 1, "dropout": 0.0} if name.startswith("mlm") else {}
    # A global and a local layer.
    changes |= {"layers": 2} if name.startswith("ettin") else {}
    return dataclasses.replace(small, **changes)


MODELS = {
    "toy": (toy.Config(), toy.random_batch),
    "mlm": (tiny("mlm_h200_8"), mlm_batch),
    "modern_bert": (tiny("ettin_150m_h100_8"), mlm_batch),
    "video_ae": (tiny("h100_16"), video_batch),
    "wan_vae": (tiny("wan2_2_decoder_h100_8"), video_batch),
}


@functools.cache
def reference(name: str, rows: int) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the loss and gradients of the full batch on one device."""
    return gradients(*example_of(name, rows))


def example_of(name: str, rows: int = 16) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a small model and a batch for it."""
    model, batch = MODELS[name]
    return model, batch(model.batch_spec(rows))


LONG = [pytest.mark.long]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG) if name.endswith("ae") else name for name in MODELS]
)
def test_eight_devices_give_the_gradients_of_one(name: str) -> None:
    model, batch = example_of(name)
    assert_same_gradients(gradients(model, batch, fsdp=8), reference(name, 16))


@pytest.mark.parametrize(
    ("shard", "data", "fsdp", "accumulate"),
    [
        *(("params", 1, 8, 2), ("params", 2, 4, 1), ("optimizer", 1, 8, 1), ("optimizer", 2, 4, 2)),
        *(("none", 1, 8, 1), ("none", 2, 4, 2)),
    ],
)
def test_every_mode_gives_the_same_gradients(
    shard: str, data: int, fsdp: int, accumulate: int
) -> None:
    model, batch = example_of("toy", rows=32)
    how = {"data": data, "fsdp": fsdp, "shard": shard, "accumulate": accumulate}
    assert_same_gradients(gradients(model, batch, **how), reference("toy", 32))


@pytest.mark.parametrize("name", ["toy", "mlm"])
def test_four_microbatches_give_the_gradients_of_one_batch(name: str) -> None:
    """The microbatches of both models have different weights."""
    model, batch = example_of(name)
    assert_same_gradients(gradients(model, batch, accumulate=4), reference(name, 16))


def test_a_microbatch_has_every_nth_example_of_each_device() -> None:
    """Microbatch m has examples m::A of each device's part, so none is communicated."""
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
    """Returns (result types, kind) of each collective of a compiled step."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("toy", "params"),
        ("mlm", "params"),
        ("modern_bert", "params"),
        # The golden plan of h100_16 (tests/gpu_programs) counts the all-gathers of that model.
        pytest.param("video_ae", "params", marks=LONG),
        pytest.param("mlm", "optimizer", marks=pytest.mark.slow),
    ],
)
def test_only_parameters_are_gathered(name: str, shard: str) -> None:
    """No activation is communicated: each gathered array has the full shape of a parameter."""
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
def test_the_entire_state_is_donated(shard: str) -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8, shard=shard)
    memory = stepper.compiled.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_per_device(stepper.target)


def test_each_device_has_an_eighth_of_a_sharded_state() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=8)
    for array in stepper.state.params.values():
        assert array.addressable_shards[0].data.size * 8 == array.size
    moments = [leaf for leaf in jax.tree.leaves(stepper.state.opt) if leaf.ndim]
    assert moments
    assert all(leaf.addressable_shards[0].data.size * 8 == leaf.size for leaf in moments)


def test_bfloat16_is_close_and_keeps_the_state_in_float32() -> None:
    model, batch = example_of("toy")
    exact, rough = toy.stepper(model), toy.stepper(model, fsdp=8, precision="bfloat16")
    assert rough(batch)["loss"] == pytest.approx(exact(batch)["loss"], rel=0.02)
    assert rough(batch)["loss"] != exact(batch)["loss"]
    assert {leaf.dtype for leaf in jax.tree.leaves(rough.state.params)} == {jnp.dtype("float32")}


def test_randomness_is_a_function_of_the_examples_seen() -> None:
    """Dropout differs between steps, and repeats if the same examples repeat."""
    model = dataclasses.replace(tiny("mlm_h200_8"), dropout=0.5)
    batch = mlm_batch(model.batch_spec(16))
    stepper = toy.stepper(model, optimizer=toy.recording())  # does not change the parameters
    first, second = stepper(batch)["loss"], stepper(batch)["loss"]
    assert first != second
    back = dataclasses.replace(stepper.state, examples_seen=jnp.uint32(0))
    stepper.state = jax.device_put(back, jax.tree.map(lambda leaf: leaf.sharding, stepper.target))
    assert stepper(batch)["loss"] == first


@pytest.mark.slow
def test_microbatches_have_the_random_numbers_of_the_full_batch() -> None:
    """Randomness depends on the example, not on the size of the microbatch."""
    model = dataclasses.replace(tiny("mlm_h200_8"), dropout=0.5)
    batch = mlm_batch(model.batch_spec(16))
    whole, parts = gradients(model, batch), gradients(model, batch, accumulate=4, fsdp=4)
    assert_same_gradients(parts, whole)


def test_the_recorded_gradient_norm_is_that_before_clipping() -> None:
    model, batch = example_of("toy")
    batch = batch | {"y": 1000 * batch["y"]}
    found = toy.stepper(model)(batch)
    assert found["grad_norm"] > 10 * toy.OPTIM.max_grad_norm
