"""Demo videos: moving scenes rendered with NumPy and encoded with H.264.

There are six kinds of scene, each with several seeds: hills under a moving camera, shaded balls,
rotating mosaics, drifting clouds, a flight over ground, rippling water. Their textures have the 1/f
spectrum of natural images, and everything moves smoothly, so an autoencoder has something to learn.

Legend: H height, W width, N side length of a texture. Images are float32 in 0..1. Screen
coordinates are in units of the height, with (0, 0) in the middle, x to the right, y down.
"""

import concurrent.futures
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from jaxtrain import machine
from jaxtrain.data.video.frames import REPEATABLE
from jaxtrain.storage import cache

_SCENES = 1  # seed of all scenes
VERSION = 2  # part of the folder's name: increase it whenever the files change
HEIGHT, WIDTH = 96, 160
FRAMES = 48
FPS = 24
VIDEOS = 24

Array = NDArray[Any]
Scene = Callable[[float], Array]  # seconds -> image [H, W, 3]

_N = 256
_Y_H1, _X_1W = np.meshgrid(
    (np.arange(HEIGHT, dtype=np.float32) + 0.5) / HEIGHT - 0.5,
    ((np.arange(WIDTH, dtype=np.float32) + 0.5) - WIDTH / 2) / HEIGHT,
    indexing="ij",
    sparse=True,
)
_PALETTES = (
    ("#20304a", "#3f6b7d", "#86a892", "#e3d6a4", "#f6efdd"),  # coast
    ("#2b1d1a", "#6d3b23", "#b8743a", "#e4b873", "#f5e6c4"),  # sandstone
    ("#12261c", "#2c5138", "#5f8a4a", "#a9bb66", "#e9e6b0"),  # meadow
    ("#1c1a2e", "#4a3566", "#94557f", "#df8a7c", "#f9d7a6"),  # dusk
    ("#1d2730", "#44606b", "#7f98a0", "#bccbcd", "#f2f4f1"),  # rain
    ("#301417", "#7c2730", "#c7553f", "#efa45c", "#fbe7b8"),  # autumn
)


def prepare(root: Path, say: Callable[[str], None]) -> Path:
    """Returns the cache folder of demo videos, after rendering them if they are missing."""
    folder = root / f"demo_video-v{VERSION}"

    def build(work: Path) -> dict[str, Any]:
        say(f"rendering {VIDEOS} demo videos ({WIDTH}x{HEIGHT}, {FRAMES} frames)")
        with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
            list(pool.map(lambda number: _write(work, number), range(VIDEOS)))
        return {"version": VERSION, "videos": VIDEOS}

    cache.make_folder(folder, build, say)
    return folder


def _write(folder: Path, number: int) -> None:
    kind, make = list(_KINDS.items())[number % len(_KINDS)]
    path = folder / f"{kind}-{number // len(_KINDS)}.mp4"
    encode(path, (to_uint8(image) for image in render(make, number)), FPS)


def render(make: Callable[[np.random.Generator], Scene], seed: int) -> Iterator[Array]:
    """Yields all frames of a scene."""
    scene = make(np.random.default_rng((_SCENES, seed)))
    for frame in range(FRAMES):
        yield scene(frame / FPS)


def to_uint8(picture_HW3: Array) -> NDArray[np.uint8]:
    """Clips an image to 0..1 and rounds it to 8 bits."""
    rounded: NDArray[np.uint8] = np.clip(picture_HW3 * 255 + 0.5, 0, 255).astype(np.uint8)
    return rounded


def encode(path: Path, frames: Iterator[NDArray[np.uint8]], fps: int, keyframes: int = FPS) -> None:
    """Writes RGB frames, each uint8 [H, W, 3], as H.264 in MP4; a keyframe at least so often."""
    g = str(keyframes)
    options = {"crf": "14", "preset": "veryfast", "g": g, "x264-params": REPEATABLE}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options=options)
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for number, frame_HW3 in enumerate(frames):
            if number == 0:
                stream.height, stream.width = frame_HW3.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HW3, "rgb24")))
        container.mux(stream.encode())


# Building blocks


def _color(code: str) -> Array:
    return np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)], np.float32)


def _palette(rng: np.random.Generator) -> Array:
    """Returns five colors from dark to light, [5, 3]."""
    return np.stack([_color(code) for code in _PALETTES[rng.integers(len(_PALETTES))]])


