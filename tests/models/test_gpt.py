"""Tests the GPT: its attention mask, the sizes derived from depth, and nanochat's numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import small_causal
from models.small_causal import Nanochat, batch

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import gpt
from jaxtrain.optim import build
from jaxtrain.optim.schedule import Schedule
from jaxtrain.training import state

TINY = dataclasses.replace(gpt.Config.tiny(), kv_heads=1)


@pytest.fixture(scope="module")
def graph_and_params() -> tuple[Any, Any]:
    return small_causal.stirred(TINY)


def test_a_position_sees_itself_and_earlier_positions(graph_and_params: tuple[Any, Any]) -> None:
    """Checks the gradient of each position's output with respect to each position's input."""
    graph, params = graph_and_params

    def through(x_BSD: jax.Array) -> jax.Array:
        module = nnx.merge(graph, params)
        cos, sin = gpt.attention.rotary(x_BSD.shape[1], TINY.head_width, 10_000.0)
        for block in module.blocks:
            x_BSD = block(x_BSD, cos, sin)
        return module.lm_head.logits(module.wte, x_BSD)[0, :, :5]

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, TINY.sequence_length, TINY.hidden)), jnp.float32)
    slopes = np.abs(jax.jit(jax.jacrev(through))(x)[:, :, 0]).max((1, 3))
    allowed = np.tril(np.ones_like(slopes, bool))
    assert (slopes[allowed] > 1e-8).all()
    assert (slopes[~allowed] == 0).all()


def test_ignored_targets_do_not_count(graph_and_params: tuple[Any, Any]) -> None:
    evaluate = jax.jit(lambda b: nnx.merge(*graph_and_params).evaluate(b))
    whole = batch(TINY)
    ignored = {**whole, "targets": whole["targets"].at[:, 5].set(-1)}
    assert evaluate(ignored)["loss"][1] == evaluate(whole)["loss"][1] - 4
    assert set(evaluate(whole)) == {"loss", "accuracy", "bits_per_byte"}


# ---- sizes derived from depth -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "width", "heads", "millions"),
    [(12, 768, 6, 185.6), (16, 1024, 8, 335.5), (20, 1280, 10, 561.0), (24, 1536, 12, 880.8)],
)
def test_depth_sets_the_size(depth: int, width: int, heads: int, millions: float) -> None:
    model = gpt.Config(vocab_size=65_536, sequence_length=2048, depth=depth)
    assert (model.hidden, model.query_heads, model.shared_heads) == (width, heads, heads)
    module = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))
    assert count == 2 * 65_536 * width + 12 * depth * width**2
    assert round(count / 1e6, 1) == millions
    said = " ".join(model.notes())
    for words in (f"width {width} (64 x depth)", f"{heads} query heads", f"parameters {count:,} ("):
        assert words in said


@pytest.mark.parametrize("depth", range(1, 40))
def test_every_depth_has_heads_that_fused_attention_supports(depth: int) -> None:
    model = gpt.Config(vocab_size=50, sequence_length=128, depth=depth)
    assert model.query_heads * model.head_width == model.hidden
    assert model.head_width % 8 == 0
    assert model.head_width <= 128


def test_initial_values() -> None:
    model = dataclasses.replace(TINY, width=128, heads=2, vocab_size=500)
    params, _ = state.ModelDefinition(model.build).init(jax.random.key(0))
    want = {"wte.table": 1.0, "lm_head.words": 0.0, "blocks.0.out": 0.0, "blocks.0.down": 0.0}
    want |= {f"blocks.0.{name}": 128**-0.5 for name in ("q", "up")}
    want |= {f"blocks.0.{name}": 0.5**0.5 * 128**-0.5 for name in ("k", "v")}  # half as wide
    for name, deviation in want.items():
        assert np.std(params[name]) == pytest.approx(deviation, rel=0.05), name


def test_each_parameter_is_in_exactly_one_group() -> None:
    names = state.ModelDefinition(TINY.build).params
    for name in names:
        owners = [g for g in TINY.optimizer_groups().values() if name.startswith(g.prefix)]
        assert len(owners) == 1, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"model.heads=3 must divide model.width=16 .*: use 2"),
        ({"heads": 16}, r"model.heads=16 must divide .*: use 8"),
        ({"kv_heads": 3}, r"model.kv_heads=3 must divide the 2 query heads .* use 2"),
        ({"width": 0}, r"model.width=0: use at least 1, or None"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **changes)


# ---- nanochat's numbers (see the fixtures) ------------------------------------------------------


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter of the reference."""
    return small_causal.normal(name, shape) * (1.0 if "wte" in name else 0.9 / shape[1] ** 0.5)


