"""Tests the discriminator: which loss trains which part, replay, and learned corrections."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import config
from jaxtrain.checkpoint.restore import named
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.models.reconstruction import adversary
from jaxtrain.optim import build
from jaxtrain.optim.schedule import Schedule
from jaxtrain.training import run_summary, state

SIDE, FRAMES, CLIPS, KEPT = 32, 12, 2, 8
SETTINGS = video_ae.Adversary(crop=16, replay=KEPT)
MODEL = dataclasses.replace(
    video_ae.Config.tiny(), frames=FRAMES, height=SIDE, width=SIDE, adversary=SETTINGS
)
WINDOWS = CLIPS * 3  # nine reconstructed frames per clip


class SmallAdversary:
    """A model's arrays, and the adversary of it as functions of them."""

    def __init__(self) -> None:
        self.definition = state.ModelDefinition(MODEL.build)
        self.params, self.extras = jax.jit(self.definition.init)(jax.random.key(0))
        # The gradients of parameters and fakes, and the outcome with the updated extras.
        self.of_decoder, self.of_discriminator = (
            jax.jit(jax.grad(functools.partial(self._loss, term), (0, 1), has_aux=True))
            for term in ("decoder_B", "discriminator")
        )

    def judge(self, *given: Any) -> tuple[Any, Any]:
        """Returns the outcome and the updated extras."""
        return self.of_decoder(*given)[1]

    def _loss(
        self, term: str, params: Any, fake: Any, extras: Any, real: Any, latents: Any, key: Any
    ) -> tuple[Any, Any]:
        module = self.definition.module(params, extras)
        keys = jax.random.split(key, real.shape[0])
        found = module.adversary(real, fake, latents, keys, jnp.float32)
        return getattr(found, term).sum(), (found, self.definition.extras_of(module))


@pytest.fixture(scope="module")
def small() -> Iterator[SmallAdversary]:
    """Uses fewer channels, which saves time and does not change the behavior."""
    with pytest.MonkeyPatch.context() as patched:
        narrow = tuple((side, stride, 16) for side, stride, _ in adversary._LAYERS)
        patched.setattr(adversary, "_LAYERS", narrow)
        yield SmallAdversary()


