"""GPUs, their driver and the host's memory: datasheet peaks, NVML, and samples while a run trains.

:class:`SystemMetrics` samples in the background:

===========================  ==========================================================  ========
``train/gpu_utilization``    share of the time that a kernel ran, in [0, 1]              mean
``train/gpu_power_w``        watts of a GPU                                              mean
``train/gpu_temperature_c``  degrees Celsius of the hottest GPU                          largest
``train/host_memory_gib``    of a process and its workers; what they share counts once   largest
``train/shm_gib``            used of the host's /dev/shm, across all processes           largest
===========================  ==========================================================  ========

Over the GPUs and the time since the last record, and over all processes of the run. What a machine
cannot measure has no value.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
import pynvml

GIB = 2**30
_MIB = 2**20

# ---- Datasheets: the peaks that measured rates are compared with

# Words that all stand in the device's name; dense bfloat16 rate of one GPU, FLOP/s (datasheets
# print most of them with sparsity, twice as high); memory bandwidth, bytes/s. First row wins.
_RATES = (
    (("H100", "PCIE"), 756e12, 2.0e12),
    (("H100", "NVL"), 835e12, 3.9e12),
    (("H200", "NVL"), 835e12, 4.8e12),
    (("H100",), 989e12, 3.35e12),
    (("H200",), 989e12, 4.8e12),
    (("GH200",), 989e12, 4.0e12),
    (("B200",), 2250e12, 8.0e12),
    (("A100",), 312e12, 2.0e12),
    (("A800",), 312e12, 2.039e12),
    (("A40",), 149.7e12, 0.696e12),
    (("A10",), 125e12, 0.6e12),
    (("A10G",), 70e12, 0.6e12),
    (("A6000",), 154.8e12, 0.768e12),
    (("L4",), 121e12, 0.3e12),
    (("L40S",), 362e12, 0.864e12),
    (("RTX", "5090"), 209.5e12, 1.792e12),
)


def memory_bytes_per_second(device_kind: str) -> float | None:
    """Datasheet bandwidth, bytes/s; None for a device not in the table.

    Args:
        device_kind: ``jax.Device.device_kind``.
    """
    return _of(device_kind)[1]


def peak_bf16_flops(device_kind: str) -> float | None:
    """Datasheet rate of dense bfloat16 products, FLOP/s; None for a device not in the table.

    Args:
        device_kind: ``jax.Device.device_kind``, as "NVIDIA H100 80GB HBM3".
    """
    return _of(device_kind)[0]


def _of(device_kind: str) -> tuple[float | None, float | None]:
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    found = ((flops, moved) for names, flops, moved in _RATES if words.issuperset(names))
    return next(found, (None, None))


# ---- NVML, the library below nvidia-smi

_CORE = pynvml.NVML_TEMPERATURE_GPU

# Of one field of one GPU: the card has no such sensor, or a MIG device has no share of it. All
# other errors mean that the driver has gone.
_UNSUPPORTED = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a driver older than the function
    pynvml.NVML_ERROR_NO_DATA,
}


def memory_gib() -> float | None:
    """Most memory that a device of this process held so far, GiB; None where jax cannot say (CPU).

    The allocator keeps this peak since the start of the process; it cannot be reset.
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
        memory: bytes, as nvidia-smi prints them; 0 where the driver does not say.
        used: bytes held by programs; 0 where the driver does not say.
    """

    index: int
    name: str
    memory: int
    used: int


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this host.

    Attributes:
        version: None where there is none, or it does not answer.
        gpus: all that it sees, whatever CUDA_VISIBLE_DEVICES names.
        failure: NVML's error, where the driver does not work.
    """

    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""

    @property
    def present(self) -> bool:
        """Whether this host has a driver, working or not."""
        return self.version is not None or bool(self.failure)


