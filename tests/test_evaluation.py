"""Validation over eight devices is what numpy makes of exactly the validation examples."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx

from jaxtrain import config
from jaxtrain import mesh as meshes
from jaxtrain import state as states
from jaxtrain.data.pipeline import ValidationBatches
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import BadExample
from jaxtrain.evaluation import Evaluator

BATCH, BROKEN = 8, 3


class _Judge(nnx.Module):
    """An affine map of x, judged by its squared distance from y."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.1 * rngs.normal((toy.WIDTH, toy.WIDTH)))
        self.bias = nnx.Param(rngs.normal((toy.WIDTH,)))

    def evaluate(self, batch: dict[str, jax.Array]) -> Any:
        moved = batch["x"] @ self.kernel[...] + self.bias[...][None]
        error = jnp.square(moved - batch["y"]).mean(-1)
        weight = batch["weight"]
        total, squares = (error * weight).sum(), (jnp.square(error) * weight).sum()
        half = 0.5 * weight  # a metric may weigh rows in its own way
        return {
            "loss": (total, weight.sum()),
            "error": (total, weight.sum(), squares),
            "half": ((error * half).sum(), half.sum()),
        }


class _Painter(_Judge):
    """Paints the first number of each row."""

    def samples(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        row = jnp.clip(100 + 10 * batch["x"][:, 0], 0, 255).astype(jnp.uint8)
        return {"rows": jnp.broadcast_to(row[None, :, None], (2, BATCH, 3))}


@dataclasses.dataclass
class Rows:
    """Random rows. Row BROKEN cannot be read."""

    examples: int
    fingerprint: str = "rows"
    read: int = 0

    def __len__(self) -> int:
        return self.examples

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        self.read += 1
        if index == BROKEN:
            raise BadExample("file-3", "broken on purpose")
        return dict(zip("xy", rng.standard_normal((2, toy.WIDTH), np.float32), strict=True))


@dataclasses.dataclass
class Trained:
    """A model on eight devices, its parameters in shards."""

    definition: states.Definition
    rule: meshes.Rule
    target: states.State
    state: states.State

    def evaluator(self, rows: Rows, examples: int, directory: Path) -> Evaluator:
        batches = ValidationBatches(
            rows,
            self.rule.mesh,
            toy.Config().batch_spec(BATCH),
            examples=examples,
            seed=5,
            threads=2,
            quarantine=Quarantine(directory / "quarantine.jsonl"),
        )
        return Evaluator(self.definition, self.rule, "float32", self.target, batches)

    def expected(self, examples: int) -> dict[str, float]:
        """The same in float64, from each example in turn."""
        kernel, bias = (np.asarray(self.state.params[name], float) for name in ("kernel", "bias"))
        indices = [index for index in range(examples) if index != BROKEN]
        errors = []
        for index in indices:
            x, y = _row(index).values()
            errors.append(np.square(np.asarray(x, float) @ kernel + bias - y).mean())
        mean, std = np.mean(errors), np.std(errors)
        return {"val/loss": mean, "val/error": mean, "val/error_std": std, "val/half": mean}


def _row(index: int) -> dict[str, np.ndarray]:
    from jaxtrain.data.order import generator

    return Rows(0).example(index, generator(5, index))


def trained(model: Any, seed: int = 1) -> Trained:
    settings = config.Mesh(data=2, fsdp=4, shard="params", min_shard_elements=64)
    rule = meshes.Rule(toy.mesh_of(2, 4), settings)
    definition, optimizer = states.Definition(model), optax.identity()
    target = states.abstract(definition, optimizer, rule)
    return Trained(
        definition, rule, target, states.init(definition, optimizer, target, rule, seed)
    )


@pytest.fixture(scope="module")
def judge() -> Trained:
    return trained(_Judge)


@pytest.mark.parametrize(
    ("wanted", "present"),
    [(16, 40), (13, 40), (40, 13), (5, 40)],
    ids=["whole batches", "a ragged batch", "a small split", "less than a batch"],
)
def test_values_are_those_of_numpy(
    wanted: int, present: int, judge: Trained, tmp_path: Path
) -> None:
    found = judge.evaluator(Rows(present), wanted, tmp_path).metrics(judge.state)
    assert found == pytest.approx(judge.expected(min(wanted, present)), rel=1e-5)
