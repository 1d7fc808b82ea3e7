"""The exchange between hosts, compiled for H100 without having one; requires ``cuda12``."""

import re

import jax
import numpy as np
from jax.experimental import topologies

from jaxtrain.cost import cards
from jaxtrain.doctor import collectives


def test_a_gpu_only_sends_and_receives() -> None:
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card("h100")),
        topology="1x3x2",
    )
    over = collectives.split(found.devices)
    rows = jax.ShapeDtypeStruct((6, 2**22), np.float32, sharding=over)
    swap = collectives.exchange(over, collectives.swaps([0, 1], [4, 5])).lower(rows).compile()
    text = swap.as_text()
    (line,) = re.findall(r".* collective-permute(?:-start)?\(.*", text)
    assert "f32[1,4194304]" in line  # received
    assert re.search(r" = f32\[1,4194304\]\S* parameter\(", text)  # sent
    assert "source_target_pairs={{0,4},{4,0},{1,5},{5,1}}" in line
