"""Narrow Wan autoencoders from wider ones: what is kept, what is exact, what is refused."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import small_params
from models.wan import wan_weights

from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import wan_vae
from jaxtrain.models.wan import network, slicing
from jaxtrain.models.wan.network import Architecture, Version
from jaxtrain.training.state import ModelDefinition

NARROW = {
    name: dataclasses.replace(one, width=2, decoder_width=2)
    for name, one in wan_weights.NARROW.items()
}
WIDE = {name: dataclasses.replace(one, width=4, decoder_width=4) for name, one in NARROW.items()}


def parameters(sizes: Architecture) -> dict[str, np.ndarray]:
    """Returns random parameters; norms that are near 0 would enlarge the error of rounding."""
    table, shapes = network.table(sizes, decodes=True)
    params = table.inward(wan_weights.tensors(sizes), shapes, "x", "y")
    gammas = {name: 1 + 0.2 * array for name, array in params.items() if name.endswith("gamma")}
    return params | gammas


def wirings(sizes: Architecture) -> list[Any]:
    parts = {"encoder": network.Encoder, "decoder": network.Decoder}
    return [
        slicing._Wiring(name, jax.eval_shape(functools.partial(part, sizes)), sizes)
        for name, part in parts.items()
    ]


def widened(
    params: dict[str, np.ndarray], narrow: Architecture, wide: Architecture
) -> dict[str, np.ndarray]:
    """Returns a network twice as wide that computes the same.

    Each unit has a copy, in random order; what reads both divides its kernel between them.
    """
    rng = np.random.default_rng(1)
    result = dict(params)
    for theirs in wirings(wide):
        sources = {}
        for tie in theirs.ties:
            units = theirs.units(tie)
            sources[tie] = rng.permutation(np.repeat(np.arange(units // 2), 2))

        def channels(space: Any, sources: Any = sources) -> np.ndarray:
            return space.channels(sources[space.tie])

        for path, conv in theirs.convs.items():
            kernel, bias = params[f"{path}.kernel"], params[f"{path}.bias"]
            kernel = kernel.reshape(*kernel.shape[:2], conv.frames, -1, kernel.shape[3])
            if path in theirs.reads:
                index = channels(theirs.reads[path])
                shares = rng.uniform(0.2, 0.8, len(index)).astype(np.float32)
                sums = np.bincount(index, shares)[index].astype(np.float32)
                kernel = kernel[..., index, :] * (shares / sums)[:, None]
            if writes := theirs.writes.get(path):
                part = kernel.shape[-1] // len(writes)
                index = np.concatenate([n * part + channels(s) for n, s in enumerate(writes)])
                kernel, bias = kernel[..., index], bias[index]
            result[f"{path}.kernel"] = kernel.reshape(*kernel.shape[:2], -1, kernel.shape[-1])
            result[f"{path}.bias"] = bias
        for path in theirs.norms:
            result[f"{path}.gamma"] = params[f"{path}.gamma"][channels(theirs.reads[path])]
        for path in theirs.attentions:  # twice the channels: twice the sum, over a larger root
            space = theirs.writes[f"{path}.to_qkv"][0]
            count = len(channels(space))
            for name in ("kernel", "bias"):
                array = result[f"{path}.to_qkv.{name}"].copy()
                array[..., :count] /= np.sqrt(2).astype(np.float32)
                result[f"{path}.to_qkv.{name}"] = array
    return result


@functools.cache
def compiled() -> Any:
    def run(module: Any, video: jax.Array, latents: jax.Array) -> Any:
        return module.encode(video, jnp.float32), wan_weights.decode(module, latents, None)

    return jax.jit(run)


def computed(sizes: Architecture, params: dict[str, np.ndarray]) -> Any:
    """Returns the latents of a clip of 5 frames, and the frames of other latents."""
    count = sizes.latent_channels
    statistics = {
        "latents_mean": np.zeros(count, np.float32),
        "latents_std": np.ones(count, np.float32),
    }
    module = wan_weights.filled(sizes, params | statistics)
    rng = np.random.default_rng(2)
    video = jnp.asarray(rng.random((1, 5, 32, 32, 3), np.float32))
    latents = rng.standard_normal((1, 2, 4, 4, count), np.float32)
    return compiled()(module, video, jnp.asarray(latents))


def same(given: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert given.keys() == wanted.keys()
    for name, array in given.items():
        assert array.tobytes() == wanted[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("version", NARROW)
def test_a_network_with_copies_of_channels_is_sliced_without_a_loss(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each pair is kept, so that the result computes the same, up to rounding."""
    narrow, wide = NARROW[version], WIDE[version]
    params = parameters(narrow)
    copied = widened(params, narrow, wide)
    seen = slicing._observed(wide, copied, {w.name: w for w in wirings(wide)})
    monkeypatch.setattr(slicing, "_observed", lambda *given: seen)  # compiles for a minute
    found = slicing.sliced(wide, narrow, copied)
    latents, frames = computed(narrow, params)
    for sizes, other in ((wide, copied), (narrow, found)):
        others = computed(sizes, other)
        np.testing.assert_allclose(others[0], latents, atol=1e-3 * np.abs(latents).max())
        np.testing.assert_allclose(others[1], frames, atol=1e-3 * np.abs(frames).max())

    # The same channels, but nothing absorbs the others.
    bare = slicing.sliced(wide, narrow, copied, rebuild=False)
    assert np.abs(computed(narrow, bare)[0] - latents).max() > 0.1 * np.abs(latents).max()
    # By norm, it may keep both of a pair.
    by_norm = slicing.sliced(wide, narrow, copied, choice="norm")
    shapes = {name: array.shape for name, array in params.items()}
    assert {name: array.shape for name, array in by_norm.items()} == shapes

    # A part of equal width is what it was.
    half = dataclasses.replace(narrow, width=wide.width)
    found = slicing.sliced(wide, half, copied)
    for name, array in found.items():
        equal = array.tobytes() == copied[name].tobytes()
        assert equal or name.startswith("decoder."), name
    assert found["decoder.conv_in.bias"].shape == params["decoder.conv_in.bias"].shape


