"""The discriminator: what trains what, what it keeps, and that it learns to correct."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config, optim, state
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae

SIDE, FRAMES, CLIPS, KEPT = 32, 12, 2, 8
SETTINGS = video_ae.Adversary(crop=16, replay=KEPT)
MODEL = dataclasses.replace(
    video_ae.Config.tiny(), frames=FRAMES, height=SIDE, width=SIDE, adversary=SETTINGS
)
WINDOWS = CLIPS * 3  # nine reconstructed frames of each clip


@pytest.fixture(scope="module")
def definition() -> state.Definition:
    return state.Definition(MODEL.build)


@pytest.fixture(scope="module")
def arrays(definition: state.Definition) -> tuple[state.Arrays, state.Arrays]:
    return jax.jit(definition.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def adversary(definition: state.Definition) -> Any:
    """(params, extras, real, fake, latents, key) -> outcome, extras; and its two gradients."""

    def outcome(params: Any, extras: Any, real: Any, fake: Any, latents: Any, key: Any) -> Any:
        module = definition.module(params, extras)
        keys = jax.random.split(key, real.shape[0])
        found = module.adversary(real, fake, latents, keys, jnp.float32)
        return found, definition.extras_of(module)

    def loss(part: str) -> Any:
        def value(params: Any, fake: Any, *others: Any) -> Any:
            found, _ = outcome(params, others[0], others[1], fake, *others[2:])
            return getattr(found, part).sum()

        return jax.jit(jax.grad(value, argnums=(0, 1)))

    return jax.jit(outcome), loss("decoder_B"), loss("discriminator")


def clips(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    real = jnp.asarray(rng.uniform(size=(CLIPS, 9, SIDE, SIDE, 3)), jnp.float32)
    latents = jnp.asarray(rng.normal(size=(CLIPS, 3, 4, 4, 4)), jnp.float32)
    return real, real.mean((2, 3), keepdims=True) + 0 * real, latents


def test_its_size_is_the_references() -> None:
    model = dataclasses.replace(MODEL, latent_channels=16)
    shapes = state.Definition(model.build).params
    own = [leaf.size for name, leaf in shapes.items() if name.startswith("adversary.")]
    assert sum(own) == 7_491_456


def test_each_loss_trains_its_own_part(adversary: Any, arrays: Any) -> None:
    params, extras = arrays
    real, fake, latents = clips()
    rest = (extras, real, latents, jax.random.key(1))
    _, of_decoder, of_discriminator = adversary
    weights, frames = of_decoder(params, fake, *rest)
    assert all(not np.any(grad) for grad in weights.values())
    assert np.any(frames)
    weights, frames = of_discriminator(params, fake, *rest)
    assert not np.any(frames)
    for name, grad in weights.items():
        assert np.any(grad) == name.startswith("adversary."), name


def test_the_decoder_is_drawn_along_the_correction(adversary: Any, arrays: Any) -> None:
    """A correction has a deviation of almost one, and the loss is its mean square."""
    params, extras = arrays
    real, fake, latents = clips()
    found, _ = adversary[0](params, extras, real, fake, latents, jax.random.key(1))
    assert 0.5 < np.asarray(found.decoder_B).mean() < 1.01
    _, frames = adversary[1](params, fake, extras, real, latents, jax.random.key(1))
    seen = np.asarray(frames)[np.abs(np.asarray(frames)) > 0]
    assert seen.size == CLIPS * 9 * 16 * 16 * 3  # the square that was cut out, of each frame


def test_it_keeps_what_it_saw(adversary: Any, arrays: Any) -> None:
    params, extras = arrays
    real, fake, latents = clips()
    assert int(extras["adversary.kept_count"]) == 0
    for number in range(3):
        _, extras = adversary[0](params, extras, real, fake + number, latents, jax.random.key(5))
        filled = np.any(np.asarray(extras["adversary.kept"], np.float32), axis=(1, 2, 3)).sum()
        assert filled == min((number + 1) * WINDOWS, KEPT)
    assert int(extras["adversary.kept_count"]) == 2 * KEPT
    newest = np.asarray(extras["adversary.kept"], np.float32).max((1, 2, 3)) > 2
    assert newest.sum() == WINDOWS
    mean = np.asarray(extras["adversary.discriminator.layers.0.mean"])
    assert np.any(mean != np.asarray(arrays[1]["adversary.discriminator.layers.0.mean"]))


def test_chance_is_a_function_of_the_keys(adversary: Any, arrays: Any) -> None:
    real, fake, latents = clips()
    one, again, other = (
        adversary[0](*arrays, real, fake, latents, jax.random.key(seed)) for seed in (1, 1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert float(one[0].discriminator) != float(other[0].discriminator)


def test_it_learns_to_tell_and_then_corrects(adversary: Any, arrays: Any) -> None:
    """Trained on grey fakes, a step along the correction brings them nearer to the real frames."""
    params, extras = arrays
    own = {name: array for name, array in params.items() if name.startswith("adversary.")}
    optimizer = optax.adam(1e-3)
    moments = optimizer.init(own)
    for number in range(25):
        real, fake, latents = clips(number)
        real = jnp.broadcast_to(jnp.where(jnp.arange(SIDE)[:, None] % 2, 0.9, 0.1), fake.shape[2:4])
        real = jnp.broadcast_to(real[None, None, :, :, None], fake.shape)
        fake = jnp.full_like(real, 0.5)
        key = jax.random.key(number)
        grads, _ = adversary[2](params, fake, extras, real, latents, key)
        found, extras = adversary[0](params, extras, real, fake, latents, key)
        updates, moments = optimizer.update({name: grads[name] for name in own}, moments)
        params = {**params, **optax.apply_updates({name: params[name] for name in own}, updates)}
    assert float(found.right) > 0.9
    _, toward = adversary[1](params, fake, extras, real, latents, key)
    step = -np.asarray(toward)
    seen = np.abs(step) > 0
    along = (step * np.asarray(real - fake))[seen].sum()
    assert (
        along / (np.linalg.norm(step[seen]) * np.linalg.norm(np.asarray(real - fake)[seen])) > 0.2
    )


def test_its_group_has_a_rate_and_a_clip_of_its_own(definition: state.Definition) -> None:
    run = config.named("h100_8")
    settings = dataclasses.replace(run.optim, warmup_steps=0, schedule="constant", peak_lr=1e-3)
    optimizer = optim.make(settings, 10, definition.params, MODEL.optimizer_groups())
    params = {name: jnp.ones(leaf.shape) for name, leaf in definition.params.items()}
    own = {name for name in params if name.startswith("adversary.discriminator.")}
    grads = {
        name: jnp.full(leaf.shape, 1e6 if name in own else 1e-3) for name, leaf in params.items()
    }
    updates, moments = optimizer.update(grads, optimizer.init(params), params)
    kernel, other = "adversary.discriminator.layers.0.kernel", "encoder.head.kernel"
    # AdamW's first step is the rate in size, and the decay's share of the parameter.
    assert float(updates[kernel].max()) == pytest.approx(-(3e-4 * 1.01), rel=1e-3)
    assert float(updates[other].max()) == pytest.approx(-(1e-3 * 1.01), rel=1e-3)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(moments))
    assert sizes == pytest.approx(2 * sum(leaf.size for leaf in params.values()), abs=10)
    # The first moment holds the clipped gradient: had they been clipped together, it were ~0.
    first = optax.tree.get_all_with_path(moments, "mu")
    found = {
        name: leaf for _, part in first for name, leaf in part.items() if hasattr(leaf, "size")
    }
    total = np.sqrt(sum(float((leaf**2).sum()) for name, leaf in found.items() if name not in own))
    unclipped = 1e-3 * np.sqrt(sum(leaf.size for name, leaf in params.items() if name not in own))
    assert total == pytest.approx(0.1 * min(1.0, unclipped), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": 20}, r"model.adversary.crop=20: use a multiple of 8 up to 32"),
        ({"crop": 40}, r"up to 32"),
        ({"frames": 10}, r"model.adversary.frames=10: a clip of model.frames=12 has 9"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(MODEL, adversary=dataclasses.replace(SETTINGS, **changes))
    with pytest.raises(InputError, match=r"model.adversary.replay=0"):
        video_ae.Adversary(replay=0)
