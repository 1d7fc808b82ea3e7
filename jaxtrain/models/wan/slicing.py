"""Narrow Wan autoencoders that start as a slice of a wider one.

Each layer keeps the channels that best rebuild the others, and its kernel absorbs the linear
rebuild of those that are dropped, as Flash-VAED prunes (2026). Both follow from what the source's
layers read when it reconstructs synthetic clips, so a slice needs no data.

Channels belong to *spaces*. What is added has one space: the stream of the residual blocks of a
stage, or both frames and the first frame of an upsampler. The skips of 2.2 connect streams of
different widths: channel 0 of one is channels 0 and 1 of another. Such spaces have one *tie*, whose
units are kept or dropped as a whole; a space has `per` channels of each.

Colors and latents are never sliced.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.wan import network
from jaxtrain.models.wan.network import Architecture, Conv, Norm
from jaxtrain.models.weight_table import Tensors

Choice = Literal["rebuild", "norm"]
_NOISE = 1e-7  # of a layer's mean square: what rounding leaves of channels that are rebuilt
_RIDGE = 1e-9  # likewise: for channels that are always 0
_FRAMES = 9
_LATENTS = 8  # along a side of a clip
_PIXELS_PER_CHANNEL = 4  # of the deepest layers, which see the fewest
_CLIPS = 8  # at least
_DISCS = 80


class Space(NamedTuple):
    """Channels of one or several layers that are kept alike.

    Attributes:
        tie: name of the units, which several spaces may share.
        per: channels per unit.
    """

    tie: str
    per: int = 1

    def channels(self, units: np.ndarray) -> np.ndarray:
        """Returns the channels of units, in the order of the units."""
        return (units[:, None] * self.per + np.arange(self.per)).ravel()


class _Wiring:
    """The spaces that the layers of an encoder or decoder read and write.

    Attributes:
        convs: dotted path -> layer.
        norms: dotted path -> layer.
        reads: dotted path -> space of the input; colors and latents have none.
        writes: dotted path -> spaces of equal parts of the output; none likewise.
    """

    def __init__(self, name: str, coder: Any, sizes: Architecture) -> None:
        self.name = name
        layers = {
            ".".join(map(str, (name, *path))): layer for path, layer in nnx.iter_modules(coder)
        }
        self.convs = {path: layer for path, layer in layers.items() if isinstance(layer, Conv)}
        self.norms = {path: layer for path, layer in layers.items() if isinstance(layer, Norm)}
        self.reads: dict[str, Space] = {}
        self.writes: dict[str, tuple[Space, ...]] = {}
        self.attentions: list[str] = []
        # The last skip of 2.2's decoder is to half the channels.
        x = Space(name, 2 if name == "decoder" and sizes.residual else 1)
        self.writes[f"{name}.conv_in"] = (x,)
        if name == "decoder":
            x = self._block(f"{name}.mid_block", coder.mid_block, x)
        encoder = name == "encoder"
        down_or_up = f"{name}.down_blocks" if encoder else f"{name}.up_blocks"
        for number, block in enumerate(coder.down_blocks if encoder else coder.up_blocks):
            x = self._block(f"{down_or_up}.{number}", block, x)
        if name == "encoder":
            x = self._block(f"{name}.mid_block", coder.mid_block, x)
        self.reads |= dict.fromkeys((f"{name}.norm_out", f"{name}.conv_out"), x)

    def units(self, tie: str) -> int:
        """Returns the number of units of a tie."""
        for path, conv in self.convs.items():
            for space in self.writes.get(path, ()):
                if space.tie == tie:
                    channels = conv.bias.shape[0] // len(self.writes[path])
                    return int(channels // space.per)
        raise KeyError(tie)

    @property
    def ties(self) -> list[str]:
        """Returns the names of the ties, in the order of the network."""
        return list(dict.fromkeys(s.tie for spaces in self.writes.values() for s in spaces))

    def _block(self, path: str, block: Any, x: Space) -> Space:
        """Adds a block that reads a space; returns the space that it writes."""
        match block:
            case network.ResidualBlock():
                hidden = Space(path)
                out = x if block.conv_shortcut is None else Space(f"{path}.conv_shortcut")
                self.reads |= dict.fromkeys((f"{path}.norm1", f"{path}.conv1"), x)
                self.reads |= dict.fromkeys((f"{path}.norm2", f"{path}.conv2"), hidden)
                self.writes |= {f"{path}.conv1": (hidden,), f"{path}.conv2": (out,)}
                if out != x:
                    self.reads[f"{path}.conv_shortcut"] = x
                    self.writes[f"{path}.conv_shortcut"] = (out,)
                return out
            case network.Attention():
                scores, values = Space(f"{path}.scores"), Space(f"{path}.values")
                self.reads |= dict.fromkeys((f"{path}.norm", f"{path}.to_qkv"), x)
                self.reads[f"{path}.proj"] = values
                self.writes |= {f"{path}.to_qkv": (scores, scores, values), f"{path}.proj": (x,)}
                self.attentions.append(path)
                return x
            case network.Middle():
                x = self._block(f"{path}.resnets.0", block.resnets[0], x)
                x = self._block(f"{path}.attentions.0", block.attentions[0], x)
                return self._block(f"{path}.resnets.1", block.resnets[1], x)
            case network.Down() | network.Up():
                return self._resize(path, block, x, Space(path))
        input_space, resnets = x, block.resnets
        for number, resnet in enumerate(resnets):
            x = self._block(f"{path}.resnets.{number}", resnet, x)
        if isinstance(block, network.UpBlock) and block.upsamplers:
            return self._block(f"{path}.upsamplers.0", block.upsamplers[0], x)
        down = isinstance(block, network.DownBlock)
        resize = block.downsampler if down else block.upsampler
        if resize is None:
            return x
        inputs = resnets[0].norm1.gamma.shape[0]
        out = Space(input_space.tie, input_space.per * block.outputs // inputs)  # the skip's
        return self._resize(f"{path}.{'down' if down else 'up'}sampler", resize, x, out)

    def _resize(self, path: str, layer: Any, x: Space, out: Space) -> Space:
        self.reads[f"{path}.resample"], self.writes[f"{path}.resample"] = x, (out,)
        if layer.time_conv is not None:  # the first frame of a video skips it
            down = isinstance(layer, network.Down)
            self.reads[f"{path}.time_conv"] = out if down else x
            self.writes[f"{path}.time_conv"] = (out,) if down else (x, x)
        return out


def sliced(
    theirs: Architecture,
    ours: Architecture,
    params: Tensors,
    *,
    choice: Choice = "rebuild",
    rebuild: bool = True,
) -> dict[str, np.ndarray]:
    """Returns the parameters of a narrow network that computes nearly what a wider one computes.

    Args:
        ours: sizes of the result, of the same version, with widths that are not above.
        params: dotted path -> array of the source. A part of equal width is returned unchanged, and
            so are other arrays.
        choice: which channels are kept: those that rebuild the others best, weighted by what each
            reading layer makes of them, or those whose filters have the largest norm.
        rebuild: whether the kernels absorb the dropped channels.
    """
    result = {name: np.asarray(array) for name, array in params.items()}
    widths = {
        "encoder": (theirs.width, ours.width),
        "decoder": (theirs.decoder_width, ours.decoder_width),
    }
    narrow = {name for name, (wide, width) in widths.items() if width < wide}
    if not narrow:
        return result
    coders = {"encoder": network.Encoder, "decoder": network.Decoder}
    wirings = {
        name: _Wiring(name, nnx.eval_shape(lambda build=build: build(theirs)), theirs)
        for name, build in coders.items()
    }
    if "decoder" not in narrow:
        del wirings["decoder"]
    statistics = _observed(theirs, params, wirings)
    for name in narrow:
        wide, width = widths[name]
        result |= _sliced(wirings[name], params, statistics, (width, wide), choice, rebuild)
    return result


def _sliced(
    wiring: _Wiring,
    params: Tensors,
    statistics: Mapping[str, np.ndarray],
    scale: tuple[int, int],
    choice: Choice,
    rebuild: bool,
) -> dict[str, np.ndarray]:
    kept = {}
    for tie in wiring.ties:
        units = wiring.units(tie)
        count = units * scale[0] // scale[1]
        readers = list(_readers(wiring, tie, params, statistics))
        kept[tie] = (
            _best(units, count, readers)
            if choice == "rebuild"
            else np.sort(np.argsort(-_norms(wiring, tie, units, params))[:count])
        )

    def channels(space: Space) -> np.ndarray:
        return space.channels(kept[space.tie])

    def of_kept(path: str, space: Space) -> np.ndarray:
        """Returns [kept, all]: what each kept channel stands for."""
        return _rebuilding(statistics[path], channels(space), rebuild)

    result = {}
    for path, conv in wiring.convs.items():
        kernel, bias = (params[f"{path}.{name}"] for name in ("kernel", "bias"))
        rows, columns, _, outputs = kernel.shape
        kernel = kernel.reshape(rows, columns, conv.frames, -1, outputs).astype(np.float64)
        if path in wiring.reads:
            kernel = of_kept(path, wiring.reads[path]) @ kernel
        if writes := wiring.writes.get(path):
            width = outputs // len(writes)
            index = np.concatenate(
                [n * width + channels(written) for n, written in enumerate(writes)]
            )
            kernel, bias = kernel[..., index], bias[index]
        result[f"{path}.kernel"] = kernel.reshape(rows, columns, -1, kernel.shape[-1])
        result[f"{path}.bias"] = bias
    for path in wiring.attentions:  # the product of queries and keys, over the root of the channels
        space = wiring.writes[f"{path}.to_qkv"][0]
        queries, keys = (of_kept(f"{path}.{name}", space) for name in ("queries", "keys"))
        turned = queries @ keys.T * math.sqrt(len(queries) / queries.shape[1])
        for name in ("kernel", "bias"):
            array = result[f"{path}.to_qkv.{name}"].astype(np.float64)
            array[..., : len(turned)] = array[..., : len(turned)] @ turned
            result[f"{path}.to_qkv.{name}"] = array
    for path in wiring.norms:
        index = channels(wiring.reads[path])
        # The kept channels' mean square differs from that of all.
        change = math.sqrt(statistics[path][index].mean() / statistics[path].mean())
        result[f"{path}.gamma"] = params[f"{path}.gamma"][index] * change
    return {name: np.asarray(array, np.float32) for name, array in result.items()}


class _Reader(NamedTuple):
    """What reads a space: the products of its channels, and what becomes of an error in them."""

    per: int
    products: np.ndarray
    weight: np.ndarray


def _readers(
    wiring: _Wiring, tie: str, params: Tensors, statistics: Mapping[str, np.ndarray]
) -> Iterator[_Reader]:
    for path, conv in wiring.convs.items():
        space = wiring.reads.get(path)
        if space is not None and space.tie == tie:
            kernel = params[f"{path}.kernel"]
            kernel = kernel.reshape(-1, kernel.shape[2] // conv.frames, kernel.shape[3])
            yield _Reader(space.per, statistics[path], np.einsum("tio,tjo->ij", kernel, kernel))
    for path in wiring.attentions:
        if wiring.writes[f"{path}.to_qkv"][0].tie == tie:
            queries, keys = (statistics[f"{path}.{name}"] for name in ("queries", "keys"))
            yield from (_Reader(1, queries, keys), _Reader(1, keys, queries))


def _best(units: int, count: int, readers: list[_Reader]) -> np.ndarray:
    """Chooses units, one after the other: each time the one that rebuilds most of what is missing.

    The rest of a layer's input, which the chosen channels do not rebuild, is the Schur complement
    of their products. Every reading layer counts the same: by the fraction of its output.
    """
    state = []
    for per, products, weight in readers:
        residual = products.astype(np.float64)
        weight = weight.astype(np.float64)
        residual = residual / max(float((weight * residual).sum()), np.finfo(float).tiny)
        state.append(
            (per, residual, weight, weight @ residual, _NOISE * residual.trace() / len(residual))
        )
    chosen = np.zeros(units, bool)
    for _ in range(count):
        gain = np.zeros(units)
        for per, residual, _, weighted, floor in state:
            alone = np.einsum("ij,ji->i", residual, weighted)
            gain += (alone / np.maximum(residual.diagonal(), floor)).reshape(units, per).sum(1)
        unit = int(np.argmax(np.where(chosen, -np.inf, gain)))
        chosen[unit] = True
        for per, residual, weight, weighted, floor in state:
            for channel in range(unit * per, (unit + 1) * per):
                if residual[channel, channel] > floor:
                    direction = residual[channel] / math.sqrt(residual[channel, channel])
                    residual -= np.outer(direction, direction)
                    weighted -= np.outer(weight @ direction, direction)
    return np.flatnonzero(chosen)


def _norms(wiring: _Wiring, tie: str, units: int, params: Tensors) -> np.ndarray:
    """Returns the squared norm of each unit's filters."""
    norms = np.zeros(units)
    for path, spaces in wiring.writes.items():
        squares = np.square(params[f"{path}.kernel"]).sum((0, 1, 2))
        for space, of_space in zip(spaces, np.split(squares, len(spaces)), strict=True):
            if space.tie == tie:
                norms += of_space.reshape(units, space.per).sum(1)
    return norms


