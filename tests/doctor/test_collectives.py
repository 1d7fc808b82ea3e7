"""Doctor's all-reduce and exchanges over eight virtual devices, and the rates of described GPUs."""

import concurrent.futures
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import pytest
from distributed.fake_key_value import FakeClient
from doctor.examined import all_ok, only_problem, only_warning, subject

from jaxtrain.bench.peaks import Peaks
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import collectives
from jaxtrain.doctor.finding import Finding


def test_the_sum_is_exact_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight devices sends 2 x 7 / 8 of 4 MiB, in 2 ms on this clock."""
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 0.002).__next__)
    monkeypatch.setattr(collectives, "time", clock)
    checks = collectives.checks(subject(tmp_path))
    seen = all_ok(checks["all-reduce"]())
    assert "an all-reduce of 4 MiB over 8 devices is exact, at 3.67 GB/s" in seen


def test_one_wrong_sum_is_found() -> None:
    def build(over: jax.sharding.NamedSharding) -> collectives.Reduce:
        right = collectives.summing(over)
        return jax.jit(lambda rows: right(rows).at[12345].add(1.0))

    found = only_problem(collectives.all_reduce(jax.devices(), 1, build))
    assert "over 8 devices is wrong on 8 of this process's" in found.seen
    assert "for example 1 of 1,048,576 sums on device" in found.seen
    assert "do not train here" in found.cure


def test_a_slow_link_is_reported() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    inside = collectives.judge_reduce("seen", 300e9, h100, 8, 1)
    assert (inside.level, inside.seen) == (
        "ok",
        "seen, 67% of 450 GB/s in the node (30% is enough: assumed)",
    )
    slow = only_warning([collectives.judge_reduce("seen", 20e9, h100, 8, 1)])
    assert "4% of 450 GB/s in the node (30% is enough: assumed)" in slow.seen
    assert "NCCL_DEBUG=INFO" in slow.cure
    assert (
        "20% of 100 GB/s between nodes" in collectives.judge_reduce("seen", 20e9, h100, 2, 2).seen
    )
    assert collectives.judge_reduce("seen", 1, "cpu", 8, 1).seen == "seen"


class Gpu(NamedTuple):
    """Describes a device like jax."""

    local_hardware_id: int
    platform: str = "gpu"


USUAL = Peaks(700e12, 1.0, 2.9e12)


def measured(*each: list[Peaks]) -> list[Finding]:
    """Returns the findings of process 0, given the rates of the GPUs of all processes."""
    stores = FakeClient(len(each)).stores() if len(each) > 1 else [KeyValueStore()]

    def findings_of(process: int) -> list[Finding]:
        own: list[Any] = [Gpu(number) for number in range(len(each[process]))] or jax.devices()
        rates = collectives.rates(
            own,
            stores[process],
            f"n{process}",
            lambda device, at_most_s: each[process][device.local_hardware_id],
        )
        return list(rates)

    with concurrent.futures.ThreadPoolExecutor(len(each)) as pool:
        first, *others = pool.map(findings_of, range(len(each)))
    assert all(one == first for one in others)
    return first


def test_a_slow_gpu_is_named() -> None:
    found = only_warning(measured([USUAL, USUAL, Peaks(500e12, 1.0, 2.9e12), USUAL]))
    assert found.seen == (
        "GPU 2 of n0: bf16 matmuls at 500 TFLOP/s, against 700 in the median of 4 GPUs (measured)"
    )
    found = only_warning(measured([USUAL], [Peaks(700e12, 1.0, 1.5e12)], [USUAL]))
    assert found.seen.startswith("GPU 0 of n1: copies at 1,500 GB/s, against 2,900 in the median")
    assert all_ok(measured([USUAL], [])) == (
        "1 GPU, measured one by one: bf16 matmuls at 700 TFLOP/s or more\n"
        "1 GPU, measured one by one: copies at 2,900 GB/s or more"
    )
    assert measured([], []) == []  # CPUs are one machine


def test_partners_receive_from_each_other() -> None:
    """As many devices of each host take part as the smaller one has."""
    permutation = collectives.swaps([0, 1], [5, 6, 7])
    assert permutation == [(0, 5), (5, 0), (1, 6), (6, 1)]
    over = collectives.split(jax.devices())
    received = collectives.exchange(over, permutation)(collectives.rows_of(over, 2))
    no = [0, 0]
    assert received.tolist() == [[5, 6], [6, 7], no, no, no, [0, 1], [1, 2], no]


def test_a_host_or_link_that_exchanges_data_slowly_is_named() -> None:
    pairs = collectives.ring([f"n{number + 1}" for number in range(3)])
    assert pairs == [("n1", "n2"), ("n2", "n3"), ("n3", "n1")]
    assert collectives.ring(["a", "b"]) == [("a", "b")]
    found = only_warning(
        [collectives.judge_links({pair: 5e9 if "n2" in pair else 40e9 for pair in pairs})]
    )
    assert found.seen == (
        "hosts that exchange data slowly, against 40 GB/s between others (measured): n1 and n2 at "
        "5 GB/s; n2 and n3 at 5 GB/s; host n2 is slow"
    )
    one = {pair: 5e9 if pair == ("n2", "n3") else 40e9 for pair in pairs}
    found = only_warning([collectives.judge_links(one)])
    assert found.seen.endswith("(measured): n2 and n3 at 5 GB/s")
    good = {pair: 30e9 if "n2" in pair else 40e9 for pair in pairs}
    assert all_ok([collectives.judge_links(good)]) == (
        "3 pairs of hosts exchange data at 30 GB/s or more in each direction (measured)"
    )


class FourProcesses(KeyValueStore):
    """Of this process and three more: on host n2, and two containers on n3, whose links are slow.

    An exchange takes 10 s with n3, and otherwise 1 s.
    """

    def gather(self, topic: str, text: str, timeout_s: float) -> list[str]:
        if topic == "host of a link":
            return [text, *map(json.dumps, (["b", "n2"], ["c", "n3"], ["c", "n3-1"]))]
        call = self.numbered(topic)
        return [text, "1.0", "1.0", "1.0"] if call == "link/0" else [text, "1.0", "10.0", "9.0"]


def test_hosts_exchange_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of each host send 2 MiB; the tests have only this process's devices."""
    devices = jax.devices()
    assert list(collectives.links(devices, KeyValueStore(), "n1")) == []  # one host
    monkeypatch.setattr(
        collectives, "owner", lambda device, processes: processes[device.id * 4 // 8][0]
    )
    found = only_warning(collectives.links(devices, FourProcesses(), "n1"))
    assert found.seen == (
        "hosts that exchange data slowly, against 4.194 MB/s between others (measured): n2 and "
        "n3 at 419.4 kB/s; n3 and n1 at 419.4 kB/s; host n3 is slow"
    )
    assert found.cure.startswith("every step waits for them: check the cable")