@pytest.mark.parametrize("version", NARROW)
def test_equal_widths_change_no_bit(version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicing, "_observed", None)  # nothing runs
    params = parameters(WIDE[version]) | {"adversary.kernel": np.ones(3, np.float32)}
    same(slicing.sliced(WIDE[version], WIDE[version], params), params)


@pytest.mark.parametrize("version", NARROW)
def test_every_layer_has_spaces_of_its_sizes(version: Version) -> None:
    """All but colors and latents; what is added or skipped has one tie."""
    sizes = network.VERSIONS[version]
    for wiring in wirings(sizes):
        ends = {f"{wiring.name}.{end}" for end in ("conv_in", "conv_out", "quant_conv")}
        ends |= {f"{wiring.name}.post_quant_conv"}
        assert {*wiring.convs} - ends <= wiring.reads.keys() & wiring.writes.keys()
        assert {*wiring.norms} <= wiring.reads.keys()
        for path, conv in wiring.convs.items():
            if path in wiring.reads:
                space = wiring.reads[path]
                count = wiring.units(space.tie) * space.per * conv.frames
                assert conv.kernel.shape[2] == count, path
            if writes := wiring.writes.get(path):
                total = sum(wiring.units(space.tie) * space.per for space in writes)
                assert conv.kernel.shape[3] == total, path
    encoder, decoder = wirings(sizes)
    if version == "wan2.2":  # one stream, of 160 to 640 channels
        assert encoder.reads["encoder.conv_out"] == ("encoder", 4)
        assert encoder.units("encoder") == 160
        assert decoder.reads["decoder.up_blocks.3.resnets.0.conv1"] == ("decoder", 1)
        assert decoder.units("decoder") == 512
    else:
        assert encoder.reads["encoder.conv_out"].per == decoder.units("decoder") / 384 == 1


