import pytest

from jaxtrain import config
from jaxtrain.config import numbers
from jaxtrain.errors import InputError


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
def test_whole(text: str, number: int | None) -> None:
    assert numbers.whole(text) == number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (500_000, "500k"),
        (2_500_000, "2.5M"),
        (10**9, "1B"),
        (1_234_567, "1,234,567"),
        (1_234_000, "1.234M"),
        (999, "999"),
        (0, "0"),
    ],
)
def test_readable(number: int, text: str) -> None:
    assert numbers.readable(number) == text
    assert numbers.whole(text) in (number, None)


@pytest.mark.parametrize(("text", "number"), [("2.5M", 2_500_000), ("1B", 10**9), ("70", 70)])
def test_the_command_line_takes_them_where_a_whole_number_belongs(text: str, number: int) -> None:
    run = config.load("demo_mlm", ["--data.max_examples", text, f"--loop.steps={text}"])
    assert (run.data.max_examples, run.loop.steps) == (number, number)
    assert config.load("demo_mlm", ["--data.path", text]).data.path == text


def test_what_is_no_whole_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"--data.max_examples takes a whole number.*'0.0001k'"):
        config.load("demo_mlm", ["--data.max_examples", "0.0001k"])
