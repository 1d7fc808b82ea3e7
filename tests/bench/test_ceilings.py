"""What a device can do at most."""

import pytest

from jaxtrain.bench import ceilings


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny size: the numbers are a CPU's, and bfloat16 is not faster there."""
    monkeypatch.setattr(ceilings, "_SIDE", {"cpu": 256, "gpu": 256})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**22, "gpu": 2**22})
    found = ceilings.measure(at_most_s=0.2)
    assert 1e8 < found.float32_flops < 1e13
    assert 1e7 < found.bf16_flops < 1e13
    assert 1e8 < found.copy_bytes < 1e12
