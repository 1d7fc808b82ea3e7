"""GPUs that are described to the compiler and not present; requires ``cuda12``."""

import os

import jax
from jax.experimental import topologies

from jaxtrain.cost import cards

# Takes half the time to compile; the instructions are the same with and without.
_QUICK = "--xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()


def h100s(count: int) -> list[jax.Device]:
    """Returns the H100s of one host."""
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card("h100")),
        topology=f"1x1x{count}",
    ).devices