def _noise(rng: np.random.Generator, shape: tuple[int, ...], falloff: float) -> Array:
    """Returns periodic Gaussian noise with amplitude spectrum 1/f**falloff, mean 0, deviation 1."""
    grids = np.meshgrid(*(np.fft.fftfreq(n) * n for n in shape), indexing="ij")
    f = np.sqrt(sum(grid**2 for grid in grids))
    f[(0,) * len(shape)] = np.inf
    field = np.fft.ifftn(np.fft.fftn(rng.standard_normal(shape)) / f**falloff).real
    return (field / field.std()).astype(np.float32)


def _tint(value: Array, palette_53: Array) -> Array:
    """Maps numbers in 0..1 to the palette [5, channels], adding a channel axis."""
    stops = np.linspace(0, 1, len(palette_53))
    return np.stack(
        [np.interp(value, stops, palette_53[:, c]) for c in range(palette_53.shape[1])],
        axis=-1,
        dtype=np.float32,
    )


def _texture(rng: np.random.Generator, palette_53: Array, falloff: float) -> Array:
    """Returns a periodic image [N, N, 3]."""
    return _tint(0.5 + 0.22 * _noise(rng, (_N, _N), falloff), palette_53)


def _sample(texture_NN3: Array, u: Array, v: Array) -> Array:
    """Samples a periodic texture bilinearly at coordinates in texels."""
    left, top = np.floor(u).astype(np.int32), np.floor(v).astype(np.int32)
    a = (u - left).astype(np.float32)[..., None]
    b = (v - top).astype(np.float32)[..., None]
    x0, y0 = left % _N, top % _N * _N
    x1, y1 = (left + 1) % _N, (top + 1) % _N * _N
    texels = texture_NN3.reshape(_N * _N, -1)
    upper = _mix(texels.take(y0 + x0, axis=0), texels.take(y0 + x1, axis=0), a)
    lower = _mix(texels.take(y1 + x0, axis=0), texels.take(y1 + x1, axis=0), a)
    return _mix(upper, lower, b)


def _near(center: float, reach: float, coordinates: Array) -> slice:
    """Returns the part of a screen axis within ``reach`` of ``center``."""
    low, high = np.searchsorted(coordinates.ravel(), (center - reach, center + reach))
    return slice(int(low), int(high))


def _cover(distance: Array, softness: float = 1.5) -> Array:
    """Returns 1 inside (distance < 0) to 0 outside, over ``softness`` pixels, [..., 1]."""
    inside: Array = np.clip(0.5 - distance * (HEIGHT / softness), 0, 1)[..., None]
    return inside


def _mix(below: Array, above: Array | float, fraction: Array | float) -> Array:
    mixed: Array = below + (above - below) * fraction
    return mixed


def _either(rng: np.random.Generator) -> int:
    """Returns -1 or 1."""
    return 1 if rng.random() < 0.5 else -1


def _sway(rng: np.random.Generator, size: float) -> Callable[[float], float]:
    """Returns a smooth path around 0: two sines of different periods."""
    slow, fast = rng.uniform(0.12, 0.25), rng.uniform(0.3, 0.5)
    p, q = rng.uniform(0, 2 * np.pi), rng.uniform(0, 2 * np.pi)

    def at(t: float) -> float:
        wave = 0.75 * np.sin(2 * np.pi * slow * t + p) + 0.25 * np.sin(2 * np.pi * fast * t + q)
        return float(size * wave)

    return at


# Scenes


def hills(rng: np.random.Generator) -> Scene:
    """Renders rows of ridges under a sky with a sun; the camera moves sideways."""
    palette = _palette(rng)
    sky_low, sky_high = palette[4], _mix(palette[3], _color("#5b86b5"), 0.55)
    length, layers = 1024, 5
    ridges = [_noise(rng, (length,), 1.5) for _ in range(layers)]
    rough = _texture(rng, np.linspace(0.75, 1.25, 5, dtype=np.float32)[:, None], 1.0)
    speed = _either(rng) * rng.uniform(0.25, 0.45)
    sun_x, sun_y = rng.uniform(-0.5, 0.5), rng.uniform(-0.35, -0.15)
    nod = _sway(rng, 0.02)

    def image(t: float) -> Array:
        y = _Y_H1 + nod(t)
        out = _mix(sky_low, sky_high, np.clip(0.25 - 1.4 * y, 0, 1)[..., None])
        out = np.broadcast_to(out, (HEIGHT, WIDTH, 3))
        away = np.hypot(_X_1W - sun_x, y - sun_y)
        out = _mix(out, _color("#fff6dc"), 0.6 * np.exp(-6 * away)[..., None])
        out = _mix(out, _color("#fffaf0"), _cover(away - 0.06))
        for layer, ridge in enumerate(ridges):
            near = (layer + 1) / layers
            x = (_X_1W + speed * t * near**2 + 3) * 110 / (0.5 + near)
            height = np.interp(x % length, np.arange(length), ridge).astype(np.float32)
            top = -0.12 + 0.13 * layer - (0.09 - 0.05 * near) * height
            ground = _mix(sky_low, palette[1 if layer < 3 else 0], 0.25 + 0.7 * near)
            grain = _sample(rough, x * 1.6 + 0 * y, y * 170 + 40 * layer)
            shade = 1 - 0.5 * np.clip(y - top, 0, 0.6)[..., None]
            out = _mix(out, ground * (1 - near + near * grain) * shade, _cover(top - y))
        return out

    return image


