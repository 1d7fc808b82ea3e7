"""Tests the measured peaks of a device."""

from typing import Any

import pytest

from jaxtrain.bench import peaks, timing


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_SIDE", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr(peaks, "_COPY_BYTES", {"cpu": 2**12, "gpu": 2**12})
    monkeypatch.setattr(peaks, "_CALLS", {"cpu": 3, "gpu": 3})

    def took_half_a_second(action: Any, **how: Any) -> timing.Times:
        action()
        return timing.Times((0.5,))

    monkeypatch.setattr(timing, "measure", took_half_a_second)
    found = peaks.measure()
    assert found.float32_flops == found.bf16_flops == 3 * 2 * 64**3 / 0.5
    assert found.copy_bytes == 3 * 2 * 2**12 / 0.5  # read and written
