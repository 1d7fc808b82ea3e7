"""Rates fitted to measured steps, and the file that keeps them."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import InputError
from jaxtrain.planning import calibration
from jaxtrain.planning.calibration import Calibration, MeasuredStep, Sample

# Seconds per FLOP, per byte and per call, for each class.
RATES = {"matmul f32": (1e-11, 2e-10, 3e-6), "elementwise": (0.0, 3e-10, 1e-6)}


def step(name: str, seed: int, ratio: float = 1.0) -> MeasuredStep:
    """Returns a step whose samples follow RATES, and which takes ``ratio`` times their sum."""
    rng = np.random.default_rng(seed)
    samples = []
    for kind, rates in RATES.items():
        for _ in range(8):
            flops, moved, calls = rng.uniform((1e6, 1e4, 1), (1e9, 1e7, 50))
            work = (flops if rates[0] else 0.0, moved, calls)
            samples.append(
                Sample(
                    kind=kind,
                    flops=work[0],
                    moved=work[1],
                    calls=work[2],
                    seconds=float(np.dot(rates, work)),
                )
            )
    total = sum(one.seconds for one in samples)
    return MeasuredStep(
        config=name, step_s=ratio * total, samples=tuple(samples), versions={"jax": "0"}
    )


def test_planted_rates_are_recovered_and_predict_another_step() -> None:
    found = Calibration("card", [step("a", 1, 1.25), step("b", 2, 1.25)])
    for kind, rates in RATES.items():
        assert found.rates[kind] == pytest.approx(rates, rel=1e-6, abs=1e-15)
    other = step("c", 3, 1.25)
    predicted = found.predict(calibration.total_work(other.samples))
    assert predicted.seconds == pytest.approx(other.step_s)
    assert sum(predicted.kinds.values()) == pytest.approx(predicted.seconds)
    assert predicted.error == pytest.approx(0, abs=1e-6)


def test_the_error_is_that_of_the_step_which_fits_least() -> None:
    found = Calibration("card", [step("a", 1, 1.0), step("b", 2, 1.0), step("c", 3, 1.25)])
    assert found.predict({"elementwise": (0, 1e6, 1)}).error == pytest.approx(0.25)


def test_a_sample_with_hardly_any_time_does_not_decide_alone() -> None:
    """Such as an instruction that the trace shows only in part."""
    perfect = step("a", 1)
    odd = dataclasses.replace(perfect.samples[0], seconds=1e-12)
    found = Calibration("card", [dataclasses.replace(perfect, samples=(*perfect.samples, odd))])
    other = step("b", 2)
    predicted = found.predict(calibration.total_work(other.samples)).kinds["matmul f32"]
    planted = sum(one.seconds for one in other.samples if one.kind == "matmul f32")
    assert predicted / found.ratio == pytest.approx(planted, rel=0.3)


def test_steps_that_disagree_widen_the_range_and_stay_positive() -> None:
    found = Calibration("card", [step("a", 1, 0.3), step("b", 2, 3.0), step("c", 3, 3.0)])
    assert found.error == pytest.approx(9.0)


def test_a_class_that_was_not_measured_has_the_rates_of_all_together() -> None:
    found = Calibration("card", [step("a", 1)])
    of_all = found.predict({"attention": (1e9, 1e6, 1)}).seconds
    each = [found.predict({kind: (1e9, 1e6, 1)}).seconds for kind in RATES]
    assert min(each) / 3 < of_all < 3 * max(each)


def test_steps_are_added_replaced_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    for one in (step("a", 1, 2.0), step("b", 2, 1.0), step("a", 3, 1.0)):
        calibration.add(path, "card", one)
    found = calibration.load(path)
    assert found.device == "card"
    assert [one.config for one in found.measured] == ["b", "a"]
    assert found.ratio == pytest.approx(1.0)


def test_a_file_of_another_device_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    calibration.add(path, "card", step("a", 1))
    before = path.read_bytes()
    with pytest.raises(InputError, match="holds measurements of card, not of another"):
        calibration.add(path, "another", step("b", 2))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda found: "not json", "cannot be read as a calibration file"),
        (lambda found: "[1, 2]", "as a calibration file: it is not a JSON object"),
        (lambda found: json.dumps(found | {"version": 99}), "has version 99"),
        (lambda found: json.dumps(found | {"measured": []}), "has no measured step"),
        (lambda found: json.dumps(found | {"measured": [{"config": "x"}]}), "'samples'"),
        (lambda found: json.dumps(found).replace('"flops": ', '"flops": -'), "0 or more"),
        (lambda found: json.dumps(found).replace('"step_s": ', '"step_s": 0, "x": '), "times"),
        (lambda found: json.dumps(found).replace('"step_s": ', '"step_s": 1e999, "x": '), "0 or"),
        (lambda found: json.dumps(found).replace('"seconds": ', '"seconds": 1e308, "x": '), "0 or"),
        (
            lambda found: re.sub('"(flops|moved|calls)": ', r'"\1": 0, "x": ', json.dumps(found)),
            "used",
        ),
        (lambda found: json.dumps(found).replace('"calls": ', '"calls": ' + "9" * 400), "cal"),
        (lambda found: "[" * 100_000, "cannot be read as a calibration file"),
    ],
)
def test_a_damaged_file_gives_one_error_with_the_fix(
    tmp_path: Path, damage: object, message: str
) -> None:
    path = tmp_path / "card.json"
    calibration.add(path, "card", step("a", 1))
    path.write_text(damage(json.loads(path.read_text())))  # type: ignore[operator]
    with pytest.raises(InputError, match=message) as caught:
        calibration.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist: write one with jaxtrain bench"):
        calibration.load(tmp_path / "none.json")
