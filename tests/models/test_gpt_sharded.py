"""Tests three steps of the GPT with Muon, on one device and sharded over eight."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toy

from jaxtrain import config
from jaxtrain.models import gpt
from jaxtrain.optim import build
from jaxtrain.sharding import ShardingRule
from jaxtrain.training import state
from jaxtrain.xla import hlo

MODEL = dataclasses.replace(gpt.Config.tiny(), depth=1, width=32, kv_heads=1)
SETTINGS = dataclasses.replace(
    toy.OPTIM, b1=0.8, b2=0.95, eps=1e-10, weight_decay=0.0, muon=config.Muon()
)


def optimizer(data: int, fsdp: int) -> optax.GradientTransformation:
    settings = config.Mesh(data=data, fsdp=fsdp, shard="params", min_shard_elements=1)
    rule = ShardingRule(toy.mesh_of(data, fsdp), settings)
    params = state.ModelDefinition(MODEL.build).params
    return build.make_optimizer(SETTINGS, 100, params, MODEL.optimizer_groups(), rule, "float32")


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (16, MODEL.sequence_length)
    names = ("tokens", "targets", "target_bytes")
    drawn = {name: rng.integers(0, MODEL.vocab_size, shape).astype(np.int32) for name in names}
    return drawn | {"weight": np.ones(16, np.float32)}


def trained(data: int, fsdp: int) -> tuple[dict[str, np.ndarray], toy.Stepper]:
    """Returns each parameter's change over three steps, and the stepper that made it."""
    stepper = toy.stepper(MODEL, data=data, fsdp=fsdp, optimizer=optimizer(data, fsdp))
    before = stepper.params()
    for _ in range(3):
        stepper(batch())
    return {name: array - before[name] for name, array in stepper.params().items()}, stepper


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    return trained(1, 1)[0]


@pytest.mark.slow
def test_eight_devices_match_one(alone: dict[str, np.ndarray]) -> None:
    moved, stepper = trained(2, 4)
    for name, want in alone.items():
        error = np.linalg.norm(moved[name] - want) / np.linalg.norm(want)
        assert error < 1e-3, (name, error)
    found = hlo.collectives(stepper.compiled.as_text(), 8)
    assert "all-to-all" in {one.kind for one in found}  # each complete matrix goes to one device
    state_bytes = state.bytes_per_device(stepper.target)
    analysis = stepper.compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == state_bytes


def test_the_state_has_one_buffer_for_matrices_and_two_for_the_rest() -> None:
    definition = state.ModelDefinition(MODEL.build)
    rule = ShardingRule(toy.mesh_of(1, 8), config.Mesh(data=1, fsdp=8, shard="params"))
    target = state.abstract_state(definition, optimizer(1, 8), rule)
    elements = {name: int(np.prod(array.shape)) for name, array in definition.params.items()}
    matrices = sum(size for name, size in elements.items() if name.startswith("blocks."))
    floats = [leaf for leaf in jax.tree.leaves(target.opt) if leaf.dtype == np.float32]
    assert sum(leaf.size for leaf in floats) == 2 * sum(elements.values()) - matrices