def balls(rng: np.random.Generator) -> Scene:
    """Renders textured, lit balls that roll over a textured floor, with soft shadows."""
    floor = _texture(rng, _palette(rng), 1.3)
    number = int(rng.integers(4, 7))
    skins = [_texture(rng, _palette(rng), rng.uniform(0.9, 1.5)) for _ in range(number)]
    radii = [float(radius) for radius in np.sort(rng.uniform(0.1, 0.24, number))]
    places = [(_sway(rng, 0.65), _sway(rng, 0.36)) for _ in range(number)]
    pan = _sway(rng, 20)

    def image(t: float) -> Array:
        shift = pan(t)
        out = _sample(floor, _X_1W * 90 + shift + 0 * _Y_H1, _Y_H1 * 90 + 0 * _X_1W)
        out = _mix(out, out.mean(axis=(0, 1)), 0.35) * (0.9 - 0.35 * _Y_H1[..., None])
        for skin, radius, (path_x, path_y) in zip(skins, radii, places, strict=True):
            cx, cy = path_x(t), path_y(t)
            # The ball ends at 1 radius, its shadow at 0.45 + 1.35 / 1.15.
            region = _near(cy, 1.8 * radius, _Y_H1), _near(cx, 1.8 * radius, _X_1W)
            x, y = (_X_1W[:, region[1]] - cx) / radius, (_Y_H1[region[0]] - cy) / radius
            fallen = np.hypot(x - 0.35, (y - 0.45) * 1.15)
            out[region] *= 1 - 0.5 * np.clip(1.35 - fallen, 0, 0.7)[..., None] / 0.7
            z = np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))
            # Rolling without sliding: the skin turns by the distance divided by the radius.
            u = np.arctan2(x, z + 1e-3) + cx / radius
            v = np.arcsin(np.clip(y, -1, 1)) + cy / radius
            light = np.clip(-0.45 * x - 0.55 * y + 0.7 * z, 0, 1)
            shine = np.clip(-0.32 * x - 0.4 * y + 0.86 * z, 0, 1) ** 40
            lit = _sample(skin, u * 30, v * 30) * (0.25 + 0.85 * light)[..., None]
            edge = _cover((np.hypot(x, y) - 1) * radius)
            out[region] = _mix(out[region], lit + 0.5 * shine[..., None], edge)
        return out

    return image


def mosaic(rng: np.random.Generator) -> Scene:
    """Renders a kaleidoscope: a texture mirrored in sectors that rotate and pulsate."""
    texture = _texture(rng, _palette(rng), 1.35)
    sectors = int(rng.integers(3, 7))
    turn, zoom = rng.uniform(0.25, 0.6) * _either(rng), _sway(rng, 0.12)
    drift_x, drift_y = rng.uniform(-14, 14), rng.uniform(-14, 14)

    def image(t: float) -> Array:
        radius, angle = np.hypot(_X_1W, _Y_H1), np.arctan2(_Y_H1, _X_1W) + turn * t
        width = 2 * np.pi / sectors
        folded = np.abs((angle % width) - width / 2)
        scale = 95 * (1 + zoom(t))
        u, v = radius * np.cos(folded) * scale, radius * np.sin(folded) * scale
        out = _sample(texture, u + drift_x * t, v + drift_y * t)
        ring = 0.92 + 0.08 * np.cos(14 * radius - 2.5 * t)
        return out * (ring * (1.08 - 0.35 * radius))[..., None]

    return image