def driver(nvml: Any = pynvml, proc: Path = _PROC, timeout_s: float = 10.0) -> Driver:
    """The NVIDIA driver, from NVML, or from the kernel where NVML is not installed.

    Args:
        nvml: the module ``pynvml``, or what stands in for it.
        proc: the kernel module's version file.
        timeout_s: seconds after which a driver that does not answer is broken.
    """
    answer: concurrent.futures.Future[Driver] = concurrent.futures.Future()

    def ask() -> None:
        try:
            answer.set_result(_driver(nvml, proc))
        except BaseException as error:
            answer.set_exception(error)

    # A call into a hanging driver never returns: only a daemon thread can be left behind.
    threading.Thread(target=ask, name="nvml", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except concurrent.futures.TimeoutError:
        return Driver(failure=f"no answer within {timeout_s:g} s")


def _driver(nvml: Any, proc: Path) -> Driver:
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
    try:
        # The second version excludes what the driver reserves, as nvidia-smi does.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in _UNSUPPORTED:
            raise
        return Gpu(index, str(nvml.nvmlDeviceGetName(handle)), 0, 0)
    return Gpu(index, str(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def _kernel_driver(proc: Path) -> Driver:
    try:
        line = proc.read_text().partition("\n")[0]
    except OSError:
        return Driver()
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
    return Driver(match[1] if match else None, (), "" if match else f"{proc}: {line[:100]}")


class Reading(NamedTuple):
    """What one GPU says; None where it has no such sensor.

    Attributes:
        utilization: share of the last moments (up to a second) in which a kernel ran, in [0, 1].
        power_w: watts.
        temperature_c: degrees Celsius.
    """

    utilization: float | None
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """The GPUs that this process uses, as NVML sees them; close it when done.

    Args:
        environment: ``os.environ``; CUDA_VISIBLE_DEVICES in it says which GPUs CUDA sees: numbers,
            ``GPU-...`` or ``MIG-...``, also the beginnings of such names. Numbers are taken in the
            order of PCI addresses: that is CUDA's own where all cards are alike, or with
            CUDA_DEVICE_ORDER=PCI_BUS_ID.
        ordinals: of the GPUs of this process among those that CUDA sees; None takes all.
        nvml: the module ``pynvml``, or what stands in for it.

    Raises:
        pynvml.NVMLError: there is no NVML here, or it does not answer.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        ordinals: Sequence[int] | None = None,
        nvml: Any = pynvml,
    ) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            seen = list(self._visible(environment.get("CUDA_VISIBLE_DEVICES")))
        except pynvml.NVMLError:
            nvml.nvmlShutdown()
            raise
        if ordinals is None:
            self._handles = seen
        elif all(ordinal < len(seen) for ordinal in ordinals):
            self._handles = [seen[ordinal] for ordinal in ordinals]
        else:  # those of others would be measured
            self._handles = []

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[Reading]:
        """What each GPU says now.

        Raises:
            pynvml.NVMLError: the driver has gone, or a GPU has.
        """
        return [self._read(gpu) for gpu in self._handles]

    def close(self) -> None:
        """Lets go of NVML."""
        with contextlib.suppress(pynvml.NVMLError):  # the driver may have gone
            self._nvml.nvmlShutdown()

    def _read(self, gpu: Any) -> Reading:
        nvml = self._nvml
        return Reading(
            _answer(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            _answer(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            _answer(lambda: float(nvml.nvmlDeviceGetTemperature(gpu, _CORE))),
        )

    def _visible(self, named: str | None) -> Iterator[Any]:
        """Handles in CUDA's order. As CUDA does, it stops at the first name that is none."""
        nvml = self._nvml
        count = nvml.nvmlDeviceGetCount()
        whole = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        if named is None:
            yield from whole
            return
        for name in (one.strip() for one in named.split(",")):
            if name.isdecimal() and int(name) < count:
                yield whole[int(name)]
                continue
            among = self._slices(whole) if name.startswith("MIG-") else whole
            alike = [one for one in among if name and nvml.nvmlDeviceGetUUID(one).startswith(name)]
            if len(alike) != 1:
                return
            yield alike[0]

    def _slices(self, whole: Sequence[Any]) -> list[Any]:
        """The MIG devices of all GPUs."""
        nvml, found = self._nvml, []
        for gpu in whole:
            try:
                most = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
            except pynvml.NVMLError_NotSupported:  # no card of this kind
                continue
            for number in range(most):
                with contextlib.suppress(pynvml.NVMLError_NotFound):
                    found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
        return found


def _answer(ask: Callable[[], float]) -> float | None:
    """What NVML says; None where this GPU cannot."""
    try:
        return ask()
    except pynvml.NVMLError as error:
        if error.value in _UNSUPPORTED:
            return None
        raise


# ---- The host's memory

SHARED = Path("/dev/shm")


class Shared(NamedTuple):
    """Bytes of the host's shared memory, across all processes."""

    used: int
    size: int


def host_memory(process: psutil.Process | None = None) -> int | None:
    """Memory of a process and its descendants; a page that several of them hold counts once.

    It is the proportional set size: a page shared by n processes counts 1/n for each, so pages
    shared with other programs, such as libraries, count in part. Reading takes about 20 ms for each
    GiB of ordinary pages (measured): not beside a step.

    Args:
        process: this one by default.

    Returns:
        Bytes; None where the system does not say it for all of them.
    """
    process = process or psutil.Process()
    total = 0
    try:
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                total += member.memory_full_info().pss
    except (psutil.Error, AttributeError):  # another user's, or a system without this number
        return None
    return total or None


def shared_memory(folder: Path = SHARED) -> Shared | None:
    """How full the host's shared memory is; None where there is none.

    Args:
        folder: where it is mounted.
    """
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    blocks = stats.f_blocks - stats.f_bfree
    return Shared(blocks * stats.f_frsize, stats.f_blocks * stats.f_frsize)


# ---- Samples while a run trains

MEAN = ("train/gpu_utilization", "train/gpu_power_w")
LARGEST = ("train/gpu_temperature_c", "train/host_memory_gib", "train/shm_gib")

# The host's memory is read at most this often, and reading it takes at most this share of the time.
_HOST_EVERY_S = 10.0
_HOST_SHARE = 0.01

_SHARED_FULL = 0.9


class SystemMetrics:
    """Samples from a thread of its own, from when it is made until it is closed.

    Args:
        environment: ``os.environ``; CUDA_VISIBLE_DEVICES in it says which GPUs are the run's.
        devices: of this process.
        say: takes a line; called from the thread.
        every_s: seconds between two samples.
        nvml: the module ``pynvml``, or what stands in for it.
        read_host: gives the bytes that this process and its workers hold, or None.
        read_shared: gives how full the host's shared memory is, or None.
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
        self._sums: dict[str, list[float]] = {}  # name -> its samples' sum and number
        self._most: dict[str, float] = {}
        self._newest: dict[str, float] = {}  # of the host: read more seldom than it is recorded
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
                self._say(f"utilization, power and temperature are not recorded: {error}")
            else:
                if not len(self._gpus):
                    named = environment.get("CUDA_VISIBLE_DEVICES", "not set")
                    self._say(
                        "utilization, power and temperature are not recorded: NVML does not find "
                        f"this process's GPUs {ordinals} (CUDA_VISIBLE_DEVICES: {named})"
                    )
        self._thread = threading.Thread(target=self._sample, name="system-metrics", daemon=True)
        self._thread.start()

    def window(self) -> dict[str, float]:
        """Values by their full names since the last call; without a sample, no value."""
        with self._lock:
            found = {name: total / count for name, (total, count) in self._sums.items()}
            found |= self._most
            self._sums = {}
            self._most = dict(self._newest)
        return found

    def close(self) -> None:
        """Ends the thread. A driver that does not answer is not waited for long."""
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
            self._say(f"utilization, power and temperature are no longer recorded: {error}")
            return
        with self._lock:
            for reading in readings:
                self._add("train/gpu_utilization", reading.utilization)
                self._add("train/gpu_power_w", reading.power_w)
                self._raise("train/gpu_temperature_c", reading.temperature_c)

    def _sample_host(self) -> None:
        shared = self._read_shared()
        if shared is not None:
            self._keep("train/shm_gib", shared.used)
            if shared.size and shared.used > _SHARED_FULL * shared.size and not self._warned:
                self._warned = True
                self._say(_warning(shared))
        began = time.monotonic()
        if began >= self._read_host_at:
            held = self._read_host()
            ended = time.monotonic()
            self._read_host_at = ended + max(_HOST_EVERY_S, (ended - began) / _HOST_SHARE)
            if held is not None:
                self._keep("train/host_memory_gib", held)

    def _keep(self, name: str, size: int) -> None:
        with self._lock:
            self._newest[name] = size / GIB
            self._raise(name, size / GIB)

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = [total + value, count + 1]

    def _raise(self, name: str, value: float | None) -> None:
        if value is not None:
            self._most[name] = max(value, self._most.get(name, value))


def _warning(shared: Shared) -> str:
    return (
        f"warning: {SHARED} is {shared.used / shared.size:.0%} full (measured: "
        f"{shared.used / _MIB:.0f} of {shared.size / _MIB:.0f} MiB); when it is full, a worker "
        "dies of a bus error: start the container with more (docker run --shm-size), or lower "
        "--data.prefetch or --data.workers"
    )
