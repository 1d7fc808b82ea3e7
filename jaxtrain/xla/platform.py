"""Chooses the CPU where jax's CUDA plugin is installed, but no NVIDIA driver; imports no jax.

Such machines are common: ``plan`` requires the plugin, but no GPU. In each process that uses
devices, jax would print a traceback (``cuInit(0) failed: Unknown CUDA error 303``, jax 0.10 to
0.12) and then use the CPU.
"""

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
_DRIVER_LIBRARY = "libcuda.so.1"


def has_cuda_plugin() -> bool:
    """Whether jax has the compiler for GPUs (extra ``cuda12`` or ``cuda13``)."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a process would use, as CUDA_VISIBLE_DEVICES names them.

    It needs no jax. [] also if there is no ``nvidia-smi``, and with ``JAX_PLATFORMS=cpu``.
    """
    if environment.get("JAX_PLATFORMS") == "cpu":
        return []
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True)
    except OSError:
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(number) for number in range(count)]


def lacks_driver() -> bool:
    """Whether jax's CUDA plugin is installed, but no NVIDIA driver."""
    return has_cuda_plugin() and not _has_driver()


def use_cpu_without_driver(environment: MutableMapping[str, str]) -> None:
    """Makes jax use the CPU, without looking for GPUs, if there is no NVIDIA driver for its plugin.

    Processes that this one starts inherit the choice. ``JAX_PLATFORMS`` takes precedence if it is
    set, and so does ``jax_platforms`` if jax has been imported.
    """
    if environment.get("JAX_PLATFORMS") or not lacks_driver():
        return
    environment["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    if jax is not None and not jax.config.jax_platforms:  # it has read the variable already
        jax.config.update("jax_platforms", "cpu")


def _has_driver() -> bool:
    if any(Path(name).exists() for name in _DRIVER_FILES):
        return True
    try:  # in Windows' subsystem for Linux, the library is the only part of the driver
        ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return False
    return True