def test_the_chosen_channels_rebuild_the_others() -> None:
    """Of three independent channels and their sums, three are enough."""
    rng = np.random.default_rng(0)
    free = rng.standard_normal((1000, 3))
    mixed = np.concatenate([free, free @ rng.standard_normal((3, 5)) * 10], axis=1)
    products = mixed.T @ mixed
    kept = slicing._best(8, 3, [slicing._Reader(1, products, np.eye(8))])
    every = slicing._rebuilding(products, kept, True)
    np.testing.assert_allclose(mixed[:, kept] @ every, mixed, atol=1e-4)
    pairs = slicing._best(4, 2, [slicing._Reader(2, products, np.eye(8))])
    every = slicing._rebuilding(products, slicing.Space("", 2).channels(pairs), True)
    np.testing.assert_allclose(
        mixed[:, (pairs[:, None] * 2 + [0, 1]).ravel()] @ every, mixed, atol=1e-4
    )


def model(**changes: Any) -> wan_vae.Config:
    return dataclasses.replace(wan_vae.Config.tiny(), version="wan2.1", **changes)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder of diffusers, a run, and a weights file, of one network."""
    tmp_path = tmp_path_factory.mktemp("sources")
    stored = model()
    params = small_params.random_params(stored)
    huggingface.write_diffusers(tmp_path / "vae", stored, params)
    small_params.write_run(tmp_path / "run", stored, 8, params)
    weights.save(tmp_path / "x.safetensors", stored, params)
    return [tmp_path / name for name in ("vae", "run", "x.safetensors")]


def test_a_run_starts_from_a_slice_of_any_source(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def sliced(theirs: Architecture, ours: Architecture, params: Any) -> Any:
        given.append((theirs.decoder_width, ours.decoder_width, params))
        return small_params.random_params(narrow)

    monkeypatch.setattr(slicing, "sliced", sliced)
    narrow = model(decoder_width=6, freeze=("encoder",))
    for source in sources:
        found, notes = weights.params_for(source, narrow, ModelDefinition(narrow.build).params)
        assert notes == ["sliced: the kept channels rebuild the others"]
        same(found, small_params.random_params(narrow))
        assert given[-1][:2] == (8, 6)
        same(given[-1][2], given[0][2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_width": 12},
            r"^model.decoder_width=12 is above the 8 of .*: set --model.decoder_width 8, or less$",
        ),
        (
            {"encoder_width": 6, "freeze": ("decoder.conv_in", "encoder")},
            r"^model.encoder_width=6 slices the encoder of .*, of width 8, but model.freeze=encoder"
            r" would never .*: set --model.encoder_width 8, or --model.freeze without it$",
        ),
        ({"decoder_width": 6, "latents_mean": (1.0,) * 4}, r"with model.latents_mean=.* 0.0\)"),
        ({"decoder_width": 6, "version": "wan2.2"}, r"with model.version=wan2.1|misshapen"),
    ],
)
def test_other_widths_are_refused(
    sources: list[Path], changes: dict[str, Any], message: str
) -> None:
    narrow = dataclasses.replace(model(), **changes)
    expected = ModelDefinition(narrow.build).params
    for source in sources:
        with pytest.raises(InputError, match=message):
            weights.params_for(source, narrow, expected)


def test_widths_that_are_not_uniform_are_refused(tmp_path: Path) -> None:
    """Such as blocks that are narrower inside, which diffusers cannot load either."""
    stored = model()
    params = small_params.random_params(stored)
    inside = "decoder.mid_block.resnets.0.conv1.kernel"
    params[inside] = params[inside][..., :16]
    small_params.write_run(tmp_path / "run", stored, 8, params)
    narrow = model(decoder_width=6)
    expected = ModelDefinition(narrow.build).params
    message = (
        rf"misshapen: {inside} .* instead of .*\. Slice a source with the widths of its config$"
    )
    with pytest.raises(InputError, match=message):
        weights.params_for(tmp_path / "run", narrow, expected)