def clips(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    real = jnp.asarray(rng.uniform(size=(CLIPS, 9, SIDE, SIDE, 3)), jnp.float32)
    latents = jnp.asarray(rng.normal(size=(CLIPS, 3, 4, 4, 4)), jnp.float32)
    return real, real.mean((2, 3), keepdims=True) + 0 * real, latents


def test_the_parameter_count_is_the_references() -> None:
    model = dataclasses.replace(MODEL, latent_channels=16)
    shapes = state.ModelDefinition(model.build).params
    own = [leaf.size for name, leaf in shapes.items() if name.startswith("adversary.")]
    assert sum(own) == 7_491_456


@pytest.mark.slow
def test_each_loss_trains_its_own_part(small: SmallAdversary) -> None:
    real, fake, latents = clips()
    given = (small.params, fake, small.extras, real, latents, jax.random.key(1))
    (weights, frames), _ = small.of_decoder(*given)
    assert all(not np.any(grad) for grad in weights.values())
    assert np.any(frames)
    (weights, frames), _ = small.of_discriminator(*given)
    assert not np.any(frames)
    for name, grad in weights.items():
        assert np.any(grad) == name.startswith("adversary."), name


def test_the_decoder_gradient_points_along_the_correction(small: SmallAdversary) -> None:
    """The correction has a standard deviation of almost one; the loss is its mean square."""
    real, fake, latents = clips()
    given = (small.params, fake, small.extras, real, latents, jax.random.key(1))
    (_, frames), (found, _) = small.of_decoder(*given)
    assert 0.5 < np.asarray(found.decoder_B).mean() < 1.01
    seen = np.asarray(frames)[np.abs(np.asarray(frames)) > 0]
    assert seen.size == CLIPS * 9 * 16 * 16 * 3  # the square cropped from each frame


def test_seen_windows_enter_the_replay_buffer(small: SmallAdversary) -> None:
    """Each window of a batch fills one slot; the remaining slots stay empty."""
    real, fake, latents = clips()
    extras = small.extras
    assert not np.any(extras["adversary.replay.filled"])
    for number in range(3):
        key = jax.random.key(5)
        _, extras = small.judge(small.params, fake + number, extras, real, latents, key)
        filled = np.asarray(extras["adversary.replay.filled"])
        assert filled.tolist() == [True] * WINDOWS + [False] * (KEPT - WINDOWS)
        kept = np.asarray(extras["adversary.replay.images"], np.float32)[:WINDOWS]
        assert ((kept.min((1, 2, 3)) > number) & (kept.max((1, 2, 3)) < number + 1)).all()
    mean = "adversary.discriminator.layers.0.mean"
    assert np.any(np.asarray(extras[mean]) != np.asarray(small.extras[mean]))


def test_randomness_depends_only_on_the_keys(small: SmallAdversary) -> None:
    real, fake, latents = clips()
    one, again, other = (
        small.judge(small.params, fake, small.extras, real, latents, jax.random.key(seed))
        for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert float(one[0].discriminator) != float(other[0].discriminator)


def test_before_it_begins_it_does_nothing(small: SmallAdversary) -> None:
    """From then on, it does what it always does."""
    real, fake, latents = clips()
    key = jax.random.key(1)

    @jax.jit
    def outcome_of(begun: jax.Array) -> Any:
        module = small.definition.module(small.params, small.extras)
        given = real, fake, latents, jax.random.split(key, CLIPS), jnp.float32
        return module.adversary.once_begun(begun, *given), small.definition.extras_of(module)

    outcome, extras = outcome_of(jnp.array(False))
    assert not any(map(np.any, outcome))
    jax.tree.map(np.testing.assert_array_equal, extras, small.extras)
    begun, extras = outcome_of(jnp.array(True))
    outcome, wanted = small.judge(small.params, fake, small.extras, real, latents, key)
    for found, expected in zip(begun, outcome, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for name, array in wanted.items():
        np.testing.assert_allclose(np.float32(extras[name]), np.float32(array), atol=1e-4)


@pytest.mark.parametrize(
    ("start", "ramp", "shares"),
    [(0, 0, [None] * 6), (2, 0, [0, 0, 1, 1, 1, 1]), (1, 4, [0, 0.25, 0.5, 0.75, 1, 1])],
)
def test_the_weight_rises_from_its_first_step(start: int, ramp: int, shares: list[Any]) -> None:
    loss = video_ae.Adversary(start_step=start, ramp_steps=ramp)
    found = [loss.weight_fraction({"step": jnp.full(3, done, jnp.uint32)}) for done in range(6)]
    assert [None if share is None else float(share) for share in found] == shares
    assert loss.weight_fraction({}) is None  # validations
    if any(shares):
        full = 1 + next(done for done, share in enumerate(shares) if share == 1)
        assert loss.begins() == [
            f"model.adversary begins in step {start + 1}, with all of its weight in {full}"
        ]


def test_a_dead_discriminator_raises_the_alarm_once(small: SmallAdversary) -> None:
    real, fake, latents = clips()
    dead = {
        name: jnp.zeros_like(array) if name.endswith(".head") else array
        for name, array in small.params.items()
    }
    outcome, _ = small.judge(dead, fake, small.extras, real, latents, jax.random.key(1))
    said: list[str] = []
    results = run_summary.Results(0, said.append)

    def steps(count: int, right: float) -> None:
        for _ in range(count):
            results.add({"train/discriminator_accuracy": right})

    steps(2000, 0.0)  # it has not begun
    steps(499, float(outcome.right))
    assert said == []
    steps(501, float(outcome.right))
    assert [line[:73] for line in said] == [
        "warning: the discriminator's accuracy has been below 55% for 500 steps; i"
    ]
    steps(499, 0.99)
    steps(1, 0.9)
    steps(499, 0.99)
    assert len(said) == 1
    steps(1, 0.99)
    assert "above 98% for 500 steps; it is always right: lower --model.adv" in said[-1]


@pytest.mark.slow
def test_a_trained_discriminator_corrects(small: SmallAdversary) -> None:
    """After training on gray fakes, a correction moves them toward the real frames."""
    params, extras = small.params, small.extras
    own = {name: array for name, array in params.items() if name.startswith("adversary.")}
    optimizer = optax.adam(3e-3)
    moments = optimizer.init(own)
    stripes = jnp.where(jnp.arange(SIDE) % 2, 0.9, 0.1).reshape(1, 1, -1, 1, 1)
    real = jnp.broadcast_to(stripes, (CLIPS, 9, SIDE, SIDE, 3))
    fake, latents = jnp.full_like(real, 0.5), clips()[2]
    for number in range(40):
        given = (params, fake, extras, real, latents, jax.random.key(number))
        (grads, _), (found, extras) = small.of_discriminator(*given)
        updates, moments = optimizer.update({name: grads[name] for name in own}, moments)
        params = {**params, **optax.apply_updates({name: params[name] for name in own}, updates)}
    assert float(found.right) > 0.9
    (_, away), _ = small.of_decoder(params, fake, extras, real, latents, jax.random.key(99))
    step, wanted = -np.asarray(away), np.asarray(real - fake)
    seen = np.abs(step) > 0
    cosine = (step * wanted)[seen].sum() / np.linalg.norm(step[seen]) / np.linalg.norm(wanted[seen])
    assert cosine > 0.2


def test_the_group_has_its_own_learning_rate_and_no_gradient_clipping() -> None:
    run = config.named("h100_8")
    settings = dataclasses.replace(run.optim, warmup_steps=0, schedule="constant", peak_lr=1e-3)
    kernel, other = "adversary.discriminator.layers.0.kernel", "encoder.head.kernel"
    params = {name: jnp.ones((4, 3)) for name in (kernel, other)} | {
        "encoder.head.bias": jnp.ones(3)
    }
    groups = MODEL.optimizer_groups()
    optimizer = build.make_optimizer(settings, params, groups)
    grads = {
        name: jnp.full(leaf.shape, 1e6 if name == kernel else 1e-3) for name, leaf in params.items()
    }
    scalars = Schedule(settings, 10, groups).at(0)
    updates, moments = optimizer.update(grads, optimizer.init(params), params, scalars=scalars)
    late = MODEL.optimizer_groups() | {
        "adversary": dataclasses.replace(groups["adversary"], start_step=3)
    }
    rates = [Schedule(settings, 10, late).at(done)["adversary"].rate for done in range(5)]
    assert rates == [0, 0, 0, 3e-4, 3e-4]
    # AdamW's first step has the size of the learning rate, plus weight decay.
    assert float(updates[kernel].max()) == pytest.approx(-(3e-4 * 1.01), rel=1e-3)
    assert float(updates[other].max()) == pytest.approx(-(1e-3 * 1.01), rel=1e-3)
    assert sum(leaf.size for leaf in jax.tree.leaves(moments)) == pytest.approx(2 * 27, abs=8)
    # The first moment is a tenth of the gradient; clipping the other's with it would give ~1e-10.
    first = named(moments)
    (name,) = [name for name in first if name.endswith(f"mu.{other}")]
    np.testing.assert_allclose(first[name], 1e-4, rtol=1e-3)
    (name,) = [name for name in first if name.endswith(f"mu.{kernel}")]
    np.testing.assert_allclose(first[name], 1e5, rtol=1e-3)


def test_a_window_has_no_more_frames_than_a_clip() -> None:
    short = dataclasses.replace(MODEL, frames=4)  # of which one is reconstructed
    assert nnx.eval_shape(lambda: short.build(nnx.Rngs(0))).adversary.frames == 1


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"model.adversary.crop=20: use a multiple of 8 up to 32"):
        dataclasses.replace(MODEL, adversary=dataclasses.replace(SETTINGS, crop=20))
    with pytest.raises(InputError, match=r"model.adversary.replay=0"):
        video_ae.Adversary(replay=0)
    with pytest.raises(InputError, match=r"encoder_weight=nan"):
        video_ae.Teacher(encoder_weight=float("nan"))
