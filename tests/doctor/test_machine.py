"""Doctor's checks of a machine: described GPUs, recorded packages, real shortages of a disk."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest
from doctor.examined import all_ok, only_problem, only_warning, small_disk, subject, tiny
from doctor.recorded_packages import H100 as GPUS
from doctor.recorded_packages import PLUGIN, environment

from jaxtrain import config
from jaxtrain.doctor import machine
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


def test_too_few_and_too_many_devices(tmp_path: Path) -> None:
    wants = subject(tmp_path, config.load("h100_8"))
    found = only_problem(machine.count(wants, gpus(6)))
    assert "mesh.fsdp 8 needs 8 devices, but jax sees 6 (NVIDIA H100" in found.seen
    found = only_problem(machine.count(subject(tmp_path, tiny()), jax.devices()))
    assert "needs 1 device, but --simulate-devices gives 8" in found.seen


def test_the_number_of_devices_matches(tmp_path: Path) -> None:
    seen = all_ok(machine.count(subject(tmp_path, config.load("h100_8")), gpus(8)))
    assert "8 x NVIDIA H100 80GB HBM3, as h100_8 requires" in seen
    assert "8 x cpu" in all_ok(machine.count(subject(tmp_path), jax.devices()))


def test_cards_with_too_little_memory(tmp_path: Path) -> None:
    gpu = hardware.Gpu(0, "NVIDIA A100-SXM4-40GB", 40960 * MIB, 4 * MIB)
    small = Driver("550.90.07", (gpu,))
    wants = subject(tmp_path, config.load("h100_8"), driver=small)
    found = only_problem(machine.kind(wants, gpus(8, "NVIDIA A100-SXM4-40GB")))
    assert "with 40.0 GiB, and h100_8 is for NVIDIA H100 80GB HBM3 with 79.6 GiB" in found.seen
    assert found.cure.endswith(" plan h100_8 --gpu a100-40gb --fit")
    gpu = hardware.Gpu(0, "Tesla V100-SXM2-16GB", 16384 * MIB, 4 * MIB)
    wants = subject(tmp_path, config.load("h100_8"), driver=Driver("550.90.07", (gpu,)))
    found = only_problem(machine.kind(wants, gpus(8, "Tesla V100-SXM2-16GB")))
    assert found.cure.endswith(" plan h100_8 --fit")


@pytest.mark.parametrize(
    ("version", "cuda", "least"), [("470.82.01", 12, "525"), ("550.90.07", 13, "580")]
)
def test_a_driver_that_is_too_old(version: str, cuda: int, least: str) -> None:
    found = only_problem(machine.driver(Driver(version), cuda))
    assert f"NVIDIA driver {version}: jax for CUDA {cuda} requires {least} or newer" in found.seen
    assert ("cuda12" in found.cure) == (cuda == 13)


def test_memory_held_by_another_program() -> None:
    held = dataclasses.replace(GPUS[3], used=61440 * MIB)
    driver = Driver("550.90.07", (*GPUS[:3], held, *GPUS[4:]))
    found = only_problem(machine.in_use(driver.gpus))
    assert found.seen == "GPU 3: 60.0 GiB of 79.6 GiB are in use by another program"
    assert "CUDA_VISIBLE_DEVICES" in found.cure
    assert not list(machine.in_use(H100.gpus))


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
        assert not list(machine.device_checks(where)["in use"]())
        assert "with 79.6 GiB" in all_ok(machine.kind(where, gpus(1)))
    everything = subject(tmp_path, run, driver=driver, environment={})
    seen = [one.seen for one in machine.device_checks(everything)["in use"]()]
    assert [text.partition(":")[0] for text in seen] == ["GPU 0", "GPU 2"]
    assert "with 79.6 GiB" in all_ok(machine.kind(everything, gpus(1)))  # jax uses no T400
    assert driver.visible("MIG-123") == driver.visible("") == driver.visible("-1") == []


def test_the_versions_that_jax_requires_are_named() -> None:
    seen = all_ok(machine.packages(environment()))
    assert seen == (
        "nvidia-cuda-runtime-cu12 12.9.79, nvidia-cudnn-cu12 9.28.0.42, nvidia-nccl-cu12 2.32.3: "
        "as jax-cuda12-plugin 0.10.2 requires"
    )


def test_an_old_cudnn() -> None:
    found = only_problem(machine.packages(environment({"nvidia-cudnn-cu12": "9.1.0.70"})))
    assert found.seen.endswith(": nvidia-cudnn-cu12<10.0,>=9.8 (9.1.0.70)")
    assert found.cure.endswith(" -m pip install 'jax[cuda12]==0.10.2'")


def test_two_plugins() -> None:
    both = environment(**{"jax-cuda13-plugin": PLUGIN})
    found = only_problem(machine.packages(both))
    assert "jax-cuda12-plugin and jax-cuda13-plugin" in found.seen
    assert "pip uninstall" in found.cure


@pytest.fixture(scope="module")
def video() -> config.Run:
    """Returns a config with two workers, each with two batches of 4 clips of 8x64x64: 3.4 MiB."""
    typed = ["--data.workers", "2", "--data.batch_size", "4", "--model.frames", "8"]
    return config.load("demo", typed)


def test_shared_memory_of_dockers_default_size_and_less(tmp_path: Path, video: config.Run) -> None:
    with small_disk(tmp_path / "shm", "64m") as folder:
        assert "64.0 MiB free" in all_ok(machine.shared_memory(video, 2, 4, folder))
        found = only_problem(machine.shared_memory(video, 2, 100, folder))
        assert "2 workers, data.prefetch 2 and batches of 9.4 MiB" in found.seen
        assert "need up to 84.4 MiB" in found.seen
        assert "docker run --shm-size=2g" in found.cure
        assert "lower --data.workers or --data.prefetch" in found.cure


def test_workers_need_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = subject(tmp_path, tiny("--mesh.fsdp", "8", "--data.workers", "16"))
    monkeypatch.setattr("jaxtrain.machine.memory", lambda: (64.0 * 2**30, False))
    assert all_ok(machine.workers(examined)).endswith("for 16 workers")
    monkeypatch.setattr("jaxtrain.machine.memory", lambda: (0.1 * 2**30, True))
    assert "the container's limit leaves" in only_problem(machine.workers(examined)).seen


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    run = tiny("--checkpoint.keep", "5")
    with small_disk(tmp_path / "disk", "4m") as folder:
        found = only_problem(machine.free_disk(run, folder, 2**20))
        assert "4.0 MiB free" in found.seen
        # The newest multiple of checkpoint.every may be older than the newest five.
        assert "7 checkpoints of 1.0 MiB need 7.0 MiB (6 kept + 1 being written)" in found.seen
        assert found.cure.startswith("free 3.0 MiB there, lower --checkpoint.keep, or")
        certifies = tiny("--checkpoint.keep", "5", "--loop.replay_every", "2")
        assert "8 checkpoints" in only_problem(machine.free_disk(certifies, folder, 2**20)).seen
        every = ("--loop.steps", "40", "--checkpoint.every", "5", "--checkpoint.milestones", "10")
        forever = only_problem(machine.free_disk(tiny(*every), folder, 2**20))
        assert " kept + 4 milestones + 1 being written" in forever.seen
        best = tiny("--checkpoint.best_metric", "val/loss", "--loop.eval_every", "1")
        assert "+ the best +" in only_problem(machine.free_disk(best, folder, 2**21)).seen
        assert all_ok(machine.free_disk(run, folder, 2**19))
        assert all_ok(machine.free_disk(run, folder, 2**20, in_bucket=True))
        staged = only_problem(machine.free_disk(run, folder, 2**21, in_bucket=True))
        assert staged.seen.endswith("3 checkpoints need 6.0 MiB")
        assert "$JAXTRAIN_CACHE" in staged.cure


def test_memory_and_a_containers_layer_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "a disk", "1m") as folder:
        found = only_warning(machine.file_system(folder))
    assert found.seen == "the output directory is on tmpfs: memory, lost at the next restart"
    assert "to a disk" in found.cure
    seen = all_ok(machine.file_system(tmp_path / "missing"))
    assert seen == "the output directory is on an unknown file system"
    layer = subprocess.CompletedProcess("stat", 0, "overlayfs\n")
    monkeypatch.setattr(subprocess, "run", lambda *more, **settings: layer)
    found = only_warning(machine.file_system(tmp_path))
    assert "the container's own layer" in found.seen
    assert "docker run -v" in found.cure
