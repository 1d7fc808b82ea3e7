"""Replaces the module pynvml with a driver whose GPUs report the values of a test."""

from types import SimpleNamespace
from typing import Any

import pynvml

Card = dict[str, Any]


def card(uuid: str, share: Any = 50, watts: Any = 300, celsius: Any = 60, **more: Any) -> Card:
    """Returns a GPU; a value may be an NVMLError, which is then raised.

    ``used``: bytes of its memory in use.
    """
    return {"uuid": uuid, "share": share, "watts": watts, "celsius": celsius, "used": 0, **more}


class Nvml:
    """The functions of pynvml that are used."""

    def __init__(self, *cards: Card, fails: int | None = None) -> None:
        self.cards, self.fails = cards, fails
        self.opened = 0

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise pynvml.NVMLError(self.fails)
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

    def nvmlDeviceGetName(self, handle: Card) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: Card, version: int) -> Any:
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(total=81559 * 2**20, used=_reported(handle["used"]))

    def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Any:
        return SimpleNamespace(gpu=_reported(handle["share"]), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: Card) -> int:
        return _reported(handle["watts"]) * 1000

    def nvmlDeviceGetTemperature(self, handle: Card, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return _reported(handle["celsius"])


def _reported(value: Any) -> int:
    if isinstance(value, pynvml.NVMLError):
        raise value
    return value


UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