def clouds(rng: np.random.Generator) -> Scene:
    """Renders two layers of clouds that drift at different speeds and change shape."""
    palette = _palette(rng)
    sky = _mix(palette[2], _color("#4f82bd"), 0.6)
    layers = [_noise(rng, (_N, _N), 1.7)[..., None] for _ in range(3)]
    wind = rng.uniform(6, 16) * _either(rng)

    def image(t: float) -> Array:
        u, v = _X_1W * 75 + 0 * _Y_H1, _Y_H1 * 75 + 0 * _X_1W
        warp = _sample(layers[2], u * 0.7 - wind * t, v * 0.7 + 5 * t)[..., 0]
        out = np.broadcast_to(_mix(sky * 1.08, sky * 0.7, 0.5 - _Y_H1[..., None]), (*u.shape, 3))
        for number, layer in enumerate(layers[:2]):
            pace, size = (0.6, 1.3) if number == 0 else (1.4, 0.8)
            x, y = u * size + wind * pace * t + 3 * warp, v * size + 2 * warp
            thick = _sample(layer, x, y)[..., 0]
            lit = thick - _sample(layer, x - 3, y - 4)[..., 0]  # toward the sun
            body = np.clip(0.45 + 0.45 * thick, 0, 1)
            white = _mix(palette[4], 1.0, 0.5) * (0.82 + 0.3 * lit)[..., None]
            out = _mix(out, white, (body**1.5 * 0.9)[..., None])
        return out

    return image


def flight(rng: np.random.Generator) -> Scene:
    """Renders a flight over textured ground toward a hazy horizon, banking gently."""
    palette = _palette(rng)
    fields = _texture(rng, palette, 1.15)
    haze, sky = _mix(palette[4], _color("#dfe9f2"), 0.5), _color("#6f9cc9")
    pace, bank, course = rng.uniform(35, 60), _sway(rng, 0.16), _sway(rng, 0.35)
    smooth = fields.mean(axis=(0, 1))

    def image(t: float) -> Array:
        roll, heading = bank(t), course(t)
        x = _X_1W * np.cos(roll) + _Y_H1 * np.sin(roll)
        y = _Y_H1 * np.cos(roll) - _X_1W * np.sin(roll) + 0.18  # below the horizon
        depth = 14 / np.maximum(y, 0.02)
        right, ahead = x * depth, depth + pace * t * np.cos(heading)
        u = right * np.cos(heading) - depth * np.sin(heading) + pace * t * 0.3
        ground = _sample(fields, u, ahead + right * np.sin(heading))
        # Far away, a pixel covers many texels, so it fades to their mean instead of flickering.
        ground = _mix(ground, smooth, np.clip((depth - 50) / 120, 0, 1)[..., None])
        ground = _mix(ground, haze, np.clip(depth / 420, 0, 0.95)[..., None])
        air = _mix(haze, sky, np.clip(-2.2 * y, 0, 1)[..., None])
        return _mix(air, ground, _cover(-y, 3.0))

    return image


def water(rng: np.random.Generator) -> Scene:
    """Renders a textured bottom under rippling water, with caustics."""
    bottom = _texture(rng, _palette(rng), 1.1)
    waves = []
    for number in range(7):  # from all sides
        angle, k = np.pi * (number + rng.random()) / 7, rng.uniform(6, 15)
        kx, ky = k * float(np.cos(angle)), k * float(np.sin(angle))
        waves.append((kx, ky, rng.uniform(1.5, 3.2) * _either(rng), rng.uniform(0, 2 * np.pi)))
    flow_x, flow_y = rng.uniform(-8, 8), rng.uniform(-8, 8)
    tone = _mix(_color("#bfe6e4"), _palette(rng)[3], 0.25)

    def image(t: float) -> Array:
        slope_x: Array = np.zeros((HEIGHT, WIDTH), np.float32)
        slope_y: Array = slope_x
        bend: Array = slope_x
        for kx, ky, speed, phase in waves:
            argument = kx * _X_1W + ky * _Y_H1 + speed * t + phase
            slope = np.cos(argument)
            slope_x, slope_y = slope_x + kx * slope, slope_y + ky * slope
            bend = bend + (kx**2 + ky**2) * np.sin(argument)
        u = _X_1W * 80 + 0.05 * slope_x + flow_x * t
        out = _sample(bottom, u, _Y_H1 * 80 + 0.05 * slope_y + flow_y * t)
        bright = 1 / (1 + np.exp(-bend / 200))  # where the surface focuses the light
        out = out * (0.62 + 0.6 * bright)[..., None] * tone
        return out + 0.22 * (np.clip(bright - 0.7, 0, 1) ** 1.5)[..., None]

    return image


_KINDS = {scene.__name__: scene for scene in (hills, balls, mosaic, clouds, flight, water)}
