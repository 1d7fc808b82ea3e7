"""Recorded metadata: wheels of jax 0.10.2, GPUs, the driver's version file."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtrain.doctor.machine import Find
from jaxtrain.telemetry.hardware import Gpu


class Package(NamedTuple):
    """An installed package, like ``importlib.metadata.Distribution``."""

    version: str
    requires: tuple[str, ...] = ()


_EXTRA = '; sys_platform == "linux" and extra == "with-cuda"'
PLUGIN = Package(
    "0.10.2",
    (
        "jax-cuda12-pjrt==0.10.2",
        f"nvidia-cublas-cu12>=12.1.3.1{_EXTRA}",
        f"nvidia-cuda-cupti-cu12>=12.1.105{_EXTRA}",
        f"nvidia-cuda-nvcc-cu12>=12.6.85{_EXTRA}",
        f"nvidia-cuda-runtime-cu12>=12.1.105{_EXTRA}",
        f"nvidia-cudnn-cu12<10.0,>=9.8{_EXTRA}",
        f"nvidia-nccl-cu12>=2.18.1{_EXTRA}",
    ),
)
WHEELS = {
    "nvidia-cublas-cu12": "12.9.3.13",
    "nvidia-cuda-cupti-cu12": "12.9.79",
    "nvidia-cuda-nvcc-cu12": "12.9.86",
    "nvidia-cuda-runtime-cu12": "12.9.79",
    "nvidia-cudnn-cu12": "9.28.0.42",
    "nvidia-nccl-cu12": "2.32.3",
}

H100 = tuple(Gpu(n, "NVIDIA H100 80GB HBM3", 81559 * 2**20, 4 * 2**20) for n in range(8))
KERNEL = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
    "GCC version:  gcc version 12.3.0\n"
)


def environment(
    wheels: Mapping[str, str] | None = None, without: str = "", **packages: Package
) -> Find:
    """Returns an environment with jax's plugin for CUDA 12 and its wheels, plus changes."""
    there: dict[str, Any] = {
        name: Package(version) for name, version in {**WHEELS, **(wheels or {})}.items()
    }
    there |= {"jaxlib": Package("0.10.2"), "jax-cuda12-plugin": PLUGIN, **packages}
    there.pop(without, None)
    return there.get
