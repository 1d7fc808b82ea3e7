"""Doctor's all-reduce, over the eight virtual devices of the tests."""

import itertools
from pathlib import Path

import jax
import pytest
from examined import all_ok, only_problem, only_warning, subject

from jaxtrain.doctor import collective


def test_the_sum_is_exact_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight devices sends 2 x 7 / 8 of 4 MiB, in 2 ms on this clock."""
    monkeypatch.setattr(collective.time, "perf_counter", itertools.count(0.0, 0.002).__next__)
    checks = collective.checks(subject(tmp_path))
    seen = all_ok(checks["all-reduce"]())
    assert "an all-reduce of 4 MiB over 8 devices is exact, at 3.67 GB/s" in seen


def test_one_device_has_nothing_to_reduce() -> None:
    seen = all_ok(collective.all_reduce(jax.devices()[:1], 1))
    assert seen == "one device: nothing to reduce"


def test_one_wrong_sum_is_found() -> None:
    def build(mesh: jax.sharding.Mesh) -> collective.Reduce:
        right = collective.summing(mesh)
        return jax.jit(lambda rows: right(rows).at[12345].add(1.0))

    found = only_problem(collective.all_reduce(jax.devices(), 1, build))
    assert "over 8 devices is wrong on 8 of this process's" in found.seen
    assert "for example 1 of 1,048,576 sums on device" in found.seen
    assert "do not train here" in found.cure


def test_a_device_that_contributes_nothing_is_found() -> None:
    def build(mesh: jax.sharding.Mesh) -> collective.Reduce:
        right = collective.summing(mesh)
        return jax.jit(lambda rows: right(rows.at[5].set(0.0)))

    assert (
        "1,048,576 of 1,048,576"
        in only_problem(collective.all_reduce(jax.devices(), 1, build)).seen
    )


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """Eight A100: 1,073,741,824 bytes in 5503.4 us were printed as 195.10 algbw and 341.4 busbw."""
    rate = collective.bus_bandwidth(2**30, 8, 5503.4e-6)
    assert rate / 1e9 == pytest.approx(195.10 * 2 * 7 / 8, rel=1e-3)


def test_a_slow_link_is_reported() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    inside = collective.judged("seen", 300e9, h100, 8, 1)
    assert (inside.level, inside.seen) == (
        "ok",
        "seen, 67% of 450 GB/s in the node (30% is enough: assumed)",
    )
    slow = only_warning([collective.judged("seen", 20e9, h100, 8, 1)])
    assert "4% of 450 GB/s in the node (30% is enough: assumed)" in slow.seen
    assert "NCCL_DEBUG=INFO" in slow.cure
    assert "20% of 100 GB/s between nodes" in collective.judged("seen", 20e9, h100, 2, 2).seen
    assert collective.judged("seen", 1, "cpu", 8, 1).seen == "seen"
