"""Validation on eight devices equals a numpy computation over exactly the validation examples."""

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training import toy

from jaxtrain import config
from jaxtrain.data import validation
from jaxtrain.data.pipeline import ValidationBatches
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import BadExample
from jaxtrain.models.contract import Model
from jaxtrain.sharding import ShardingRule
from jaxtrain.training.state import ModelDefinition, State, abstract_state, jit_init
from jaxtrain.training.validation import Evaluator
from jaxtrain.xla import options

BATCH, BROKEN = 8, 12


class StopsAfter(toy.Never):
    """A run that stops at the call after ``times`` calls."""

    def __init__(self, times: int) -> None:
        self.left = times

    def agreed(self) -> bool:
        self.left -= 1
        return self.left < 0


class _Judge(Model):
    """An affine map of x, evaluated by its squared distance from y."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.1 * rngs.normal((toy.WIDTH, toy.WIDTH)))
        self.bias = nnx.Param(rngs.normal((toy.WIDTH,)))

    def evaluate(self, batch: dict[str, jax.Array]) -> Any:
        moved = batch["x"] @ self.kernel[...] + self.bias[...][None]
        error = jnp.square(moved - batch["y"]).mean(-1)
        weight = batch["weight"]
        total = (error * weight).sum()
        half = 0.5 * weight  # a metric may have other weights
        return {
            "loss": (total, weight.sum()),
            "error": (total, weight.sum(), jnp.stack([error * weight, weight])),
            "half": ((error * half).sum(), half.sum()),
        }

    @staticmethod
    def derived(means: Mapping[str, float]) -> dict[str, float]:
        return {"doubled": 2 * means["loss"]}


class _Painter(_Judge):
    """Draws the first number of each example."""

    def samples(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        row = jnp.clip(100 + 10 * batch["x"][:, 0], 0, 255).astype(jnp.uint8)
        return {"rows": jnp.broadcast_to(row[None, :, None], (2, BATCH, 3))}


@dataclasses.dataclass
class Rows:
    """Random examples, always the same. Example BROKEN cannot be read."""

    examples: int
    fingerprint: str = "rows"
    read: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return self.examples

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        self.read.append(index)
        if index == BROKEN:
            raise BadExample("file-3", "broken on purpose")
        return row(index)


def row(index: int) -> dict[str, np.ndarray]:
    x, y = np.random.default_rng(index).standard_normal((2, toy.WIDTH), np.float32)
    return {"x": x, "y": y}


@dataclasses.dataclass
class Trained:
    """A model on eight devices, with sharded parameters."""

    definition: ModelDefinition
    rule: ShardingRule
    target: State
    state: State

    def evaluator(
        self, rows: Rows, examples: int, place: Path, how: Any = "float32", **more: Any
    ) -> Evaluator:
        batches = ValidationBatches(
            rows,
            self.rule.mesh,
            toy.Config().batch_spec(BATCH),
            examples=examples,
            seed=5,
            threads=2,
            quarantine=Quarantine(place / "quarantine.jsonl"),
        )
        return Evaluator(self.definition, self.rule, how, self.target, batches, **more)


def trained(model: Any) -> Trained:
    settings = config.Mesh(data=2, fsdp=4, shard="params", min_shard_elements=64)
    rule = ShardingRule(toy.mesh_of(2, 4), settings)
    definition, optimizer = ModelDefinition(model), optax.identity()
    target = abstract_state(definition, optimizer, rule)
    state = jit_init(definition, optimizer, target, rule, seed=1)()
    return Trained(definition, rule, target, state)


def spread(examples: int, present: int) -> list[int]:
    """Returns the validation examples, evenly spaced over the split."""
    return [place * present // examples for place in range(examples)]


def by_hand(state: State, indices: list[int]) -> dict[str, float]:
    """Computes the expected values with numpy, one example at a time, in float64."""
    kernel, bias = (np.asarray(state.params[name], np.float64) for name in ("kernel", "bias"))
    rows = [row(index) for index in indices if index != BROKEN]
    errors = [np.square(one["x"] @ kernel + bias - one["y"]).mean() for one in rows]
    mean = np.mean(errors)
    return {
        "val/loss": mean,
        "val/error": mean,
        "val/error_std": np.std(errors, ddof=1),
        "val/half": mean,
        "val/doubled": 2 * mean,
    }


@pytest.fixture(scope="module")
def judge() -> Trained:
    return trained(_Judge)


@pytest.mark.parametrize(
    ("wanted", "present"),
    [(13, 40), (40, 13), (5, 40)],
    ids=["a partial batch", "a small split", "less than a batch"],
)
def test_values_equal_those_of_numpy(
    wanted: int, present: int, judge: Trained, tmp_path: Path
) -> None:
    found = judge.evaluator(Rows(present), wanted, tmp_path)(judge.state, toy.Never()).values
    assert found == pytest.approx(
        by_hand(judge.state, spread(min(wanted, present), present)), rel=1e-5
    )


def test_each_validation_uses_the_same_examples(judge: Trained, tmp_path: Path) -> None:
    rows = Rows(40)
    evaluator = judge.evaluator(rows, 13, tmp_path)
    first = evaluator(judge.state, toy.Never()).values
    doubled = jax.tree.map(lambda array: 2 * array, judge.state.params)
    moved = dataclasses.replace(judge.state, params=doubled)
    assert evaluator(moved, toy.Never()).values == pytest.approx(
        by_hand(moved, spread(13, 40)), rel=1e-5
    )
    beats: list[int] = []
    again = evaluator(judge.state, toy.Never(), lambda: beats.append(1))
    assert again.values == first  # bit for bit
    assert len(beats) == len(evaluator._batches)
    assert sorted(rows.read) == spread(13, 40)  # each read only once


def test_samples_are_images_of_the_first_batch(tmp_path: Path) -> None:
    painter = trained(_Painter)
    images = painter.evaluator(Rows(40), 16, tmp_path)(painter.state, toy.Never()).samples
    painted = [0.0 if index == BROKEN else row(index)["x"][0] for index in spread(16, 40)[:BATCH]]
    expected = np.clip(100 + 10 * np.asarray(painted), 0, 255).astype(np.uint8)
    assert {name: image.dtype for name, image in images.items()} == {"rows": np.uint8}
    np.testing.assert_array_equal(images["rows"], np.tile(expected[None, :, None], (2, 1, 3)))


class _Speller(_Judge):
    """Returns two texts as ids; the second one is padding."""

    def samples(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        first = jnp.full((1, 1), batch["weight"].sum().astype(jnp.int32))
        row = jnp.concatenate([first, jnp.array([[7, -1, 9]], jnp.int32)], axis=1)
        return {"text": jnp.concatenate([row, jnp.full_like(row, -1)])}


def test_samples_of_ids_become_texts(tmp_path: Path) -> None:
    speller = trained(_Speller)
    plain = speller.evaluator(Rows(40), 16, tmp_path)(speller.state, toy.Never()).samples
    page = "===== prompt 1\n{}\n===== completion 1\n{}\n"
    assert plain == {"text": page.format("7 7", "9")}  # one of eight rows is broken
    said = speller.evaluator(Rows(40), 16, tmp_path, decode=lambda ids: f"{len(ids)} words")
    assert said(speller.state, toy.Never()).samples == {"text": page.format("2 words", "1 words")}


@pytest.mark.parametrize("times", [0, 2, 3])
def test_it_can_be_stopped_before_each_batch(times: int, judge: Trained, tmp_path: Path) -> None:
    rows = Rows(40)
    evaluator = judge.evaluator(rows, 16, tmp_path)
    found = evaluator(judge.state, StopsAfter(times))
    assert (found is None) == (times < 3)  # once after compiling, and before each of two batches
    assert len(rows.read) <= BATCH * max(times, 1)
    whole = evaluator(judge.state, toy.Never())
    assert whole is not None
    assert whole.values == pytest.approx(by_hand(judge.state, spread(16, 40)), rel=1e-5)


def test_a_stop_does_not_wait_for_the_compilation(
    judge: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Now(toy.Never):
        signaled = agreed = lambda self: True

    go_on = threading.Event()
    evaluator = judge.evaluator(Rows(40), 16, tmp_path)
    compile_all = evaluator._compile
    monkeypatch.setattr(evaluator, "_compile", lambda: go_on.wait(60) and compile_all())
    assert evaluator(judge.state, Now()) is None
    assert options.still_compiling()
    go_on.set()
    assert evaluator(judge.state, toy.Never()) is not None
    assert not options.still_compiling()


@dataclasses.dataclass
class Grouped(Rows):
    """Six examples of three groups, such as videos, of which one has four."""

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return row(index)

    def validated(self, count: int) -> validation.Validated:
        groups = np.array([0, 0, 0, 0, 1, 2])
        return validation.Validated(
            np.arange(6), np.float32([0.25, 0.25, 0.25, 0.25, 1, 1]), groups[:count]
        )


def test_metrics_are_means_over_groups(judge: Trained, tmp_path: Path) -> None:
    found = judge.evaluator(Grouped(6), 6, tmp_path)(judge.state, toy.Never())
    assert found is not None
    kernel, bias = (np.asarray(judge.state.params[name], np.float64) for name in ("kernel", "bias"))
    errors = [np.square(one["x"] @ kernel + bias - one["y"]).mean() for one in map(row, range(6))]
    groups = [np.mean(errors[:4]), errors[4], errors[5]]
    assert found.values["val/error"] == pytest.approx(np.mean(groups), rel=1e-5)
    assert found.values["val/loss"] == pytest.approx(np.mean(groups), rel=1e-5)
    assert found.values["val/error_std"] == pytest.approx(np.std(groups, ddof=1), rel=1e-5)
