"""What the GPUs of this host say about themselves, by NVML, the library below nvidia-smi."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import pynvml

GIB = 2**30

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


def driver_version(nvml: Any = pynvml) -> str | None:
    """The NVIDIA driver's version; None where there is none, or it does not answer.

    Args:
        nvml: the module ``pynvml``, or what stands in for it.
    """
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


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
