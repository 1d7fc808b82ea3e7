"""`--deterministic True` in steps compiled for H100s, without having one; requires ``cuda12``."""

import re
from unittest import mock

import jax
import pytest
from gpu_programs.described_gpus import h100s

from jaxtrain import config
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.ops import per_device
from jaxtrain.sharding import make_mesh
from jaxtrain.training import setup, step_setup

LAYERS = 2


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_of_all_attention_layers_are_summed_in_a_fixed_order(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        *("--model.depth", str(LAYERS), "--model.width", "256", "--model.vocab_size", "512"),
        *("--optim.accumulate", "1", "--data.batch_size", str(devices), "--mesh.data", "1"),
        *("--mesh.fsdp", str(devices), "--deterministic", "True"),
    ]
    run = config.load("gpt_h100_8", settings)
    parts = step_setup.build_without_data(run, make_mesh(run.mesh, h100s(devices)))
    lower = jax.stages.Traced.lower
    monkeypatch.setattr(
        jax.stages.Traced, "lower", lambda traced: lower(traced, lowering_platforms=("cuda",))
    )
    log = mock.Mock()
    log.phases.now.step = 0
    with per_device.tracing(platform="cuda"):
        step = setup.compile_in_all_processes(parts, RunFlags(), log)
    assert isinstance(step, jax.stages.Compiled)
    text = step.as_text()
    assert text is not None
    backward = [line for line in text.splitlines() if re.search(r"__cudnn\$fmha\w*Backward", line)]
    assert len(backward) == LAYERS
    fixed = [line for line in backward if re.search(r'"force_deterministic": ?true', line)]
    assert len(fixed) == LAYERS
