"""Datasheet peaks, driver and GPUs with a fake NVML, host memory, and system metrics."""

import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from doctor.recorded_packages import H100, KERNEL
from telemetry.fake_nvml import LOST, UNSUPPORTED, Nvml, card

from jaxtrain.formats import GIB
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.hardware import Driver, Gpu, Shared

MIB = 2**20


def no_nvml() -> Nvml:
    return Nvml(fails=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


A, B, C = card("GPU-aaaa-1", 80), card("GPU-aabb-2", 90), card("GPU-cccc-3", 100)


def utilizations(nvml: Any, visible: str, ordinals: list[int]) -> list[float]:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    readings = hardware.Gpus(environment, ordinals, nvml).read()
    return readings.get("train/gpu_utilization", [])


def test_the_driver_with_its_gpus_and_their_memory() -> None:
    nvml = Nvml(card("GPU-1"), card("GPU-2", used=4 * MIB))
    assert hardware.driver(nvml) == Driver(
        "580.65.06",
        (
            Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * MIB, 0, "GPU-1"),
            Gpu(1, H100[0].name, 81559 * MIB, 4 * MIB, "GPU-2"),
        ),
    )
    assert nvml.opened == 0
    assert hardware.driver(Nvml(card("GPU-1", used=UNSUPPORTED))).gpus[0].memory == 0


@pytest.mark.parametrize(
    ("nvml", "failure"),
    [
        (Nvml(fails=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "NVML/RM version mismatch"),
        (Nvml(card("GPU-1", used=LOST)), "GPU is lost"),
        (Nvml(), "no devices were found"),
    ],
)
def test_a_broken_driver_has_a_failure(nvml: Nvml, failure: str) -> None:
    driver = hardware.driver(nvml)
    assert failure in driver.failure
    assert not driver.gpus
    assert nvml.opened == 0


def test_the_version_comes_from_the_kernel_without_nvml(tmp_path: Path) -> None:
    nvml = no_nvml()
    proc = tmp_path / "version"
    assert hardware.driver(nvml, proc) == hardware.Driver()
    proc.write_text(KERNEL)
    assert hardware.driver(nvml, proc).version == "550.90.07"
    proc.write_text("something else\n")
    assert hardware.driver(nvml, proc).failure.endswith("something else")


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-cccc-3, 1", [2, 1]),
        ("GPU-aab", [1]),  # a unique prefix
        ("GPU-aa", []),  # an ambiguous prefix
        ("0,-1,2", [0]),  # CUDA stops there
        ("7", []),
        ("", []),
    ],
)
def test_the_gpus_that_cuda_sees(visible: str | None, found: list[int]) -> None:
    assert hardware.visible(visible, ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]) == found


def test_only_the_gpus_of_this_process_are_read() -> None:
    assert utilizations(Nvml(A, B, C), "2,1", [1]) == [0.9]
    assert utilizations(Nvml(A, B, C), "2,1", [1, 2]) == []  # never the GPUs of other processes


HOLD = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
    own = bytearray(int(sys.argv[2]))
    own[::4096] = b"x" * len(own[::4096])
    sum(shared[::4096])
    print(flush=True)
    sys.stdin.read()
"""


def added_by_a_worker(file: Path, own: int) -> int:
    """Returns the bytes that a worker adds: ``own`` bytes, and a file that both processes map."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as shared:
        sum(shared[::4096])
        before = hardware.host_memory()
        command = [sys.executable, "-S", "-c", HOLD, str(file), str(own)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            held = hardware.host_memory()
            worker.communicate()
    assert before is not None
    assert held is not None
    return held - before


@pytest.mark.parametrize(("shared", "own"), [(100, 40)])
def test_workers_count_and_shared_pages_count_once(tmp_path: Path, shared: int, own: int) -> None:
    file = tmp_path / "shared"
    file.write_bytes(b"x" * shared * MIB)
    added = added_by_a_worker(file, own * MIB)
    assert own * MIB < added < (own + 30) * MIB  # an interpreter takes about ten


ON_CPU = [SimpleNamespace(platform="cpu", local_hardware_id=None)]


def on_gpus(count: int) -> list[Any]:
    return [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in range(count)]


class Watched:
    """System metrics of a fake machine; closed at the end of the test."""

    def __init__(self, devices: list[Any], nvml: Any, **more: Any) -> None:
        self.said: list[str] = []
        self.nvml = nvml
        readers = {"read_host": lambda: None, "read_shared": lambda: None} | more
        self.metrics = hardware.SystemMetrics(
            {}, devices, self.said.append, every_s=0.001, nvml=nvml, **readers
        )

    def until(self, enough: Callable[[dict[str, float]], Any]) -> dict[str, float]:
        """Returns the first window that satisfies the condition."""
        deadline = time.monotonic() + 20
        while not enough(found := self.metrics.window()):
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
        one.metrics.close()
        assert one.nvml.opened == 0
        assert not one.metrics._thread.is_alive()


def test_means_over_the_gpus_and_the_hottest_temperature(watch: Any) -> None:
    nvml = Nvml(card("GPU-1", 80, 400, 50), card("GPU-2", 100, 500, 70), card("GPU-3", 0, 0, 99))
    watched = watch(on_gpus(2), nvml)
    assert watched.until(bool) == {
        "train/gpu_utilization": pytest.approx(0.9),
        "train/gpu_power_w": pytest.approx(450.0),
        "train/gpu_temperature_c": 70.0,
    }
    assert not watched.said


def test_a_failed_driver_is_reported_once_and_host_metrics_continue(watch: Any) -> None:
    gpu = card("GPU-1")
    watched = watch(on_gpus(1), Nvml(gpu), read_host=lambda: GIB)
    watched.until(lambda found: "train/gpu_power_w" in found)
    gpu["watts"] = LOST
    watched.until(lambda found: watched.said)
    assert watched.until(lambda found: len(found) == 1) == {"train/host_memory_gib": 1.0}
    gpu["watts"] = 300
    time.sleep(0.05)
    assert watched.metrics.window() == {"train/host_memory_gib": 1.0}
    (line,) = watched.said
    assert line == "GPU utilization, power, and temperature are no longer recorded: GPU is lost"


def test_a_missing_driver_is_reported_on_gpus_but_not_on_the_cpu(watch: Any) -> None:
    (line,) = watch(on_gpus(1), no_nvml()).said
    assert "not recorded: NVML Shared Library Not Found" in line
    on_cpu = watch(ON_CPU, no_nvml())
    assert on_cpu.metrics.window() == {}
    assert not on_cpu.said


def test_a_full_shared_memory_is_reported_once_with_sizes_and_fixes(watch: Any) -> None:
    size = 64 * 2**20
    filled = [0.5]
    watched = watch(
        ON_CPU,
        no_nvml(),
        read_shared=lambda: Shared(int(filled[0] * size), size),
    )
    assert watched.until(bool) == {"train/shm_gib": 1 / 32}
    assert not watched.said
    filled[0] = 0.95
    watched.until(lambda found: watched.said)
    time.sleep(0.05)
    (line,) = watched.said
    assert "/dev/shm is 95% full (measured: 61 of 64 MiB)" in line
    for fix in ("--shm-size", "--data.prefetch", "--data.workers"):
        assert fix in line
