"""Numbers of the page and of messages, with their units."""

import pytest

from jaxtrain.reporting import formats


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (500_000, "488 KiB"),
        (3.4 * 2**20, "3.4 MiB"),
        (2**30, "1.0 GiB"),
        (1.7 * 2**40, "1.7 TiB"),
        (2**51, "2,048.0 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(count: float, text: str) -> None:
    assert formats.size(count) == text
