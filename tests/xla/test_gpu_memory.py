"""How much GPU memory jax reserves."""

import pytest
from jaxlib import xla_client

from jaxtrain.xla import gpu_memory

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({}, gpu_memory.MEMORY_FRACTION),
        ({NEW: "", OLD: ""}, gpu_memory.MEMORY_FRACTION),
        ({NEW: "0.5"}, 0.5),
        ({OLD: "0.4"}, 0.4),
        ({NEW: "0.5", OLD: ""}, 0.5),
        ({NEW: "", OLD: "0.4"}, 0.4),
        ({NEW: "0.5", OLD: "0.5"}, 0.5),
        ({NEW: "0.5", OLD: "0.4"}, 0.5),
    ],
)
def test_jax_takes_the_memory_fraction_of_the_user_or_else_ours(
    environment: dict[str, str],
    taken: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both_differ = environment == {NEW: "0.5", OLD: "0.4"}
    for name in (NEW, OLD):
        monkeypatch.delenv(name, raising=False)
    gpu_memory.reserve_memory(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == taken
    assert (f"{OLD}=0.4" in capsys.readouterr().err) == both_differ
