"""Tests three steps of the GPT with Muon, on one device and sharded over eight."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import optax
import pytest
from training import toy

from jaxtrain import config
from jaxtrain.cost import hlo
from jaxtrain.models import gpt
from jaxtrain.ops import chunked_loss
from jaxtrain.optim import build
from jaxtrain.optim.schedule import Schedule
from jaxtrain.sharding import ShardingRule
from jaxtrain.training import state, state_size

MODEL = dataclasses.replace(gpt.Config.tiny(), depth=1, width=32, kv_heads=1)
SETTINGS = dataclasses.replace(
    toy.OPTIM, b1=0.8, b2=0.95, eps=1e-10, weight_decay=0.0, muon=config.Muon()
)


# Of two layers, the middle one is the last, and backout would change nothing.
OF_2026 = gpt.Config.of_2026(
    vocab_size=50, sequence_length=256, depth=3, width=32, heads=4, kv_heads=2
)
SETTINGS_OF_2026 = dataclasses.replace(
    SETTINGS,
    weight_decay=0.28,
    max_grad_norm=None,
    muon=config.Muon(equilibrate=True, polar_express=True, variance_b2=0.9, cautious_decay=True),
)


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """The loss is computed in several chunks, of other sizes on other numbers of devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CHUNK_TOKENS", 64)
        yield


def settings_of(model: gpt.Config) -> config.Optim:
    return SETTINGS if model is MODEL else SETTINGS_OF_2026


def optimizer(
    data: int, fsdp: int, model: gpt.Config = MODEL
) -> optax.GradientTransformationExtraArgs:
    settings = config.Mesh(data=data, fsdp=fsdp, shard="params", min_shard_elements=1)
    rule = ShardingRule(toy.mesh_of(data, fsdp), settings)
    params = state.ModelDefinition(model.build).params
    return build.make_optimizer(
        settings_of(model), params, model.optimizer_groups(), rule, "float32"
    )


def batch(model: gpt.Config = MODEL) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (16, model.sequence_length)
    names = ("tokens", "targets", "target_bytes")
    drawn = {name: rng.integers(0, model.vocab_size, shape).astype(np.int32) for name in names}
    return drawn | {"weight": np.ones(16, np.float32)}


def trained(
    data: int, fsdp: int, model: gpt.Config = MODEL
) -> tuple[dict[str, np.ndarray], toy.Stepper]:
    """Returns each parameter's change over three steps, and the stepper that made it."""
    stepper = toy.stepper(
        model,
        data=data,
        fsdp=fsdp,
        optimizer=optimizer(data, fsdp, model),
        schedule=Schedule(settings_of(model), 100, model.optimizer_groups()),
    )
    before = stepper.params()
    for _ in range(3):
        stepper(batch(model))
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
    state_bytes = state_size.bytes_per_device(stepper.target)
    analysis = stepper.compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == state_bytes


@pytest.mark.slow
def test_four_devices_match_one_with_the_model_of_2026() -> None:
    """ZeRO-3, every array in shards."""
    want, (moved, _) = trained(1, 1, OF_2026)[0], trained(1, 4, OF_2026)
    assert {"value_embeds.2.table", "resid_lambdas", "smear.gate", "backout_lambda"} <= want.keys()
    for name, of_one in want.items():
        error = np.linalg.norm(moved[name] - of_one) / np.linalg.norm(of_one)
        assert error < 1e-3, (name, error)
