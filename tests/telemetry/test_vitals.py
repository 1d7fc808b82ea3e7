"""What a machine says while it trains."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import LOST, UNSUPPORTED, Nvml, card

from jaxtrain.telemetry import vitals
from jaxtrain.telemetry.devices import GIB
from jaxtrain.telemetry.host_memory import Shared

ON_CPU = [SimpleNamespace(platform="cpu", local_hardware_id=None)]


def on_gpus(count: int) -> list[Any]:
    return [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in range(count)]


class Watched:
    """Vitals of a machine that says what a test wants; ends with the test."""

    def __init__(self, devices: list[Any], nvml: Any, **more: Any) -> None:
        self.said: list[str] = []
        self.nvml = nvml
        readers = {"read_host": lambda: None, "read_shared": lambda: None} | more
        self.vitals = vitals.Vitals(
            {}, devices, self.said.append, every_s=0.001, nvml=nvml, **readers
        )

    def until(self, enough: Callable[[dict[str, float]], Any]) -> dict[str, float]:
        """The first window that is enough."""
        deadline = time.monotonic() + 20
        while not enough(found := self.vitals.window()):
            assert time.monotonic() < deadline, found
            time.sleep(0.005)
        return found


@pytest.fixture
def watch() -> Any:
    made: list[Watched] = []

    def begin(*args: Any, **more: Any) -> Watched:
        made.append(Watched(*args, **more))
        return made[-1]

    yield begin
    for one in made:
        one.vitals.close()
        assert one.nvml.opened == 0
        assert not one.vitals._thread.is_alive()


def test_mean_over_the_gpus_and_the_hottest_of_them(watch: Any) -> None:
    nvml = Nvml(card("GPU-1", 80, 400, 50), card("GPU-2", 100, 500, 70), card("GPU-3", 0, 0, 99))
    watched = watch(on_gpus(2), nvml)
    assert watched.until(bool) == {
        "train/gpu_utilization": pytest.approx(0.9),
        "train/gpu_power_w": pytest.approx(450.0),
        "train/gpu_temperature_c": 70.0,
    }
    assert not watched.said


def test_what_no_gpu_says_has_no_value_and_what_one_says_is_its_own(watch: Any) -> None:
    nvml = Nvml(card("GPU-1", UNSUPPORTED, 400, UNSUPPORTED), card("GPU-2", 60, 600, UNSUPPORTED))
    assert watch(on_gpus(2), nvml).until(bool) == {
        "train/gpu_utilization": pytest.approx(0.6),
        "train/gpu_power_w": pytest.approx(500.0),
    }


def test_a_window_forgets_the_one_before(watch: Any) -> None:
    hot = card("GPU-1", 100, 700, 90)
    watched = watch(on_gpus(1), Nvml(hot))
    watched.until(bool)
    hot |= {"share": 0, "watts": 100, "celsius": 40}
    cold = {"train/gpu_utilization": 0.0, "train/gpu_power_w": 100.0, "train/gpu_temperature_c": 40}
    assert watched.until(lambda found: found == cold) == cold


def test_a_driver_that_dies_is_mentioned_once_and_the_host_goes_on(watch: Any) -> None:
    gpu = card("GPU-1")
    watched = watch(on_gpus(1), Nvml(gpu), read_host=lambda: GIB)
    watched.until(lambda found: "train/gpu_power_w" in found)
    gpu["watts"] = LOST
    watched.until(lambda found: watched.said)
    assert watched.until(lambda found: len(found) == 1) == {"train/host_memory_gib": 1.0}
    gpu["watts"] = 300
    time.sleep(0.05)
    assert watched.vitals.window() == {"train/host_memory_gib": 1.0}
    (line,) = watched.said
    assert line == "utilisation, power and temperature are no longer recorded: GPU is lost"


def test_without_a_driver_a_run_on_gpus_says_so_and_one_on_the_cpu_does_not(watch: Any) -> None:
    (line,) = watch(on_gpus(1), Nvml(absent=True)).said
    assert "not recorded: NVML Shared Library Not Found" in line
    on_cpu = watch(ON_CPU, Nvml(absent=True))
    assert on_cpu.vitals.window() == {}
    assert not on_cpu.said


def test_memory_of_the_host_is_the_most_of_the_window_and_known_in_each(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "_HOST_EVERY_S", 0.0)
    monkeypatch.setattr(vitals, "_HOST_SHARE", 1.0)
    sizes = iter([2 * GIB, 5 * GIB, 3 * GIB])
    last = []

    def read() -> int | None:
        last.append(next(sizes, None))
        return last[-1]

    watched = watch(ON_CPU, Nvml(absent=True), read_host=read)
    deadline = time.monotonic() + 20
    while None not in last:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert watched.vitals.window() == {"train/host_memory_gib": 5.0}
    assert watched.vitals.window() == {"train/host_memory_gib": 3.0}


def test_memory_of_the_host_is_read_seldom(watch: Any) -> None:
    asked = []
    watched = watch(ON_CPU, Nvml(absent=True), read_host=lambda: asked.append(1) or GIB)
    watched.until(bool)
    time.sleep(0.05)
    assert len(asked) == 1


def test_a_full_shared_memory_is_mentioned_once_with_sizes_and_cure(watch: Any) -> None:
    size = 64 * 2**20
    filled = [0.5]
    watched = watch(
        ON_CPU, Nvml(absent=True), read_shared=lambda: Shared(int(filled[0] * size), size)
    )
    assert watched.until(bool) == {"train/shm_gib": 1 / 32}
    assert not watched.said
    filled[0] = 0.95
    watched.until(lambda found: watched.said)
    time.sleep(0.05)
    (line,) = watched.said
    assert "/dev/shm is 95% full (measured: 61 of 64 MiB)" in line
    for cure in ("--shm-size", "--data.prefetch", "--data.workers"):
        assert cure in line


def test_gpus_that_nvml_does_not_find_are_named_once(watch: Any) -> None:
    watched = watch(on_gpus(2), Nvml(card("GPU-1")), read_host=lambda: GIB)
    assert watched.until(bool) == {"train/host_memory_gib": 1.0}
    (line,) = watched.said
    assert "NVML does not find this process's GPUs [0, 1] (CUDA_VISIBLE_DEVICES: not set)" in line
