"""Overrides of optional sections, and whole numbers such as 2.5M; test_run.py has the rest."""

import dataclasses
import pickle
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config import field_values, overrides
from jaxtrain.errors import InputError, fields_of


def video(*arguments: str) -> Any:
    return config.load("h100_16", [*arguments]).model


def test_a_field_enables_its_section() -> None:
    on = video("--model.adversary.weight", "0.3", "--model.perceptual.weights=a.pth")
    assert (on.adversary.weight, on.adversary.replay) == (0.3, 1024)
    assert (on.perceptual.weights, on.teacher) == ("a.pth", None)
    again = overrides.apply(on, ["--adversary.crop", "64"])
    assert (again.adversary.weight, again.adversary.crop) == (0.3, 64)
    assert overrides.apply(on, ["--adversary", "None"]).adversary is None
    assert (
        overrides.apply(on, ["--adversary", "None", "--adversary.crop", "8"]).adversary.weight
        == 0.5
    )


SECTIONS = {
    "optim.muon": ("peak_lr", 0.1),
    "optim.average": ("decay", 0.9),
    "model.adversary": ("crop", 64),
    "model.perceptual": ("weights", "a.pth"),
}


def section_of(run: Any, name: str) -> Any:
    return getattr(getattr(run, name.split(".")[0]), name.split(".")[1])


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("from_python", [False, True])
def test_none_turns_a_section_off_whatever_precedes_it(name: str, from_python: bool) -> None:
    """The last value counts, as in every field."""
    field, value = f"{name}.{SECTIONS[name][0]}", SECTIONS[name][1]

    def changed(run: config.Run, changes: dict[str, Any]) -> Any:
        words = [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]
        return run.override(changes) if from_python else overrides.apply(run, words)

    off = config.load("h100_16")
    on = changed(off, {field: value})
    for run in (off, on):
        assert section_of(changed(run, {field: value, name: None}), name) is None
        again = changed(run, {name: None, field: value})
        assert again == on
    other = {field: value, name: None, "loop.log_every": 7}
    assert changed(off, other) == changed(off, {"loop.log_every": 7})


def test_merged_overrides_keep_the_order_of_the_last_values() -> None:
    field = ("--optim.muon.peak_lr", "0.1")
    off = ("--optim.muon", "None")
    assert overrides.merged(off, field, off) == (*field, *off)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.perceptual.weight", "1"], r"also needs --model.perceptual.weights$"),
        (
            ["--model.adversary.wight", "1"],
            r"unknown field --model.adversary.wight; .* mean --model.adversary.weight\?",
        ),
        (
            ["--model.adversary.weight", "abc"],
            r"adversary.weight takes a number, not 'abc'",
        ),
        (["--model.adversary.weight", "-1"], r"model.adversary.weight=-1.0: use a number above 0"),
        (["--model.adversary", "0.5"], r"--model.adversary takes .* or None, not '0.5'"),
    ],
)
def test_a_section_that_cannot_be_enabled_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        video(*arguments)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500k", 500_000),
        ("2.5M", 2_500_000),
        ("10M", 10_000_000),
        ("1B", 10**9),
        ("1_000k", 10**6),
        ("0.001k", 1),
        ("-2k", -2000),
        ("0.0001k", None),
        ("500", None),
        ("5K", None),
        ("1.5", None),
        ("k", None),
    ],
)
def test_a_whole_number_with_a_suffix(text: str, number: int | None) -> None:
    assert field_values.whole_number(text) == number


def test_a_suffix_must_give_a_whole_number() -> None:
    with pytest.raises(InputError, match=r"--data.max_examples takes a whole number.*'0.0001k'"):
        config.load("demo_mlm", ["--data.max_examples", "0.0001k"])


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 1
    """Never above 9."""

    def __post_init__(self) -> None:
        if self.size > 9:
            raise InputError("too large, and other.words do not name it", about="inner.size")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    other: int = 0
    """Another field."""


def test_an_error_is_assigned_to_its_override() -> None:
    """The text of the error does not matter."""
    arguments = ["--inner.size", "10", "--other", "7", "--othr", "3"]
    applied, found = overrides.apply_fitting(Outer(), arguments)
    assert applied == Outer(other=7)
    assert [fields_of(message) for message in found] == [("othr", "other"), ("inner.size",)]
    assert pickle.loads(pickle.dumps(found[1])).about == ("inner.size",)


def test_a_section_may_need_other_fields_of_the_same_command() -> None:
    """Wan 2.2 has latents of 16x16 pixels, which `h100_8` has not."""
    teacher = ["--model.teacher.network", "wan2.2", "--model.teacher.weights", "vae"]
    fields = ["--model.patch_size", "2", "--model.latent_channels", "48"]
    for typed in ([*teacher, *fields], [*fields, *teacher]):
        model = overrides.apply(config.named("h100_8"), typed).model
        assert (model.patch_size, model.teacher.network) == (2, "wan2.2")
    with pytest.raises(InputError, match=r"^model.patch_size=1: .*: set --model.patch_size 2$"):
        overrides.apply(config.named("h100_8"), [*teacher, "--model.latent_channels", "48"])
    with pytest.raises(InputError, match=r"did you mean --model.patch_size"):
        overrides.apply(config.named("h100_8"), [*teacher, "--model.patch_sise", "2"])
