"""The contract of a model is checked by shapes, before data are read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import program
import pytest
from data.text import small_text
from flax import nnx

from jaxtrain import config
from jaxtrain.config import files
from jaxtrain.errors import InputError
from jaxtrain.models import from_file
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.ops import chunked_loss
from jaxtrain.training.diagnosis import model_check

Result = Callable[[jax.Array, jax.Array], Any]


def right_loss(total: jax.Array, weight: jax.Array) -> Any:
    return total, weight, {"accuracy": (total, weight)}


def right_evaluation(total: jax.Array, weight: jax.Array) -> Any:
    return {"loss": (total, weight), "psnr": (total, weight, jnp.ones((2, 2)))}


def broken(
    loss: Result = right_loss, evaluate: Result = right_evaluation, without: str = ""
) -> list[str]:
    """Returns the messages about a model whose functions return these results."""

    class Module(Model):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.zeros((4,)))

        def loss(self, batch: dict[str, jax.Array], keys_B: jax.Array) -> Any:
            return loss(self.kernel[...].sum(), batch["weight"].sum())

        def evaluate(self, batch: dict[str, jax.Array]) -> Any:
            return evaluate(self.kernel[...].sum(), batch["weight"].sum())

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        sequence_length: int = 8

        def build(self, rngs: nnx.Rngs) -> Model:
            return Module()

        def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
            spec = chunked_loss.batch_spec(batch_size, self.sequence_length)
            return {name: part for name, part in spec.items() if name not in without.split()}

    run = dataclasses.replace(config.named("demo_gpt"), model=Config())
    start, end = f"model {Config.__module__}.{Config.__qualname__}: ", f"; {model_check._RULES}"
    try:
        model_check.check(run)
    except InputError as error:
        messages = error.messages
        return [text.removeprefix(start).removesuffix(end) for text in messages]
    return []


def test_a_model_that_follows_the_contract() -> None:
    assert broken() == []


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (
            lambda total, weight: {"loss": total / weight},
            "evaluate returned loss: an array float32 []: return {name: (sum, weight) or",
        ),
        (
            lambda total, weight: {"accuracy": (total, weight)},
            'evaluate returned accuracy: it must also return "loss"',
        ),
        (
            lambda total, weight: total,
            "evaluate returned an array float32 [] as metrics: it must return {name: (sum, weight)",
        ),
        (
            lambda total, weight: {"loss": (total.astype(jnp.bfloat16), 2)},
            "evaluate returned loss: (an array bfloat16 [], a int): sum and weight must be float32",
        ),
        (
            lambda total, weight: {"loss": (total, weight, total)},  # once a sum of squares
            "evaluate returned loss: an array float32 [] of 2 examples: it must be an array float32"
            " [2, 2], the sum and the weight of each example",
        ),
    ],
)
def test_what_evaluate_returns(evaluate: Result, message: str) -> None:
    (found,) = broken(evaluate=evaluate)
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda total, weight: total / weight,
            "loss returned an array float32 []: it must return (sum, weight, metrics)",
        ),
        (
            lambda total, weight: (total[None], weight, {}),
            "loss returned an array float32 [1] as sum: it must be a float32 scalar",
        ),
        (
            lambda total, weight: (total, weight, {"accuracy": total}),
            "loss returned accuracy: an array float32 []: return {name: (sum, weight)}",
        ),
    ],
)
def test_what_loss_returns(loss: Result, message: str) -> None:
    (found,) = broken(loss=loss)
    assert found.startswith(message)


def test_all_missing_arrays_of_a_batch_are_named() -> None:
    assert sorted(broken(without="target_bytes weight")) == [
        "batch_spec lacks target_bytes, which data of text.Causal have: int32 [8]",
        "batch_spec lacks weight, which data of text.Causal have: float32 []",
    ]


@pytest.mark.parametrize("name", files.names())
def test_the_data_of_each_config_have_the_arrays_of_its_model(name: str) -> None:
    run = config.named(name)
    assert not list(model_check._of_batch(run))


@pytest.mark.parametrize("name", model_check.OWN)
def test_models_of_jaxtrain_are_right(name: str) -> None:
    kind = from_file.config_class(name)
    assert kind is not None
    assert not list(model_check._of_module(kind.tiny()))


OWN = """
import dataclasses
from jaxtrain import config
from jaxtrain.models import gpt

class Module(gpt.GPT):
    def evaluate(self, batch):
        return {"loss": super().evaluate(batch)["loss"][0]}

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gpt.Config):
    def build(self, rngs):
        return Module(self, rngs)

run = dataclasses.replace(config.named("demo_gpt"), model=Config.tiny())
"""


def test_a_run_ends_before_it_reads_data(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    small_text.write(tmp_path / "texts")
    arguments = ["--config", "own.py", "--data.path", "texts", "--output-dir", "run"]
    found = program.run(tmp_path, *arguments)
    assert found.returncode == 2
    assert (
        "error: model jaxtrain_config_own.Config: evaluate returned loss: an array" in found.stderr
    )
    assert "token" not in found.stdout
    assert not (tmp_path / "run").exists()
