"""Doctor's checks of the devices; GPUs are simulated by descriptions."""

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from examined import all_ok, only_problem, only_warning, subject, tiny
from fake_key_value import FakeClient
from recorded_packages import H100 as GPUS

from jaxtrain import config
from jaxtrain.bench.ceilings import Ceilings
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import devices
from jaxtrain.doctor.finding import Finding
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.hardware import Driver

MIB = 2**20
H100 = Driver("550.90.07", GPUS)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Describes a device like jax."""

    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"
    local_hardware_id: int = 0


def gpus(count: int, kind: str = Gpu.device_kind) -> list[Any]:
    return [Gpu(kind) for _ in range(count)]


USUAL = Ceilings(700e12, 1.0, 2.9e12)


def _measured(tmp_path: Path, *each: list[Ceilings]) -> list[Finding]:
    """Returns the findings of process 0, given the rates of the GPUs of all processes."""
    stores = FakeClient(len(each)).stores() if len(each) > 1 else [KeyValueStore()]
    subjects = [subject(tmp_path, store=store) for store in stores]

    def found(process: int) -> list[Finding]:
        own: list[Any] = [Gpu(local_hardware_id=number) for number in range(len(each[process]))]
        return list(
            devices.rates(
                subjects[process],
                own or jax.devices(),
                f"n{process}",
                lambda device: each[process][device.local_hardware_id],
            )
        )

    with concurrent.futures.ThreadPoolExecutor(len(each)) as pool:
        first, *others = pool.map(found, range(len(each)))
    assert all(one == first for one in others)
    return first


def test_the_rates_of_each_gpu_are_compared(tmp_path: Path) -> None:
    def among_three(flops: float, copies: float) -> list[Ceilings]:
        return [USUAL, USUAL, Ceilings(flops, 1.0, copies), USUAL]

    found = only_warning(_measured(tmp_path, among_three(500e12, 2.9e12)))
    assert found.seen == (
        "GPU 2 of n0: bf16 matmuls at 500 TFLOP/s, against 700 in the median of 4 GPUs (measured)"
    )
    found = only_warning(_measured(tmp_path, among_three(700e12, 1.5e12)))
    assert found.seen.startswith("GPU 2 of n0: copies at 1,500 GB/s, against 2,900 in the median")
    assert all_ok(_measured(tmp_path, among_three(690e12, 2.8e12))) == (
        "4 GPUs, measured one by one: bf16 matmuls at 690 to 700 TFLOP/s and copies at 2,800 to "
        "2,900 GB/s"
    )
    assert _measured(tmp_path, []) == []  # CPUs are one machine


def test_one_gpu_has_no_range(tmp_path: Path) -> None:
    assert all_ok(_measured(tmp_path, [Ceilings(319.2e12, 1.0, 2.97e12)])) == (
        "1 GPU, measured one by one: bf16 matmuls at 319 TFLOP/s and copies at 2,970 GB/s"
    )


def test_the_gpus_of_hosts_are_compared(tmp_path: Path) -> None:
    slow = Ceilings(500e12, 1.0, 2.9e12)
    found = only_warning(_measured(tmp_path, [USUAL], [slow], [USUAL]))
    assert found.seen == (
        "GPU 0 of n1: bf16 matmuls at 500 TFLOP/s, against 700 in the median of 3 GPUs (measured)"
    )
    assert all_ok(_measured(tmp_path, [USUAL], []))
    assert _measured(tmp_path, [], []) == []


def test_no_gpus_for_a_config_of_eight(tmp_path: Path) -> None:
    wants = subject(tmp_path, config.load("h100_8"))
    found = only_problem(devices.count(wants, jax.devices()[:1]))
    assert found.seen.startswith("h100_8 is for 8 x NVIDIA H100 80GB HBM3 (mesh.data 1 x")
    assert "jax sees no GPU, only 1 x cpu" in found.seen
    assert "--simulate-devices 8" in found.cure


def test_too_few_and_too_many_devices(tmp_path: Path) -> None:
    wants = subject(tmp_path, config.load("h100_8"))
    found = only_problem(devices.count(wants, gpus(6)))
    assert found.seen.startswith("h100_8 requires 8 devices (mesh.data 1 x mesh.fsdp 8)")
    assert "but jax sees 6 x NVIDIA H100" in found.seen
    assert "--mesh.data 1 --mesh.fsdp 6" in found.cure
    found = only_problem(devices.count(subject(tmp_path, tiny()), jax.devices()))
    assert found.seen.startswith("demo_mlm requires 1 device (")
    assert "but jax sees 8 x cpu" in found.seen
    assert "--simulate-devices 1" in found.cure


def test_the_number_of_devices_matches(tmp_path: Path) -> None:
    seen = all_ok(devices.count(subject(tmp_path, config.load("h100_8")), gpus(8)))
    assert "8 x NVIDIA H100 80GB HBM3, as h100_8 requires" in seen
    assert "8 x cpu" in all_ok(devices.count(subject(tmp_path), jax.devices()))


def test_simulated_devices_are_a_warning(tmp_path: Path) -> None:
    wants = subject(tmp_path, config.load("h100_8"), simulate_devices=8)
    assert "simulated" in only_warning(devices.count(wants, jax.devices())).seen


def test_cards_with_too_little_memory(tmp_path: Path) -> None:
    gpu = hardware.Gpu(0, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 4 * MIB)
    small = Driver("550.90.07", (gpu,))
    wants = subject(tmp_path, config.load("h100_8"), driver=small)
    found = only_problem(devices.kind(wants, gpus(8, "NVIDIA A100-SXM4-40GB")))
    assert "has 40.0 GiB, h100_8 is for NVIDIA H100 80GB HBM3 with 79.6 GiB" in found.seen
    assert found.cure.endswith(" plan --config h100_8 --gpu a100-40gb --fit")
    gpu = hardware.Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 4 * MIB)
    wants = subject(tmp_path, config.load("h100_8"), driver=Driver("550.90.07", (gpu,)))
    found = only_problem(devices.kind(wants, gpus(8, "Tesla V100-SXM2-16GB")))
    assert " plan --config h100_8 --fit (plan does not know this GPU" in found.cure


def test_another_card_with_enough_memory_and_mixed_cards(tmp_path: Path) -> None:
    gpu = hardware.Gpu(0, "NVIDIA H200", 143771 * MIB, 4 * MIB)
    large = Driver("550.90.07", (gpu,))
    wants = subject(tmp_path, config.load("h100_8"), driver=large)
    found = only_warning(devices.kind(wants, gpus(8, "NVIDIA H200")))
    assert "the GPUs are NVIDIA H200" in found.seen
    assert found.cure.endswith(" plan --config h100_8 --gpu h200")
    plain = subject(tmp_path, driver=large)
    mixed = only_warning(devices.kind(plain, [*gpus(1), *gpus(1, "NVIDIA H200")]))
    assert "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA H200" in mixed.seen


def test_the_card_matches(tmp_path: Path) -> None:
    wants = subject(tmp_path, config.load("h100_8"), driver=H100)
    assert "with 79.6 GiB" in all_ok(devices.kind(wants, gpus(8)))
    assert not list(devices.kind(wants, jax.devices()))


@pytest.mark.parametrize(
    ("version", "cuda", "least"), [("470.82.01", 12, "525"), ("550.90.07", 13, "580")]
)
def test_a_driver_that_is_too_old(version: str, cuda: int, least: str) -> None:
    found = only_problem(devices.driver(Driver(version), cuda))
    assert f"NVIDIA driver {version}: jax for CUDA {cuda} requires {least} or newer" in found.seen
    assert ("cuda12" in found.cure) == (cuda == 13)


def test_a_driver_that_is_new_enough() -> None:
    assert "8 x NVIDIA H100" in all_ok(devices.driver(H100, 12))
    assert all_ok(devices.driver(Driver("580.65.06"), 13))
    assert all_ok(devices.driver(Driver(), 12)) == "no NVIDIA driver: jax uses the CPU"


def test_a_driver_that_does_not_answer() -> None:
    mismatch = "Driver/library version mismatch"
    found = only_problem(devices.driver(Driver(failure=mismatch), 12))
    assert found.seen.endswith(mismatch)
    assert "restart the host" in found.cure


def test_gpus_that_jax_does_not_use() -> None:
    found = only_problem(devices.unused(H100, "cpu", {}))
    assert found.seen.startswith("this host has 8 GPUs and an NVIDIA driver, but jax sees only")
    assert "pip install -e '.[cuda12]'" in found.cure
    hidden = only_problem(devices.unused(H100, "cpu", {"CUDA_VISIBLE_DEVICES": "-1"}))
    assert hidden.cure == "unset CUDA_VISIBLE_DEVICES"
    assert only_warning(devices.unused(H100, "cpu", {"JAX_PLATFORMS": "cpu"}))
    assert not list(devices.unused(H100, "gpu", {}))
    assert not list(devices.unused(Driver(), "cpu", {}))


def test_memory_held_by_another_program() -> None:
    held = dataclasses.replace(GPUS[3], used=61440 * MIB)
    driver = Driver("550.90.07", (*GPUS[:3], held, *GPUS[4:]))
    found = only_problem(devices.in_use(driver.gpus))
    assert found.seen == "GPU 3: 60.0 GiB of 79.6 GiB are in use by another program"
    assert "CUDA_VISIBLE_DEVICES" in found.cure
    assert not list(devices.in_use(H100.gpus))


def test_only_visible_gpus_are_checked(tmp_path: Path) -> None:
    """Not a display card, or a GPU that another program uses and that this process does not."""
    display = hardware.Gpu(0, "NVIDIA T400 4GB", 4096 * MIB, 3072 * MIB, "GPU-display")
    held = dataclasses.replace(GPUS[2], used=61440 * MIB, uuid="GPU-held")
    own = dataclasses.replace(GPUS[1], uuid="GPU-own")
    driver = Driver("550.90.07", (display, own, held))
    run = config.load("h100_1")
    for visible in ("1", "GPU-own", "GPU-ow,no", "1,GPU-unknown,0"):
        environment = {"CUDA_VISIBLE_DEVICES": visible}
        where = subject(tmp_path, run, driver=driver, environment=environment)
        assert not list(devices.checks(where)["in use"]())
        assert "with 79.6 GiB" in all_ok(devices.kind(where, gpus(1)))
    everything = subject(tmp_path, run, driver=driver, environment={})
    seen = [one.seen for one in devices.checks(everything)["in use"]()]
    assert [text.partition(":")[0] for text in seen] == ["GPU 0", "GPU 2"]
    assert "with 79.6 GiB" in all_ok(devices.kind(everything, gpus(1)))  # jax uses no T400
    assert driver.visible("MIG-123") == driver.visible("") == driver.visible("-1") == []
