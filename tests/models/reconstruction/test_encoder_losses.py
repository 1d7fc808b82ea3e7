"""Losses of an encoder that learns a teacher's latents, prepared ones here."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.video_ae.small_autoencoder import batch
from training import toy

from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.training.state import ModelDefinition

TEACHER = video_ae.Teacher(encoder_weight=0.5, error="absolute", encoder_feature_weight=2.0)
MODEL = dataclasses.replace(
    video_ae.Config.tiny(), height=32, width=32, freeze=("decoder",), teacher=TEACHER
)


@pytest.mark.parametrize("decode", [False, True])
def test_features_of_the_frozen_decoder_train_the_encoder(decode: bool) -> None:
    """With the reconstruction through the frozen decoder, unless that decodes the teacher's."""
    model = dataclasses.replace(MODEL, teacher=dataclasses.replace(TEACHER, decode=decode))
    definition = ModelDefinition(model.build, model.freeze)
    params = toy.stirred(jax.jit(definition.init)(jax.random.key(0))[0])
    clips, keys = (
        batch(MODEL) | {"weight": jnp.float32([1, 3])},
        jax.random.split(jax.random.key(0), 2),
    )

    def loss_of(trained: Any, name: str) -> Any:
        module = definition.module({**params, **trained}, {})
        total, _, sums = module.loss(clips, keys)
        latents = module.encode(clips["video"] / 255.0), clips["latents"]
        return sums[name][0], (total, sums, latents, [*map(module.first_features, latents)])

    @jax.jit
    def gradients(trained: Any) -> Any:
        features, (total, sums, *rest) = jax.grad(loss_of, has_aux=True)(
            trained, "encoder_feature_loss"
        )
        colors, _ = jax.grad(loss_of, has_aux=True)(trained, "reconstruction_loss")
        return features, colors, total, sums, *rest

    features, colors, total, sums, latents, outputs = gradients(definition.trained(params))
    assert all(np.any(grad) for grad in features.values())
    assert any(np.any(grad) for grad in colors.values()) is not decode
    assert not [name for name in features if not name.startswith("encoder.")]
    weight_B = clips["weight"]
    for name, pair in (("encoder_loss", latents), ("encoder_feature_loss", outputs)):
        difference = np.abs(np.asarray(pair[0]) - np.asarray(pair[1]))
        if name == "encoder_feature_loss":
            difference = difference[:, :, 1:3, 1:3]
        wanted = (difference.mean((1, 2, 3, 4)) * weight_B).sum()
        assert sums[name][0] == pytest.approx(float(wanted), rel=1e-4), name
    weights_of = {"reconstruction_loss": 20, "encoder_loss": 0.5, "encoder_feature_loss": 2}
    terms = sum(factor * float(sums[name][0]) for name, factor in weights_of.items())
    assert total == pytest.approx(terms, rel=1e-5)


def test_an_error_in_the_border_changes_nothing() -> None:
    definition = ModelDefinition(MODEL.build, MODEL.freeze)
    params = toy.stirred(jax.jit(definition.init)(jax.random.key(0))[0])
    module, clips = definition.module(params, {}), batch(MODEL)

    @jax.jit
    def of(error_hw: Any) -> Any:
        out = module._outputs(clips["video"] / 255.0, clips)
        planted = out._replace(features=[out.features[0] + error_hw.reshape(1, 1, 4, 4, 1)])
        total, _ = module._losses(planted, clips, clips["weight"].sum())
        return total

    inside = np.zeros((4, 4), np.float32)
    inside[1:3, 1:3] = 100
    before = of(np.zeros((4, 4), np.float32))
    assert of(100 - inside) == before
    assert of(inside) > before + 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze": ()}, r"encoder_feature_weight=2.0 .* set --model.freeze decoder, and"),
        ({"height": 16}, r"nothing is left of 2x4 latents: use .* at least 24 pixels"),
    ],
)
def test_what_it_requires(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(MODEL, **fields)