def _rebuilding(products: np.ndarray, kept: np.ndarray, rebuild: bool) -> np.ndarray:
    """Returns the least squares solution for all channels from the kept ones, [kept, all].

    Without a constant, so that the zeros around a frame stay zeros.
    """
    solution = np.zeros((len(kept), len(products)))
    if rebuild:
        products = products.astype(np.float64)
        ridge = _RIDGE * max(products.trace() / len(products), np.finfo(float).tiny)
        inner = products[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
        solution = np.linalg.solve(inner, products[kept])
    solution[:, kept] = np.eye(len(kept))
    return solution


def _observed(
    sizes: Architecture, params: Tensors, wirings: Mapping[str, _Wiring]
) -> dict[str, np.ndarray]:
    """Runs a network on synthetic clips and returns sums over all pixels, by the layers' paths.

    Of a convolution, the products of the channels that it reads, [C, C]; of an attention also those
    of its queries and keys; of a norm, the squares of the channels over their mean, [C].
    """

    def products(x: jax.Array) -> jax.Array:
        x_NC = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        return jnp.matmul(x_NC.T, x_NC, precision=jax.lax.Precision.HIGHEST)

    @jax.jit
    def run(params: Any, video_BTHW3: jax.Array) -> dict[str, jax.Array]:
        statistics: dict[str, jax.Array] = {}

        class WatchedConv(Conv):
            path: str

            def __call__(self, x_BTHWC: jax.Array, stride: int = 1) -> jax.Array:
                y = super().__call__(x_BTHWC, stride)
                statistics[self.path] = products(jnp.split(x_BTHWC, self.frames, axis=-1)[-1])
                if self.path.endswith(".to_qkv"):
                    queries, keys, _ = jnp.split(y, 3, axis=-1)
                    start = self.path.removesuffix("to_qkv")
                    statistics[f"{start}queries"], statistics[f"{start}keys"] = map(
                        products, (queries, keys)
                    )
                return y

        class WatchedNorm(Norm):
            path: str

            def __call__(self, x_BTHWC: jax.Array, activate: bool = True) -> jax.Array:
                squares = jnp.square(x_BTHWC.astype(jnp.float32))
                mean = jnp.maximum(squares.mean(-1, keepdims=True), 1e-24)
                statistics[self.path] = (squares / mean).sum((0, 1, 2, 3))
                return super().__call__(x_BTHWC, activate)

        def watched(name: str, coder: Any) -> Any:
            graph, state = nnx.split(coder)
            leaves = [
                (path, leaf.replace(params[".".join(map(str, (name, *path)))]))
                for path, leaf in nnx.to_flat_state(state)
            ]
            coder = nnx.merge(graph, nnx.from_flat_state(leaves))
            for path, module in list(nnx.iter_modules(coder)):
                if isinstance(module, Conv | Norm):
                    layer: Any = module
                    layer.__class__ = WatchedConv if isinstance(module, Conv) else WatchedNorm
                    layer.path = ".".join(map(str, (name, *path)))
            return coder

        encoder = watched("encoder", nnx.eval_shape(lambda: network.Encoder(sizes)))
        patches = network.to_patches(video_BTHW3, sizes.patch_size, jnp.dtype("float32"))
        moments, _ = encoder.step(patches, None)
        if "decoder" in wirings:
            decoder = watched("decoder", nnx.eval_shape(lambda: network.Decoder(sizes)))
            decoder.step(jnp.split(moments, 2, axis=-1)[0], None)
        return statistics

    side = _LATENTS * sizes.space_factor
    pixels = network.latent_frames(_FRAMES) * _LATENTS**2
    count = max(_CLIPS, -(-_PIXELS_PER_CHANNEL * sizes.widest // pixels))
    own = {name: array for name, array in params.items() if name.startswith(tuple(wirings))}
    sums: dict[str, np.ndarray] = {}
    for seed in range(count):
        statistics = run(own, jnp.asarray(_clip(seed, side))[None])
        for path, array in jax.device_get(statistics).items():
            sums[path] = sums.get(path, 0) + array.astype(np.float64)
    return sums


def _clip(seed: int, side: int) -> np.ndarray:
    """Returns a clip of moving, striped discs that hide each other, [T, side, side, 3] in [0, 1].

    Their edges and their spectrum are about those of natural images (Lee, Mumford and Huang, 2001).
    """
    rng = np.random.default_rng(seed)
    video = np.empty((_FRAMES, side, side, 3), np.float32)
    time, row, column = np.meshgrid(
        np.arange(_FRAMES), np.arange(side), np.arange(side), indexing="ij"
    )
    video[:] = rng.random(3)
    for _ in range(_DISCS):
        radius = side * 0.04 / np.sqrt(rng.uniform(0.01, 1))  # density falls with its cube
        center, speed = rng.uniform(0, side, 2), rng.normal(0, 1.5, 2)
        y, x = row - center[0] - speed[0] * time, column - center[1] - speed[1] * time
        inside = y**2 + x**2 < radius**2
        waves, phase = rng.normal(0, 0.6, 2), rng.uniform(0, 2 * np.pi)
        stripes = np.sin(waves[0] * y[inside] + waves[1] * x[inside] + phase)[:, None]
        video[inside] = rng.random(3) + rng.uniform(0, 0.2) * rng.normal(0, 1, 3) * stripes
    return video.clip(0, 1)
