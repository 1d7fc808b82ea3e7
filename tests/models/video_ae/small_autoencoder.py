"""Weights of a narrow video autoencoder with noisy output, and videos with sound."""

from pathlib import Path
from typing import Any

import av
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.training import state


def config(**fields: Any) -> video_ae.Config:
    side = 16 * fields.get("patch_size", 1)
    narrow = {"latent_channels": 4, "encoder_width": 8, "decoder_widths": (8, 8, 8, 8)}
    return video_ae.Config(**({"frames": 4, "height": side, "width": side} | narrow | fields))


def batch(model: Any, rows: int = 2) -> dict[str, jax.Array]:
    """Returns random clips, and the latents that the model requires."""
    rng = np.random.default_rng(0)
    spec = model.batch_spec(rows)
    found = {
        "video": jnp.asarray(rng.integers(0, 256, spec["video"].shape), jnp.uint8),
        "weight": jnp.ones(rows),
    }
    if "latents" in spec:
        found["latents"] = jnp.asarray(rng.normal(size=spec["latents"].shape), jnp.float32)
    return found


def params(model: video_ae.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights, which give noisy images, slightly outside of [0, 1] in places."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, leaf in state.ModelDefinition(model.build).params.items():
        scale = 0.1 if len(leaf.shape) == 1 else 1.1 / np.sqrt(np.prod(leaf.shape[:-1]))
        found[name] = (rng.standard_normal(leaf.shape) * scale).astype(np.float32)
    tail = "decoder.tail"
    found[f"{tail}.kernel"] *= 0.7
    found[f"{tail}.bias"] += 0.5
    return found


def save(path: Path, seed: int = 0, **fields: Any) -> Path:
    """Writes a weights file that contains its model config."""
    model = config(**fields)
    weights.save(path, model, params(model, seed))
    return path


def module(path: Path) -> video_ae.VideoAutoencoder:
    found = weights.load(path)
    arrays = {name: jnp.asarray(array) for name, array in found.params.items()}
    return state.ModelDefinition(found.model.build).module(arrays, {})


def read(path: Path) -> np.ndarray:
    """Reads all frames, uint8 [T, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@nnx.jit
def through(made: video_ae.VideoAutoencoder, video_BTHW3: Any) -> Any:
    """Encodes and decodes in one compiled function."""
    return made.decode(made.encode(video_BTHW3))


def reconstructed(path: Path, video_THW3: np.ndarray) -> np.ndarray:
    """Reconstructs an entire video at once; returns its frames as uint8."""
    made = module(path)
    _, height, width, _ = video_THW3.shape
    factor = made.space_factor
    filled = np.pad(
        video_THW3,
        ((0, 4), (0, -height % factor), (0, -width % factor), (0, 0)),
        mode="edge",
    )
    filled = filled[: 4 * made.timing.needed(len(video_THW3))]
    found = through(made, jnp.asarray(filled[None], jnp.float32) / 255)
    cut = jnp.clip(found[0, : len(video_THW3), :height, :width], 0, 1)
    return np.asarray(jnp.round(cut * 255).astype(jnp.uint8))


def with_sound(
    path: Path,
    images: list[np.ndarray],
    seconds: float,
    codec: str = "aac",
    options: dict[str, str] | None = None,
) -> Path:
    """Writes a video with a tone; without images, only the tone."""
    rate = 16_000
    with av.open(str(path), "w") as container:
        video: Any = None
        if images:
            video = container.add_stream("libx264", rate=25, options=options)
            video.height, video.width = images[0].shape[:2]
            video.pix_fmt = "yuv420p"
        sound: Any = container.add_stream(codec, rate=rate)
        sound.layout = "mono"
        for image in images:
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            container.mux(video.encode(frame))
        if images:
            container.mux(video.encode())
        tone = np.sin(np.arange(int(rate * seconds)) / 5).astype(np.float32)
        form = sound.codec_context.format.name
        scaled = {
            "u8": (tone * 100 + 128).astype(np.uint8),
            "s16": (tone * 10_000).astype(np.int16),
        }
        wave = scaled.get(form, tone)
        for first in range(0, len(wave), 1024):
            frame = av.AudioFrame.from_ndarray(wave[None, first : first + 1024], form, "mono")
            frame.rate, frame.pts = rate, first
            container.mux(sound.encode(frame))
        container.mux(sound.encode())
    return path


def sound_of(path: Path) -> list[tuple[float, bytes]]:
    """Returns the time and content of each audio packet."""
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return []
        return [
            (round(float(packet.pts * packet.time_base), 4), bytes(packet))
            for packet in container.demux(audio=0)
            if packet.size
        ]
