"""GPUs, their driver, and host memory: NVML, and system metrics during training.

:class:`SystemMetrics` samples in the background:

===========================  ==========================================================  =======
``train/gpu_utilization``    fraction of the time in which a kernel ran, in [0, 1]       mean
``train/gpu_power_w``        watts per GPU                                               mean
``train/gpu_temperature_c``  degrees Celsius of the hottest GPU                          maximum
``train/host_memory_gib``    a process and its workers; shared pages count once          maximum
``train/shm_gib``            used /dev/shm of the host, by all processes                 maximum
===========================  ==========================================================  =======

The last column is taken over the GPUs, the time since the last record, and all processes of the
run. A metric that a machine cannot measure is omitted.
"""

import contextlib
import dataclasses
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
import pynvml

from jaxtrain.formats import GIB

_MIB = 2**20

# ---- NVML, the library that nvidia-smi uses

_SENSORS: dict[str, Callable[[Any, Any], float]] = {
    "train/gpu_utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "train/gpu_power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "train/gpu_temperature_c": lambda nvml, gpu: float(
        nvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)
    ),
}

# Errors of a single field: the card has no such sensor. All other errors mean that the driver has
# failed.
_UNSUPPORTED = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a driver older than the function
    pynvml.NVML_ERROR_NO_DATA,
}


def memory_gib() -> float | None:
    """Returns the peak memory of this process's fullest device, GiB; None if unknown (CPU).

    The allocator tracks the peak since the start of the process; it cannot be reset.
    """
    peaks = [
        stats["peak_bytes_in_use"]
        for stats in (device.memory_stats() for device in jax.local_devices())
        if stats and "peak_bytes_in_use" in stats
    ]
    return max(peaks) / GIB if peaks else None


_PROC = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of this host.

    Attributes:
        memory: total bytes, the number that nvidia-smi prints; 0 if unknown.
        used: bytes in use; 0 if unknown.
    """

    index: int
    name: str
    memory: int
    used: int
    uuid: str = ""


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this host.

    Attributes:
        version: None if there is no driver or it does not respond.
        gpus: all GPUs of the host, regardless of CUDA_VISIBLE_DEVICES.
        failure: NVML's error if the driver does not work.
    """

    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""

    def visible(self, names: str | None) -> list[Gpu]:
        """Returns the GPUs that CUDA_VISIBLE_DEVICES names, see :func:`visible`."""
        return [self.gpus[index] for index in visible(names, [gpu.uuid for gpu in self.gpus])]


def visible(names: str | None, uuids: Sequence[str]) -> list[int]:
    """Returns the indices of the GPUs that CUDA sees; of MIG devices, none.

    Indices follow the PCI order, which is CUDA's own order if all cards are alike or
    CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        names: value of CUDA_VISIBLE_DEVICES, indices or (beginnings of) UUIDs; None if not set.
        uuids: of all GPUs of the host.
    """
    if names is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for name in map(str.strip, names.split(",")):
        named = [
            index
            for index, uuid in enumerate(uuids)
            if name == str(index) or (name and uuid.startswith(name))
        ]
        if len(named) != 1:  # like CUDA, which stops at the first invalid name
            break
        indices += named
    return indices


def driver(nvml: Any = pynvml, proc: Path = _PROC) -> Driver:
    """Queries the NVIDIA driver through NVML, or through the kernel if NVML is not installed."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return _kernel_driver(proc)
        return Driver(failure=str(error))
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        version = str(nvml.nvmlSystemGetDriverVersion())
        return Driver(version, gpus, "" if gpus else "no devices were found")
    except pynvml.NVMLError as error:
        return Driver(failure=str(error))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = str(nvml.nvmlDeviceGetName(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    try:
        # Version 2 excludes memory that the driver reserves, like nvidia-smi.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in _UNSUPPORTED:
            raise
        return Gpu(index, name, 0, 0, uuid)
    return Gpu(index, name, int(memory.total), int(memory.used), uuid)


def _kernel_driver(proc: Path) -> Driver:
    try:
        line = proc.read_text().partition("\n")[0]
    except OSError:
        return Driver()
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
    return Driver(match[1] if match else None, (), "" if match else f"{proc}: {line[:100]}")


class Gpus:
    """The GPUs that this process uses, through NVML; close it when done.

    Args:
        environment: ``os.environ``. CUDA_VISIBLE_DEVICES selects the GPUs that CUDA sees.
        ordinals: indices of this process's GPUs among those that CUDA sees.

    Raises:
        pynvml.NVMLError: NVML is not installed or does not respond.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        ordinals: Sequence[int],
        nvml: Any,
    ) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            uuids = [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus]
        except pynvml.NVMLError:
            nvml.nvmlShutdown()
            raise
        visible_gpus = [gpus[i] for i in visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)]
        if all(ordinal < len(visible_gpus) for ordinal in ordinals):
            self._handles = [visible_gpus[ordinal] for ordinal in ordinals]
        else:  # do not measure the GPUs of other processes
            self._handles = []

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> dict[str, list[float]]:
        """Reads the sensors; the values of a metric are those of the GPUs that have its sensor.

        Raises:
            pynvml.NVMLError: the driver or a GPU has failed.
        """
        values: dict[str, list[float]] = {}
        for gpu in self._handles:
            for name, sensor in _SENSORS.items():
                try:
                    values.setdefault(name, []).append(sensor(self._nvml, gpu))
                except pynvml.NVMLError as error:
                    if error.value not in _UNSUPPORTED:
                        raise
        return {name: readings for name, readings in values.items() if readings}

    def close(self) -> None:
        """Closes NVML."""
        with contextlib.suppress(pynvml.NVMLError):  # the driver may have failed
            self._nvml.nvmlShutdown()


