"""Datasheet rates by the name that jax prints."""

import pytest

from jaxtrain.telemetry import datasheets


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("cpu", None),
    ],
)
def test_the_rate_of_products(kind: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert datasheets.peak_bf16_flops(kind) == expected


def test_bandwidth_goes_by_the_name_too() -> None:
    assert datasheets.memory_bytes_per_second("NVIDIA H100 PCIe") == 2.0e12
    assert datasheets.memory_bytes_per_second("NVIDIA H100 80GB HBM3") == 3.35e12
    assert datasheets.memory_bytes_per_second("cpu") is None
