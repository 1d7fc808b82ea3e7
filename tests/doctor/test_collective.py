"""Doctor's all-reduce, over the eight virtual devices of the tests."""

import itertools
import math
from pathlib import Path

import jax
import pytest
from examined import all_ok, only_problem, only_warning, subject

from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import collective
from jaxtrain.training.link_rates import ExchangeSizes, LinkRates, LinkSeconds


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


def _rates(hosts: int, slow: dict[tuple[int, ...], float]) -> dict[tuple[int, int], float]:
    """Returns the rates of all pairs; ``slow`` holds those of hosts and of pairs."""
    return {
        pair: slow.get(pair, min(slow.get((host,), 40e9) for host in pair))
        for pair in itertools.combinations(range(hosts), 2)
    }


def test_a_host_or_link_that_exchanges_data_slowly_is_named() -> None:
    names = ["n1", "n2", "n3", "n4"]
    for hosts in (3, 4):
        found = only_warning(collective.judged_links(_rates(hosts, {(1,): 5e9}), names[:hosts]))
        assert found.seen == (
            "host n2 exchanges data with others at 5 GB/s at most, the other hosts at 40 GB/s "
            "(measured)"
        )
        found = only_warning(collective.judged_links(_rates(hosts, {(0, 2): 5e9}), names[:hosts]))
        assert found.seen.startswith("hosts n1 and n3 exchange data at 5 GB/s, other pairs at 40")
    assert all_ok(collective.judged_links(_rates(4, {(1,): 30e9}), names)) == (
        "6 pairs of 4 hosts exchange data at 30 to 40 GB/s in each direction (measured)"
    )
    # Two hosts have one link, which is compared with nothing.
    assert "1 pair of 2 hosts" in all_ok(collective.judged_links({(0, 1): 5e9}, names[:2]))


class TwoProcesses(KeyValueStore):
    """Of this process and of one that is on host n9; only this one measures."""

    def gather(self, topic: str, text: str, timeout_s: float) -> list[str]:
        return [text, {"host of a link": "n9", "machine of a link": "another"}.get(topic, "[]")]


class ThreeHosts(LinkRates):
    """Measures the eight devices of the tests as those of three hosts; the third one is slow."""

    def __init__(self, devices: list[jax.Device], hosts: list[str], sizes: ExchangeSizes) -> None:
        assert hosts == ["n1"] * 8
        super().__init__(devices, [*["n1"] * 2, *["n2"] * 3, *["n3"] * 3], ExchangeSizes(64, 1, 1))
        self._sizes = sizes

    def __call__(self) -> LinkSeconds:
        seconds = [[0.001] * 3] * 5 + [[0.005] * 3, [0.004] * 3, [math.nan] * 3]
        assert len(super().__call__().seconds) == len(seconds)
        return LinkSeconds(seconds, 0.1)


def test_the_devices_of_pairs_of_hosts_exchange_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of each host send 8 x 256 KiB: 4 MiB in 1 ms, or on the third host in 5 ms."""
    monkeypatch.setattr(collective, "LinkRates", ThreeHosts)
    assert list(collective.links(jax.devices(), KeyValueStore(), "n1")) == []  # one host
    found = only_warning(collective.links(jax.devices(), TwoProcesses(), "n1"))
    assert found.seen == (
        "host n3 exchanges data with others at 0.839 GB/s at most, the other hosts at 4.19 GB/s "
        "(measured)"
    )
    assert found.cure.startswith("every step waits for it: check the cable")
