"""Gates are parsed, and checked with the config."""

import math

import pytest

from jaxtrain import config
from jaxtrain.config.gates import Gate
from jaxtrain.errors import InputError


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("val/psnr > 24 at 5000", Gate("val/psnr", ">", 24.0, 5000)),
        ("val/loss<=3.5e-1 at 10_000", Gate("val/loss", "<=", 0.35, 10_000)),
        ("  val/bits_per_byte  <  -1.5  at 1,000 ", Gate("val/bits_per_byte", "<", -1.5, 1000)),
    ],
)
def test_gates_are_parsed_and_shown_so_that_they_parse_again(text: str, gate: Gate) -> None:
    assert Gate.parse(text) == gate
    assert Gate.parse(str(gate)) == gate


@pytest.mark.parametrize(
    ("relation", "met"), [(">", [0, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0]), ("<=", [1, 1, 0])]
)
def test_a_gate_compares(relation: str, met: list[int]) -> None:
    gate = Gate.parse(f"val/x {relation} 2 at 1")
    assert [gate.is_met(value) for value in (1.0, 2.0, 3.0)] == met
    assert not any(gate.is_met(value) for value in (None, math.nan, math.inf, -math.inf))


def test_a_gate_is_decided_by_the_first_validation_from_its_step_that_has_its_metric() -> None:
    gate = Gate.parse("val/x > 2 at 20")
    validations = [(10, {"val/x": 1.0}), (20, {"val/y": 1.0}), (30, {"val/x": 3.0})]
    assert gate.decided_by([*validations, (40, {"val/x": 4.0})]) == (30, 3.0)
    assert gate.decided_by(validations[:2]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["val/psnr = 24 at 5"], "'val/psnr = 24 at 5' is not METRIC > VALUE at STEP"),
        (["val/psnr > many at 5"], "is not METRIC > VALUE at STEP"),
        (["val/psnr > 24"], "is not METRIC > VALUE at STEP"),
        (["train/loss < 3 at 5"], "train/loss is not a validation metric"),
        (["val/psnr > 24 at 5000"], "is after the end of the run \\(200 steps\\)"),
    ],
)
def test_wrong_gates_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.load("demo", ["--loop.steps", "200", "--loop.gates", *given])


def test_gates_need_validations() -> None:
    off = ["--loop.eval_every", "None", "--checkpoint.best_metric", "None"]
    with pytest.raises(InputError, match=r"needs validations, but loop\.eval_every is None"):
        config.load("demo", [*off, "--loop.gates", "val/psnr > 4 at 10"])
