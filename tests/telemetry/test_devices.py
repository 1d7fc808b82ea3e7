"""What GPUs say about themselves; a driver of our own stands in for NVML."""

from typing import Any

import pynvml
import pytest
from fake_nvml import LOST, UNSUPPORTED, Nvml, card

from jaxtrain.telemetry import devices
from jaxtrain.telemetry.devices import Reading

A, B, C = card("GPU-aaaa-1", 80), card("GPU-aabb-2", 90), card("GPU-cccc-3", 100)


def shares(nvml: Any, visible: str | None, ordinals: list[int] | None = None) -> list[float | None]:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [one.utilization for one in devices.Gpus(environment, ordinals, nvml).read()]


def test_memory_is_unknown_on_the_cpu() -> None:
    assert devices.memory_gib() is None


def test_the_driver_says_its_version_and_is_let_go() -> None:
    nvml = Nvml(A)
    assert devices.driver_version(nvml) == "580.65.06"
    assert nvml.opened == 0
    assert devices.driver_version(Nvml(absent=True)) is None


def test_a_gpu_says_share_watts_and_degrees() -> None:
    gpus = devices.Gpus({}, None, Nvml(card("GPU-1", 75, 650, 61)))
    assert gpus.read() == [Reading(0.75, 650.0, 61.0)]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0.8, 0.9, 1.0]),
        ("2,0", [1.0, 0.8]),
        ("GPU-cccc-3, 1", [1.0, 0.9]),
        ("GPU-aab", [0.9]),  # the beginning of a name will do
        ("GPU-aa", []),  # of two
        ("0,-1,2", [0.8]),  # CUDA stops there
        ("7", []),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_sees(visible: str | None, found: list[float]) -> None:
    assert shares(Nvml(A, B, C), visible) == found


def test_of_these_only_what_the_process_uses_is_asked() -> None:
    assert shares(Nvml(A, B, C), "2,1", [1]) == [0.9]
    assert shares(Nvml(A, B, C), "2,1", [1, 2]) == []  # not those of others


def test_what_a_gpu_cannot_say_has_no_value() -> None:
    nvml = Nvml(card("GPU-1", UNSUPPORTED, 70, UNSUPPORTED), card("GPU-2"))
    assert devices.Gpus({}, None, nvml).read() == [
        Reading(None, 70.0, None),
        Reading(0.5, 300.0, 60.0),
    ]


@pytest.mark.parametrize("name", ["MIG-2", "MIG-22-b"])
def test_a_slice_of_a_gpu_is_found_by_its_name(name: str) -> None:
    slices = [card("MIG-11-a", 10), card("MIG-22-b", UNSUPPORTED, UNSUPPORTED, 55)]
    nvml = Nvml(A, card("GPU-9", slices=slices))
    gpus = devices.Gpus({"CUDA_VISIBLE_DEVICES": name}, [0], nvml)
    assert gpus.read() == [Reading(None, None, 55.0)]


def test_a_driver_that_is_gone_is_an_error_and_no_zero() -> None:
    nvml = Nvml(card("GPU-1", 50, LOST))
    gpus = devices.Gpus({}, None, nvml)
    with pytest.raises(pynvml.NVMLError, match="lost"):
        gpus.read()
    gpus.close()
    assert nvml.opened == 0


def test_nothing_stays_open_where_the_gpus_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml(A)
    monkeypatch.setattr(nvml, "cards", [LOST])
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda _: nvml.nvmlDeviceGetUUID(None))

    def lost(_: Any) -> str:
        raise LOST

    monkeypatch.setattr(nvml, "nvmlDeviceGetUUID", lost)
    with pytest.raises(pynvml.NVMLError, match="lost"):
        devices.Gpus({}, None, nvml)
    assert nvml.opened == 0


def test_the_real_library_is_asked_with_the_names_it_has() -> None:
    used = [name for name in vars(Nvml) if name.startswith("nvml")]
    assert len(used) > 8
    assert all(callable(getattr(pynvml, name)) for name in used)
