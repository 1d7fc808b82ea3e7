"""Numbers for people, with their units."""

import pytest

from jaxtrain import formats


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (500_000, "488.3 KiB"),
        (1.7 * 2**40, "1.7 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(count: float, text: str) -> None:
    assert formats.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (45.4, "45s"),
        (59.7, "1m00s"),
        (200, "3m20s"),
        (3599.6, "1h00m"),
        (72 * 3600 - 31, "71h59m"),
        (72 * 3600 - 29, "3d00h"),
        (102 * 3600, "4d06h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (0.01, 0.01, "36 s"),
        (0.5, 1.2, "30 to 72 min"),
        (0.5, 3, "30 min to 3 h"),
        (54.21, 136.4, "54.2 to 136 h"),
    ],
)
def test_a_range_of_hours(least: float, most: float, text: str) -> None:
    assert formats.hours(least, most) == text


def test_numbers_of_a_table_are_flush_right() -> None:
    assert formats.columns([("name", "size"), ("a", "7")], {0}) == "name  size\na        7"
