"""What NVIDIA's datasheets say of the cards: the ceilings that rates are compared with."""

import re

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
