"""Random parameters of models, comparisons of trees, and runs with a checkpoint of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from checkpoint.small_state import State

from jaxtrain import config
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.training.state import ModelDefinition


def random_params(model: Any, scale: float = 0.3, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random values, also for parameters that start as zeros or ones."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, scale, leaf.shape).astype(np.float32)
        for name, leaf in ModelDefinition(model.build).params.items()
    }


def assert_same(left: Any, right: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), left, right)


def write_run(
    directory: Path,
    model: Any,
    step: int,
    params: Mapping[str, np.ndarray],
    *,
    best: bool = False,
    stored: Any = None,
    files: Mapping[str, bytes] | None = None,
    **meta: Any,
) -> Path:
    """Writes a run directory with a checkpoint; returns the directory.

    Args:
        best: whether it is the best checkpoint, and no other.
        stored: replaces the model in the run's config.
        files: more files of the checkpoint.
        meta: replaces parts of what the checkpoint records.
    """
    state = State(
        step=np.uint32(step), examples_seen=np.uint32(step), params=params, extras={}, opt={}
    )
    described = {"seed": 0, "model": config.to_dict(model) if stored is None else stored}
    about = {"step": step, "examples_seen": step, "examples_skipped": 0}
    saver = CheckpointSaver(directory, 2, lambda line: None, files=files or {})
    saver.save(
        jax.tree.map(jax.numpy.asarray, state),
        about | {"config": described | {"data": {}}} | meta,
        ("best",) if best else ("checkpoints",),
    )
    saver.close()
    return directory
