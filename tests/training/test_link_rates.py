"""The rates of links between hosts, and which of them are slow."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from jaxtrain import config
from jaxtrain.sharding import make_mesh
from jaxtrain.training import link_rates
from jaxtrain.training.link_rates import ExchangeSizes, LinkRates, SlowLink, slow_links

SIZES = ExchangeSizes(sent=2**12, exchanges=3, times=2)
HOSTS = ["n1", "n1", "n2", "n2", "n2", "n3", "n3", "n3"]


@pytest.mark.parametrize("hosts", range(2, 10))
def test_every_host_meets_every_other_one(hosts: int) -> None:
    rounds = list(link_rates.disjoint_pairs(hosts))
    every = [pair for pairs in rounds for pair in pairs]
    assert sorted(every) == list(itertools.combinations(range(hosts), 2))
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)


def test_partners_receive_from_each_other() -> None:
    permutation = link_rates.swaps([[0, 1], [2, 3], [5, 6]], [(0, 2)])
    assert permutation == [(0, 5), (5, 0), (1, 6), (6, 1)]


def test_the_data_is_sent_as_often_as_the_size_says() -> None:
    """Each device adds 1 before it sends, and receives what its partner has."""
    devices = jax.devices()
    swap = link_rates.exchange(devices, [(0, 5), (5, 0)], SIZES)
    text = swap.as_text()
    assert f"f32[{SIZES.sent // 4}]" in next(
        line for line in text.splitlines() if " collective-permute(" in line
    )
    measure = LinkRates(devices, HOSTS, SIZES)
    seeds = jax.device_put(jax.numpy.arange(8.0) * 100, measure._seeds.sharding)
    assert swap(seeds).tolist() == [503.0, 0, 0, 0, 0, 3.0, 0, 0]


def test_each_device_of_the_process_is_measured() -> None:
    measure = LinkRates(jax.devices(), HOSTS, SIZES)
    assert measure.names == ["n1", "n2", "n3"]
    assert measure.of_host == [[0, 1], [2, 3], [5, 6]]  # as many as the smallest host has
    assert measure.rounds == [[(1, 2)], [(0, 1)], [(0, 2)]]
    began = time.perf_counter()
    found = measure()
    took_s = time.perf_counter() - began
    assert [len(seconds) for seconds in found.seconds] == [3] * 8
    assert all(0 < one < took_s for seconds in found.seconds for one in seconds)
    # Each of two times per round, and the exchanges that are not measured.
    assert max(map(sum, found.seconds)) < found.cost_s < 2 * took_s


def test_the_memory_of_an_exchange_is_allocated_on_each_device_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocated: list[tuple[jax.Device, int]] = []
    real = jax.numpy.zeros

    def zeros(count: int, *, device: jax.Device) -> jax.Array:
        found = real(count, device=device)
        allocated.append((device, found.nbytes))
        return found

    measure = LinkRates(jax.devices(), HOSTS, SIZES)
    monkeypatch.setattr(link_rates.jnp, "zeros", zeros)
    measure.check_memory()
    assert allocated == [(device, 2 * SIZES.sent) for device in jax.devices()]


def test_the_shortest_time_counts_after_an_exchange_in_which_processes_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([[9.0, 3.0, 2.0], [9.0, 5.0, 4.0], [9.0, 7.0, 8.0]])
    times = itertools.chain.from_iterable(rounds)

    def seconds(
        run: Callable[[], jax.Array], devices: Sequence[jax.Device], *_: Any
    ) -> list[float]:
        assert run().shape == (8,)
        return [next(times)] * len(devices)

    monkeypatch.setattr(link_rates.device_rates, "seconds_per_device", seconds)
    clock = iter([100.0, 130.0])
    found = LinkRates(jax.devices(), HOSTS, SIZES, lambda: next(clock))()
    assert found.seconds == [[2.0, 4.0, 7.0]] * 8
    assert found.cost_s == 30.0 + 2.0  # the first exchange began before


# Seconds of each device in the rounds of hosts (1, 2), (0, 1) and (0, 2).
USUAL_S = [[1.0, 1.0, 1.0] for _ in HOSTS]


def _with(seconds: dict[tuple[int, int], float]) -> list[list[float]]:
    """Returns usual seconds, but for those of a device (its place) in a round."""
    return [
        [seconds.get((place, turn), one) for turn, one in enumerate(rounds)]
        for place, rounds in enumerate(USUAL_S)
    ]


def test_a_pair_is_as_fast_as_the_slower_of_its_devices() -> None:
    measure = LinkRates(jax.devices(), HOSTS, SIZES)
    moved = SIZES.sent * SIZES.exchanges
    first, second = measure.rates(_with({(0, 1): 4.0, (5, 2): 2.0, (7, 0): 99.0}))
    assert first == {(1, 2): moved, (0, 1): moved / 4, (0, 2): moved / 2}
    assert second == {(1, 2): moved, (0, 1): moved, (0, 2): moved}  # of devices 1, 3 and 6


def test_devices_are_compared_with_those_of_the_same_place_on_other_hosts() -> None:
    moved = SIZES.sent * SIZES.exchanges
    measure = LinkRates(jax.devices(), HOSTS, SIZES)
    # The second device of each host has a slower adapter.
    slower = [[1.0 + place % 2 * 4] * 3 for place in (0, 1, 0, 1, 9, 0, 1, 9)]
    assert measure.slow(slower) == {}
    third = {(place, turn): 5.0 for place in (5, 6) for turn in (0, 2)}
    slow = SlowLink((2,), moved / 5, moved)
    assert measure.slow(_with(third)) == {((2,), 0): slow, ((2,), 1): slow}
    assert measure.slow(_with({(6, 0): 5.0, (6, 2): 5.0})) == {((2,), 1): slow}
    assert measure.slow(_with({(1, 2): 5.0})) == {((0, 2), 1): slow._replace(hosts=(0, 2))}


def test_a_link_that_is_slower_by_less_than_noise_is_not_slow() -> None:
    third = _with({(place, turn): 5.0 for place in (5, 6) for turn in (0, 2)})
    for least_s, found in ((3.9, 2), (4.1, 0)):
        sizes = SIZES._replace(least_s=least_s)
        assert len(LinkRates(jax.devices(), HOSTS, sizes).slow(third)) == found


def test_two_hosts_have_one_link_which_is_compared_with_nothing() -> None:
    assert slow_links({(0, 1): 5e9}) == []


def test_containers_on_one_machine_are_one_host() -> None:
    hosts, machines = ["pod-0", "pod-1", "pod-2", "pod-0"], ["a", "a", "b", "c"]
    assert link_rates.machine_names(hosts, machines) == [
        *("pod-0, pod-1", "pod-0, pod-1", "pod-2", "pod-0")
    ]


def test_the_links_of_fewer_than_three_hosts_are_not_measured() -> None:
    mesh = make_mesh(config.Mesh(data=1, fsdp=8, shard="none"))
    assert link_rates.between_hosts(mesh, ["n1"] * 8) is None
    assert link_rates.between_hosts(mesh, ["n1"] * 4 + ["n2"] * 4) is None
    found = link_rates.between_hosts(mesh, ["n1", "n2", "n3", "n4"] * 2)
    assert found is not None
    assert found.rounds == [[(0, 3), (1, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]]
