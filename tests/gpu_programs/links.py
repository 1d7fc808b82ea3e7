"""The exchange between hosts, compiled for H100 without having one; requires ``cuda12``."""

from jax.experimental import topologies

from jaxtrain.doctor import links
from jaxtrain.planning import cards


def test_a_gpu_only_sends_and_receives() -> None:
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card("h100")),
        topology="1x3x2",
    )
    permutation = links.swaps([[0, 1], [2, 3], [4, 5]], (0, 2))
    swap = links.exchange(found.devices, permutation, sent=2**24, exchanges=4)
    text = swap.as_text()
    (line,) = [line for line in text.splitlines() if " collective-permute-start(" in line]
    assert "(f32[4194304]{0}, f32[4194304]{0})" in line
    assert "source_target_pairs={{0,4},{4,0},{1,5},{5,1}}" in line
    assert '"known_trip_count":{"n":"4"}' in text
    assert swap.memory_analysis().temp_size_in_bytes <= 33 * 2**20  # sent and received
