"""The rates of links between hosts, and which of them are slow."""

from typing import Any

import jax
import pytest
from examined import all_ok, only_warning

from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import links

SENT, EXCHANGES = 2**12, 3
HOSTS = ["n1", "n1", "n2", "n2", "n2", "n3", "n3", "n3"]


def test_each_host_meets_the_next_one() -> None:
    assert links.neighbors(2) == [(0, 1)]
    assert links.neighbors(3) == [(0, 1), (1, 2), (2, 0)]
    assert len(links.neighbors(8)) == 8


def test_partners_receive_from_each_other() -> None:
    permutation = links.swaps([[0, 1], [2, 3], [5, 6]], (0, 2))
    assert permutation == [(0, 5), (5, 0), (1, 6), (6, 1)]


def test_the_data_is_sent_as_often_as_the_size_says() -> None:
    """Each device adds 1 before it sends, and receives what its partner has."""
    devices = jax.devices()
    swap = links.exchange(devices, [(0, 5), (5, 0)], SENT, EXCHANGES)
    text = swap.as_text()
    assert f"f32[{SENT // 4}]" in next(
        line for line in text.splitlines() if " collective-permute(" in line
    )
    seeds = jax.device_put(jax.numpy.arange(8.0) * 100, links.split(devices))
    assert swap(seeds).tolist() == [503.0, 0, 0, 0, 0, 3.0, 0, 0]


def test_as_many_devices_of_each_host_take_part_as_the_smallest_has() -> None:
    assert links.devices_of(["n1", "n2", "n3"], HOSTS) == [[0, 1], [2, 3], [5, 6]]


def test_the_shortest_time_counts_after_an_exchange_in_which_processes_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = jax.devices()
    swap = links.exchange(devices, [(0, 5), (5, 0)], SENT, EXCHANGES)
    clock = iter([0.0, 9.0, 9.0, 12.0, 12.0, 20.0, 20.0, 22.0, 22.0, 29.0])
    monkeypatch.setattr(links.time, "perf_counter", lambda: next(clock))
    assert links.seconds_of([swap], devices) == [2.0]


def test_containers_on_one_machine_are_one_host() -> None:
    hosts, machines = ["pod-0", "pod-1", "pod-2", "pod-0"], ["a", "a", "b", "c"]
    assert links.machine_names(hosts, machines) == [
        *("pod-0, pod-1", "pod-0, pod-1", "pod-2", "pod-0")
    ]


def _rates(hosts: int, slow: dict[tuple[int, ...], float]) -> dict[tuple[int, int], float]:
    """Returns the rates of all pairs; ``slow`` holds those of hosts and of pairs."""
    return {
        pair: slow.get(pair, min(slow.get((host,), 40e9) for host in pair))
        for pair in links.neighbors(hosts)
    }


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_a_host_or_link_that_exchanges_data_slowly_is_named(hosts: int) -> None:
    names = [f"n{number + 1}" for number in range(hosts)]
    found = only_warning(links.judged(_rates(hosts, {(1,): 5e9}), names))
    expected = "host n2 exchanges data at 5 GB/s at most, against 40 GB/s between others (measured)"
    assert found.seen == expected
    found = only_warning(links.judged(_rates(hosts, {(1, 2): 5e9}), names))
    assert found.seen.startswith("hosts n2 and n3 exchange data at 5 GB/s, against 40 GB/s")
    assert all_ok(links.judged(_rates(hosts, {(1,): 30e9}), names)) == (
        f"{hosts} pairs of {hosts} hosts exchange data at 30 GB/s to 40 GB/s in each direction "
        "(measured)"
    )


def test_two_hosts_have_one_link_which_is_compared_with_nothing() -> None:
    for rate, text in ((5e9, "5 GB/s"), (1.2e12, "1,200 GB/s")):
        seen = all_ok(links.judged({(0, 1): rate}, ["n1", "n2"]))
        assert seen == f"1 pair of 2 hosts exchange data at {text} in each direction (measured)"


class FourProcesses(KeyValueStore):
    """Of this process and of three more on hosts n2 and n3; a pair takes 1 ms, with n3 5."""

    def gather(self, topic: str, text: str, timeout_s: float) -> list[str]:
        others = {
            "host of a link": ["n2", "n3", "n3"],
            "machine of a link": ["b", "c", "c"],
            "links": ["[1e-3, 1e-3, 1e-3]", "[1e-3, 5e-3, 1e-3]", "[1e-3, 1e-3, 5e-3]"],
        }
        return [text, *others[topic]]


def test_hosts_exchange_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of each host send 8 x 256 KiB: 4 MiB in 1 ms, or on the third host in 5 ms."""
    real_devices, real_seconds = links.devices_of, links.seconds_of

    def of_three_hosts(names: list[str], hosts: list[str]) -> list[list[int]]:
        assert hosts == ["n1"] * 8  # the tests have only this process's devices
        return real_devices(names, HOSTS)

    def seconds(programs: list[Any], devices: list[jax.Device]) -> list[float]:
        assert len(real_seconds(programs, devices)) == 3
        return [1e-3] * 3

    monkeypatch.setattr(links, "devices_of", of_three_hosts)
    monkeypatch.setattr(links, "seconds_of", seconds)
    assert list(links.links(jax.devices(), KeyValueStore(), "n1")) == []  # one host
    found = only_warning(links.links(jax.devices(), FourProcesses(), "n1"))
    assert found.seen == (
        "host n3 exchanges data at 0.839 GB/s at most, against 4.19 GB/s between others (measured)"
    )
    assert found.cure.startswith("every step waits for it: check the cable")
