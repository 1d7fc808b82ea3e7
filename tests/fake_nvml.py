"""A driver with GPUs that say what a test wants; stands in for the module pynvml."""

from types import SimpleNamespace
from typing import Any

import pynvml

Card = dict[str, Any]


def card(uuid: str, share: Any = 50, watts: Any = 300, celsius: Any = 60, **more: Any) -> Card:
    """A GPU; in place of a number stands what NVML raises. ``slices``: its MIG devices."""
    return {"uuid": uuid, "share": share, "watts": watts, "celsius": celsius, **more}


class Nvml:
    """The functions of pynvml that are used.

    Attributes:
        opened: how often it is held open now.
    """

    def __init__(self, *cards: Card, absent: bool = False) -> None:
        self.cards, self.absent = cards, absent
        self.opened = 0

    def nvmlInit(self) -> None:
        if self.absent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        assert self.opened
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: Card) -> str:
        return handle["uuid"]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Card) -> int:
        if "slices" not in handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Card, index: int) -> Card:
        if index >= len(handle["slices"]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle["slices"][index]

    def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Any:
        return SimpleNamespace(gpu=_said(handle["share"]), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: Card) -> int:
        return _said(handle["watts"]) * 1000

    def nvmlDeviceGetTemperature(self, handle: Card, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return _said(handle["celsius"])


def _said(value: Any) -> int:
    if isinstance(value, pynvml.NVMLError):
        raise value
    return value


UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