# ---- Host memory

SHARED = Path("/dev/shm")


class Shared(NamedTuple):
    """Bytes of the host's shared memory, over all processes."""

    used: int
    size: int


def host_memory(process: psutil.Process | None = None) -> int | None:
    """Measures the memory of a process and its descendants; pages they share count once.

    This is the proportional set size: a page shared by n processes counts 1/n for each, so pages
    shared with other programs, such as libraries, count in part. Reading takes about 20 ms per GiB
    of ordinary pages (measured), too long for the training thread.

    Returns:
        Bytes; None if the system does not report it for all of them.
    """
    process = process or psutil.Process()
    total = 0
    try:
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has exited
                total += member.memory_full_info().pss
    except (psutil.Error, AttributeError):  # another user's process, or a system without PSS
        return None
    return total or None


def shared_memory(folder: Path = SHARED) -> Shared | None:
    """Measures the use of the host's shared memory; None if there is none."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    blocks = stats.f_blocks - stats.f_bfree
    return Shared(blocks * stats.f_frsize, stats.f_blocks * stats.f_frsize)


# ---- System metrics during training

MEAN = ("train/gpu_utilization", "train/gpu_power_w")
_HOST = ("train/host_memory_gib", "train/shm_gib")
LARGEST = ("train/gpu_temperature_c", *_HOST)

# Host memory is read at most this often, and for at most this fraction of the time.
_HOST_EVERY_S = 10.0
_HOST_FRACTION = 0.01

_SHARED_FULL = 0.9


class SystemMetrics:
    """Samples the system in a thread of its own until it is closed.

    Args:
        environment: ``os.environ``; CUDA_VISIBLE_DEVICES selects the GPUs.
        nvml: the module ``pynvml``, or a replacement for tests.
        read_host: returns the memory of this process and its workers in bytes, or None.
        read_shared: returns the use of the host's shared memory, or None.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        devices: Sequence[Any],
        say: Callable[[str], None],
        *,
        every_s: float = 1.0,
        nvml: Any = pynvml,
        read_host: Callable[[], int | None] = host_memory,
        read_shared: Callable[[], Shared | None] = shared_memory,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._read_host, self._read_shared = read_host, read_shared
        self._samples: dict[str, list[float]] = {}
        self._read_host_at = 0.0
        self._warned = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._gpus: Gpus | None = None
        if devices[0].platform == "gpu":
            try:
                ordinals = [device.local_hardware_id for device in devices]
                self._gpus = Gpus(environment, ordinals, nvml)
            except pynvml.NVMLError as error:
                self._say(f"GPU utilization, power, and temperature are not recorded: {error}")
            else:
                if not len(self._gpus):
                    named = environment.get("CUDA_VISIBLE_DEVICES", "not set")
                    self._say(
                        "GPU utilization, power, and temperature are not recorded: NVML does not "
                        f"find this process's GPUs {ordinals} (CUDA_VISIBLE_DEVICES: {named})"
                    )
        self._thread = threading.Thread(target=self._sample, name="system-metrics", daemon=True)
        self._thread.start()

    def window(self) -> dict[str, float]:
        """Returns the metrics since the last call by full name; omits those without a sample."""
        with self._lock:
            samples = self._samples
            # Host memory is read less often than it is recorded: its newest value stays.
            self._samples = {name: samples[name][-1:] for name in _HOST if name in samples}
        return {
            name: statistics.fmean(values) if name in MEAN else max(values)
            for name, values in samples.items()
        }

    def close(self) -> None:
        """Ends the thread; waits at most 5 s for a driver that does not respond."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _sample(self) -> None:
        while not self._closing.is_set():
            self._sample_gpus()
            self._sample_host()
            self._closing.wait(self._every_s)
        if self._gpus is not None:
            self._gpus.close()

    def _sample_gpus(self) -> None:
        if self._gpus is None:
            return
        try:
            readings = self._gpus.read()
        except pynvml.NVMLError as error:
            self._gpus.close()
            self._gpus = None
            self._say(f"GPU utilization, power, and temperature are no longer recorded: {error}")
            return
        self._add(readings)

    def _sample_host(self) -> None:
        shared = self._read_shared()
        if shared is not None:
            self._add({"train/shm_gib": [shared.used / GIB]})
            if shared.size and shared.used > _SHARED_FULL * shared.size and not self._warned:
                self._warned = True
                self._say(_warning(shared))
        began = time.monotonic()
        if began >= self._read_host_at:
            host_bytes = self._read_host()
            ended = time.monotonic()
            self._read_host_at = ended + max(_HOST_EVERY_S, (ended - began) / _HOST_FRACTION)
            if host_bytes is not None:
                self._add({"train/host_memory_gib": [host_bytes / GIB]})

    def _add(self, samples: Mapping[str, Sequence[float]]) -> None:
        with self._lock:
            for name, values in samples.items():
                self._samples.setdefault(name, []).extend(values)


def _warning(shared: Shared) -> str:
    return (
        f"warning: {SHARED} is {shared.used / shared.size:.0%} full (measured: "
        f"{shared.used / _MIB:.0f} of {shared.size / _MIB:.0f} MiB); when it is full, workers "
        "crash with a bus error: start the container with a larger one (docker run --shm-size), or "
        "lower --data.prefetch or --data.workers"
    )