@pytest.fixture(scope="module")
def reference(checkout: Path) -> Nanochat:
    """Results of nanochat at c75fe54 for a model of two layers."""
    path = checkout / "tests/fixtures/gpt_d2_mha.npz"
    return Nanochat(path, gpt.Config, drawn)


def test_logits_loss_and_gradients_match_nanochat(reference: Nanochat) -> None:
    module, want = reference.definition.module(reference.params, {}), reference.arrays
    logits = jax.jit(lambda p, t: reference.definition.module(p, {}).logits(t))(
        reference.params, reference.batch["tokens"]
    )
    assert module.blocks[0].sizes.heads == 2
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=2e-5)
    loss, ours, theirs = reference.loss_and_gradients()
    assert loss == pytest.approx(float(want["loss"]), abs=2e-5)
    assert len(theirs) == 4
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() < 2e-5 * np.abs(array).max(), name


def test_three_steps_match_nanochat(reference: Nanochat) -> None:
    settings = config.Optim(
        peak_lr=1.0,
        schedule="constant",
        warmup_steps=0,
        b1=0.8,
        b2=0.95,
        eps=1e-10,
        weight_decay=0.0,
        max_grad_norm=None,
        muon=config.Muon(momentum_steps=0),
    )
    groups = reference.model.optimizer_groups()
    optimizer = build.make_optimizer(settings, reference.definition.params, groups)
    update = jax.jit(optimizer.update)
    params, want = reference.params, reference.arrays
    opt, losses = optimizer.init(params), []
    for number in range(4):
        loss, grads = reference.gradient(params)
        losses.append(float(loss))
        if number < 3:
            scalars = Schedule(settings, 10, groups).at(number)
            updates, opt = update(grads, opt, params, scalars=scalars)
            params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(losses, want["losses"], rtol=0.01)  # bfloat16 in Muon
    found = reference.model.to_weights(jax.device_get(params))
    names = [name for name in want if name.startswith("after3/")]
    assert len(names) == 4
    for name in names:
        own = name.removeprefix("after3/")
        moved = want[name] - reference.weights[own]
        assert np.linalg.norm(found[own] - want[name]) < 0.06 * np.linalg.norm(moved), name


def test_exported_weights_are_imported_unchanged(reference: Nanochat) -> None:
    found = reference.model.to_weights(reference.params)
    assert found.keys() == reference.weights.keys()
    for name, array in reference.weights.items():
        np.testing.assert_array_equal(found[name], array)
    guessed = gpt.Config.guess(reference.weights, "x")
    assert (guessed.depth, guessed.hidden, guessed.vocab_size, guessed.heads) == (2, 64, 199, None)
    wide = dataclasses.replace(TINY, depth=1, width=256, heads=2, kv_heads=1)
    params = {n: np.zeros(a.shape) for n, a in state.ModelDefinition(wide.build).params.items()}
    guessed = gpt.Config.guess(wide.to_weights(params), "x")
    assert (guessed.query_heads, guessed.kv_heads, guessed.hidden) == (2, 1, 256)
    with pytest.raises(InputError, match=r"it has no lm_head.weight"):
        gpt.Config.guess({"stranger": np.zeros(3)}, "there.pt")


def test_depths_of_2026_have_heads_of_128_as_in_nanochat() -> None:
    sizes = {}
    for depth in (12, 13, 15, 24, 25):
        model = gpt.Config.of_2026(vocab_size=64, sequence_length=128, depth=depth)
        sizes[depth] = (model.hidden, model.query_heads)
    assert sizes == {12: (768, 6), 13: (896, 7), 15: (1024, 8), 24: (1536, 12), 25: (1664, 13)}
    text = " ".join(gpt.Config.of_2026(vocab_size=64, sequence_length=128, depth=13).notes())
    assert "width 896 (64 x depth, up to a multiple of 128)" in text
    assert gpt.Config(vocab_size=64, sequence_length=128, depth=3).hidden == 192
