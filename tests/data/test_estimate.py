"""Estimates of time and bytes from a sample."""

import pytest

from jaxtrain.data import estimate
from jaxtrain.data.estimate import MeasuredFile
from jaxtrain.errors import BadExample


def measured(size: int, seconds: float, written: float) -> MeasuredFile:
    return MeasuredFile(size=size, seconds=seconds, written=written)


def test_a_sample_is_spread_over_the_sizes() -> None:
    assert estimate.spread(range(1600), lambda size: -size, 4) == [1399, 999, 599, 199]
    assert estimate.spread([5, 3, 9], lambda size: size, 4) == [3, 5, 9]
    assert estimate.spread([], len) == []


def test_time_and_bytes_are_in_proportion_to_size() -> None:
    found = estimate.from_sample([measured(10, 1, 30), measured(20, 2, 60)], 40, 600)
    assert (found.seconds, found.out_bytes, found.error) == (60, 1800, 0)
    found = estimate.from_sample([measured(10, 1, 10), measured(10, 3, 10)], 4, 40)
    assert (found.seconds, found.out_bytes) == (8, 40)
    assert found.error == pytest.approx(0.5)  # standard error 1 of a mean of 2


def test_a_dropped_file_takes_its_part_of_the_result() -> None:
    broken = MeasuredFile(size=10, seconds=0.5, written=0, dropped=BadExample("b", "broken"))
    found = estimate.from_sample([measured(10, 1, 30), broken], 4, 40)
    assert (found.seconds, found.out_bytes) == (3, 60)
    assert [str(one) for one in found.dropped] == ["b: broken"]


def test_one_file_no_file_and_empty_files() -> None:
    assert estimate.from_sample([measured(10, 1, 30)], 1, 10).error is None
    for sample in ([], [measured(0, 1, 0)], [measured(0, 1, 0)] * 2):
        found = estimate.from_sample(sample, len(sample), 0)
        assert (found.seconds, found.out_bytes) == (0, 0)
