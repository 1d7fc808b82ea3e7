"""Tests I3D against the published network, on reproducible random weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.evaluation import i3d_weights

from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import i3d

# The first three logits, computed by tests/interop/torch_i3d.py with PyTorch on the same weights
# and clips.
WANTED = ((1.0731908, -2.6937132, -0.4476384), (1.0107688, -3.0202997, -0.8283260))


def clips(side: int, frames: int = 9) -> np.ndarray:
    """Returns two clips with values in [-1, 1]."""
    shape = (2, frames, side, side, 3)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return i3d_weights.write(tmp_path_factory.mktemp("i3d") / "i3d.safetensors")


@pytest.mark.slow
def test_logits_match_the_published_network(weights: Path) -> None:
    units = i3d.read(weights)
    found = jax.jit(lambda x: i3d.logits(units, x))(clips(32)[:1])
    assert found.shape == (1, i3d.CLASSES)
    np.testing.assert_allclose(found[:, :3], WANTED[:1], rtol=1e-4)


def test_clips_are_resized_and_cropped_to_a_square() -> None:
    """Corners are those of the center; colors go from -1 to 1."""
    video = np.zeros((1, 1, 448, 896, 3), np.float32)
    video[:, :, :, 224:672] = 1
    found = np.asarray(i3d.prepared(jnp.asarray(video)))
    assert found.shape == (1, 1, 224, 224, 3)
    np.testing.assert_array_equal(found, np.ones_like(found))
    assert (np.asarray(i3d.prepared(jnp.zeros((1, 1, 256, 256, 3)))) == -1).all()


def test_short_clips_are_refused(weights: Path) -> None:
    with pytest.raises(InputError, match=r"clips of 8 compared frames: rFVD needs 9"):
        i3d.measure(weights)(jnp.zeros((1, 8, 16, 16, 3)))
