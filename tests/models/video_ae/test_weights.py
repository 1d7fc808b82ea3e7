"""Tests every variant against the reference: numbers, streaming, import and export."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.models.reconstruction import streaming
from jaxtrain.training.state import ModelDefinition

FIXTURES = (
    "taehv_base",
    "taehv_base_ragged",
    "taehv_cogvideox_even",
    "taehv_patch2_z32",
    "taehv_super_patch2_z48",
    "taehv_patch4_z128_time8",  # the first 16 of the 21 frames that the reference was given
    "taehv_h3",
)
_TRIM = {True: "odd_latents", False: "always"}


def reference_values(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Draws the weights used for the reference's outputs: noise seeded by each name."""
    found = {}
    for name, shape in shapes.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        noise = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
        scale = 0.1 if len(shape) == 1 else 1.1 / np.sqrt(np.prod(shape[1:]))
        if name == "decoder.22.weight":
            scale = 0.25 / np.sqrt(np.prod(shape[1:]))
        found[name] = (noise * scale + (0.5 if name == "decoder.22.bias" else 0)).astype(np.float32)
    return found


class Reference:
    """A fixture's arrays, its config, and our module with its weights."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.arrays = {key: file[key] for key in file}
        given = json.loads(str(self.arrays["kwargs"]))
        self.shapes: dict[str, list[int]] = json.loads(str(self.arrays["params"]))
        self.trim = "h3" if given.get("is_h3") else _TRIM[given["is_cogvideox"]]
        _, frames, height, width, _ = self.arrays["video_nthwc"].shape
        self.config = video_ae.Config(
            frames=frames,
            height=height,
            width=width,
            patch_size=given.get("patch_size", 1),
            latent_channels=given.get("latent_channels", 16),
            decoder=given.get("arch_variant", "base"),
            trim=self.trim,
            time_downscale=tuple(given.get("encoder_time_downscale", (True, True, False))),
        )
        self.tensors = reference_values(self.shapes)
        self.params = self.config.from_weights(self.tensors, path.name)
        self.definition = ModelDefinition(self.config.build)
        self.module = self.definition.module(jax.tree.map(jnp.asarray, self.params), {})
        self.encode = jitted(self.module, lambda m, x: m.encode(x))
        self.decode = jitted(self.module, lambda m, x: m.decode(x))


@pytest.fixture(scope="module", params=FIXTURES)
def reference(request: pytest.FixtureRequest, checkout: Path) -> Reference:
    return Reference(checkout / f"tests/fixtures/{request.param}.npz")


@pytest.fixture(scope="module")
def base(checkout: Path) -> Reference:
    return Reference(checkout / "tests/fixtures/taehv_base.npz")


def jitted(module: Any, function: Any) -> Any:
    graph, state = nnx.split(module)
    compiled = jax.jit(lambda s, x: function(nnx.merge(graph, s), x))
    return lambda x: np.asarray(compiled(state, x))


def close(found: Any, wanted: Any, atol: float) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)


def streamed(module: video_ae.VideoAutoencoder, video: np.ndarray) -> tuple[Any, Any]:
    """Returns latents and frames from the streams, and when each was ready."""
    encoder = streaming.EncoderStream(module)
    latents = [encoder.push(jnp.asarray(video[:, i])) for i in range(video.shape[1])]
    ready = [number for number, latent in enumerate(latents, 1) if latent is not None]
    factor = module.timing.factor
    if module.timing.chunked:  # 3 of a chunk's 5 latents wait for the next chunk
        assert ready == [1, 5, 18, 19, 20, 21, 22]
    else:
        assert ready == list(range(factor, video.shape[1] + 1, factor))
    last = list(iter(encoder.flush, None))
    assert len(last) == (0 if module.timing.chunked else -(-video.shape[1] // factor) - len(ready))
    code = [latent for latent in (*latents, *last) if latent is not None]
    decoder = streaming.DecoderStream(module, latents=len(code))
    frames = [decoder.push(latent) for latent in code]
    return jnp.stack(code, axis=1), jnp.concatenate(frames, axis=1)


@pytest.mark.slow
def test_clips_match_the_reference(reference: Reference) -> None:
    latents, decoded = reference.arrays["latent_nthwc"], reference.arrays["decoded_nthwc"]
    close(reference.encode(reference.arrays["video_nthwc"]), latents, 2e-5)
    close(np.clip(reference.decode(latents), 0, 1), decoded, 2e-5)


# Every rule of trimming and both decoders; the rest of the networks stream alike.
STREAMED = ("taehv_base_ragged", "taehv_cogvideox_even", "taehv_super_patch2_z48")


@pytest.mark.slow
@pytest.mark.parametrize(
    "reference",
    [pytest.param(name, marks=[] if name in STREAMED else pytest.mark.long) for name in FIXTURES],
    indirect=True,
)
def test_streams_match_clips(reference: Reference) -> None:
    video, module = reference.arrays["video_nthwc"], reference.module
    latents = reference.encode(video)
    raw = reference.decode(latents)
    code, frames = streamed(module, video)
    close(np.asarray(code), latents, 1e-5)
    close(np.asarray(frames), raw, 1e-5)


def test_exported_names_shapes_and_values_are_those_imported(reference: Reference) -> None:
    out = reference.config.to_weights(reference.params)
    assert {name: list(array.shape) for name, array in out.items()} == reference.shapes
    assert [*out] == [*reference.shapes]  # in the reference's order too
    for name, array in out.items():
        np.testing.assert_array_equal(array, reference.tensors[name])
    assert set(reference.params) == set(reference.definition.params)


def test_the_config_is_inferred_from_the_weights(reference: Reference) -> None:
    name = {"odd_latents": "taecvx.pth", "h3": "taeh3.pth"}.get(reference.trim, "weights.pth")
    guessed = video_ae.Config.guess(reference.tensors, name)
    for field in ("patch_size", "latent_channels", "decoder", "trim", "pools", "grows"):
        assert getattr(guessed, field) == getattr(reference.config, field)
    with pytest.raises(InputError, match=r"x\.pth does not have weights of TAEHV: .* 1 arrays: a"):
        video_ae.Config.guess({"a": np.zeros(3)}, "x.pth")


@pytest.mark.slow
def test_exported_initial_weights_have_the_expected_spread(base: Reference) -> None:
    ours = base.config.to_weights(jax.device_get(base.definition.init(jax.random.key(0))[0]))
    for name, array in ours.items():
        if name == "decoder.22.bias":
            assert (array == 0.5).all()
        elif name.endswith(("bias", "conv.4.weight")):  # conv.4: a memory block's last one
            assert not array.any(), name
        else:
            bound = np.sqrt(3 / np.prod(array.shape[1:]))
            assert np.abs(array).max() <= bound, name
            assert array.std() == pytest.approx(bound / np.sqrt(3), rel=0.1), name


def test_a_stream_reports_that_it_needs_the_number_of_latents() -> None:
    config = video_ae.Config(
        frames=8, height=16, width=16, encoder_width=8, decoder_widths=(8,) * 4, trim="odd_latents"
    )
    module = config.build(nnx.Rngs(0))
    with pytest.raises(InputError, match="depends on the number of latents"):
        streaming.DecoderStream(module)
    stream = streaming.EncoderStream(module)
    for _ in range(4):  # after which no frame is pending
        stream.push(jnp.zeros((1, 16, 16, 3)))
    with pytest.raises(ValueError, match=r"\(1, 16, 24, 3\), the first one \(1, 16, 16, 3\)"):
        stream.push(jnp.zeros((1, 16, 24, 3)))
    stream.flush()
    stream.push(jnp.zeros((1, 16, 24, 3)))
