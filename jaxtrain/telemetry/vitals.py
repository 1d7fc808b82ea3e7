"""What the machine says while it trains, sampled in the background: GPUs, memory of the host.

===========================  ==========================================================  ========
``train/gpu_utilization``    share of the time that a kernel ran, in [0, 1]              mean
``train/gpu_power_w``        watts of a GPU                                              mean
``train/gpu_temperature_c``  degrees Celsius of the hottest GPU                          largest
``train/host_memory_gib``    of a process and its workers; what they share counts once   largest
``train/shm_gib``            used of the host's /dev/shm, by whomever                    largest
===========================  ==========================================================  ========

Over the GPUs and the time since the last record, and over all processes of the run. What a machine
cannot say has no value.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from jaxtrain.telemetry import host_memory
from jaxtrain.telemetry.devices import GIB, Gpus

MEAN = ("train/gpu_utilization", "train/gpu_power_w")
LARGEST = ("train/gpu_temperature_c", "train/host_memory_gib", "train/shm_gib")

# A host's memory is read at most so often, and its reading takes at most this share of the time.
_HOST_EVERY_S = 10.0
_HOST_SHARE = 0.01

_SHARED_FULL = 0.9
_MIB = 2**20


class Vitals:
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
        read_host: Callable[[], int | None] = host_memory.proportional_bytes,
        read_shared: Callable[[], host_memory.Shared | None] = host_memory.shared,
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
                self._say(f"utilisation, power and temperature are not recorded: {error}")
            else:
                if not len(self._gpus):
                    named = environment.get("CUDA_VISIBLE_DEVICES", "not set")
                    self._say(
                        "utilisation, power and temperature are not recorded: NVML does not find "
                        f"this process's GPUs {ordinals} (CUDA_VISIBLE_DEVICES: {named})"
                    )
        self._thread = threading.Thread(target=self._sample, name="vitals", daemon=True)
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
            self._say(f"utilisation, power and temperature are no longer recorded: {error}")
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


def _warning(shared: host_memory.Shared) -> str:
    return (
        f"warning: {host_memory.SHARED} is {shared.used / shared.size:.0%} full (measured: "
        f"{shared.used / _MIB:.0f} of {shared.size / _MIB:.0f} MiB); when it is full, a worker "
        "dies of a bus error: start the container with more (docker run --shm-size), or lower "
        "--data.prefetch or --data.workers"
    )
