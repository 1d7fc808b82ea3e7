"""The programs that measure GPUs, compiled for an H100 without having one; requires ``cuda12``."""

import re

from jax.experimental import topologies

from jaxtrain.planning import cards
from jaxtrain.training import device_rates


def test_a_gpu_computes_only_the_matmuls_and_the_copies() -> None:
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card("h100")),
        topology="1x1x2",
    )
    matmuls, copies = device_rates.programs(found.devices, device_rates.SIZES)
    text = matmuls.as_text()
    assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul"', text)) == 24
    assert not re.search(r"= bf16.* copy\(", text)
    assert matmuls.memory_analysis().temp_size_in_bytes <= 129 * 2**20
    assert '"known_trip_count":{"n":"16"}' in copies.as_text()
    assert copies.memory_analysis().temp_size_in_bytes <= 257 * 2**20  # updated in place
