"""Tests the file of a measured efficiency."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxtrain.cost import cards, efficiency
from jaxtrain.errors import InputError
from jaxtrain.planning.planner import Planner

MEASURED = efficiency.Efficiency(
    device=cards.CARDS["h100"].name, config="h100_8 --seed 3", jax="0.9.0", of_serial_bound=0.49
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    efficiency.write(path, dataclasses.replace(MEASURED, of_serial_bound=0.1))
    efficiency.write(path, MEASURED)
    assert efficiency.load(path) == MEASURED


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("not json", "as an efficiency file: it is not JSON"),
        ("[1, 2]", "as an efficiency file: it is not a JSON object"),
        ("[" * 100_000, "as an efficiency file: "),
        ("{}", "'of_serial_bound' is missing"),
        (json.dumps(dataclasses.asdict(MEASURED) | {"of_serial_bound": []}), "float"),
        (
            json.dumps(dataclasses.asdict(MEASURED) | {"of_serial_bound": 0}),
            "of_serial_bound 0 is not one",
        ),
        (
            json.dumps(dataclasses.asdict(MEASURED) | {"of_serial_bound": 49}),
            "of_serial_bound 49 is not",
        ),
        (json.dumps(dataclasses.asdict(MEASURED) | {"of_serial_bound": 10**400}), "too large"),
        (
            json.dumps(dataclasses.asdict(MEASURED) | {"of_serial_bound": float("nan")}),
            "of_serial_bound nan",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        efficiency.load(path)
    said = str(caught.value)
    assert expected in said
    assert said.startswith(f"{path} cannot be read")
    assert "write one with jaxtrain bench NAME --efficiency FILE" in said
    assert len(said.splitlines()) == 1
    assert len(said) < 500


def test_a_plan_takes_the_file_of_its_gpu_only(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    efficiency.write(path, MEASURED)
    planner = Planner("h100_8", [], None, None, None, efficiency=path)
    assert planner.messages[-1].startswith(f"{path} was measured with jax 0.9.0; this is jax ")
    with pytest.raises(InputError, match=r"measured on NVIDIA H100.*plan is for NVIDIA A10 "):
        Planner("h100_8", [], "a10", None, None, efficiency=path)
