"""Optional sections, switched on and off from the command line; test_config.py has the rest."""

from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.errors import InputError


def video(*arguments: str) -> Any:
    return config.load("h100_16", [*arguments]).model


def test_a_field_switches_its_section_on() -> None:
    on = video("--model.adversary.weight", "0.3", "--model.perceptual.weights=a.pth")
    assert (on.adversary.weight, on.adversary.replay) == (0.3, 1152)
    assert (on.perceptual.weights, on.teacher) == ("a.pth", None)
    again = overrides.apply(on, ["--adversary.crop", "64"])
    assert (again.adversary.weight, again.adversary.crop) == (0.3, 64)
    assert overrides.apply(on, ["--adversary", "None"]).adversary is None
    assert (
        overrides.apply(on, ["--adversary", "None", "--adversary.crop", "8"]).adversary.weight
        == 0.5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.perceptual.weight", "1"], r"also needs --model.perceptual.weights$"),
        (["--model.adversary.wight", "1"], r"--model.adversary.wight is no field .* mean weight\?"),
        (
            ["--model.adversary.weight", "abc"],
            r"adversary.weight takes a number, not 'abc'",
        ),
        (["--model.adversary.weight", "-1"], r"model.adversary.weight=-1.0: use more than 0"),
        (["--model.adversary", "0.5"], r"--model.adversary takes .* or None, not '0.5'"),
    ],
)
def test_sections_that_cannot_be_switched_on_say_why(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        video(*arguments)
