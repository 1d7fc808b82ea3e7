"""Plans of shipped configs, compiled for their GPUs without having one; requires ``cuda12``.

The default suite does not collect this file. Run ``python -m pytest
tests/gpu_programs/golden_plans.py``. After an intended change, rewrite the plans with the same jax:

    PYTHONPATH=.:tests:benchmarks python tests/gpu_programs/golden_plans.py [CONFIG ...]
"""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import programs
import pytest
from cost import communication_formula

from jaxtrain import config
from jaxtrain.formats import GIB
from jaxtrain.planning import shipped
from jaxtrain.planning.planner import Planner
from jaxtrain.sharding import AXES
from jaxtrain.training import step_setup
from jaxtrain.xla import platform

# Takes half the time to compile; the plans of h100_16 and gpt_h100_8 are the same with and without.
_QUICK = "--xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The allowed communication of a config's step.

    Attributes:
        kinds: collectives of parameters and gradients.
        gathers: all-gathers of all parameters per step.
        file_weights: all-gathers of all weights that are not trained, per step.
        sent: the largest ratio of the communication volume to that of the formula.
        attention: calls of cuDNN's attention per step, in each direction.
        overrides: changes to the config.
    """

    kinds: frozenset[str]
    gathers: int
    sent: float
    attention: int
    file_weights: int = 0
    overrides: tuple[str, ...] = ()


ZERO = frozenset({"all-gather", "reduce-scatter"})
CONFIGS = {
    "h100_16": Allowed(ZERO, 1, 1.1, 0),  # kept for the backward pass
    # The formula counts one gather and one reduce-scatter; that Muon's kernels are distributed over
    # the 8 devices and come back is an eighth more.
    "h100_48": Allowed(ZERO, 1, 1.1, 0),  # sharded in a node, replicated across
    "mlm_h200_8": Allowed(ZERO, 1, 1.1, 8),  # once per step
    # Heads of two channels, which no fused kernel takes; nothing is sharded.
    "bert_base_h200_8": Allowed(ZERO, 1, 1.1, 12, overrides=("--model.attend", "document")),
    "ettin_150m_h100_8": Allowed(ZERO, 1, 1.1, 22 * 9),
    # Two microbatches; Muon's matrices are distributed over the devices.
    "gpt_h100_8": Allowed(ZERO | {"all-to-all"}, 4, 1.1, 20 * 2),
    "gpt_32gb_high": Allowed(frozenset(), 0, 0.0, 20 * 4),  # one GPU
    "a6000_medium": Allowed(frozenset(), 0, 0.0, 16 * 4),  # one GPU
}
REMAT = ("h100_64", "mlm_h200_8")
"""Configs whose `model.remat` is compared with the other choices."""
PLANS = Path(__file__).resolve().parent.parent / "fixtures" / "plans"
MEMORY = ("parameters", "optimizer", "batch", "gradients", "temporaries", "outputs")
COLLECTIVE = ("kind", "dtype", "axis", "crosses_nodes", "count", "wire_bytes")


def summary(name: str) -> dict[str, Any]:
    """Returns the parts of a plan that must not change unnoticed."""
    plan = Planner(name, CONFIGS[name].overrides).plan()
    step, cost = plan.step, plan.step.cost
    memory = plan.memory.rows | {"gradients": step.gradients}
    kernels = dict(cost.kernels or {})
    attention = {way: kernels.pop(f"attention_{way}") for way in ("forward", "backward")}
    return {
        "config": name,
        "shard": plan.mesh.shard,
        "elements": step.elements,
        "file_weights": step.file_weights,
        "needed_gib": plan.memory.needed / GIB,
        "jax": step.jax,
        "memory": {row: int(memory[row]) for row in MEMORY},
        "traffic": [
            {field: getattr(row, field) for field in COLLECTIVE} for row in cost.traffic or ()
        ],
        "formula_bytes": _formula_bytes(name),
        "attention": attention,
        "kernels": kernels,
        # Without the lines, so that an edit above them leaves the file as it is.
        "largest": [
            [re.sub(r":\d+", "", made_by) for made_by in slot.made_by]
            for slot in step.largest or ()
        ],
    }


def _formula_bytes(name: str) -> float:
    """Returns the bytes that a device must send per step, by the formula of the sharding."""
    run = config.load(name, CONFIGS[name].overrides)
    mesh = jax.sharding.AbstractMesh(
        (run.mesh.data, run.mesh.fsdp), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    return communication_formula.of_step(step_setup.build_without_data(run, mesh))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """(found, golden)."""
    golden = json.loads((PLANS / f"{request.param}.json").read_text())
    return summary(request.param), golden


def test_the_plan_is_that_of_a_gpu(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found, golden = pair
    assert platform.has_cuda_plugin()
    assert found["jax"] == golden["jax"], "a plan is valid for one version of jax: rewrite it"


def test_memory_is_within_2_percent(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found, golden = pair
    for row, size in golden["memory"].items():
        assert found["memory"][row] == pytest.approx(size, rel=0.02), row


def test_the_shipped_plan_is_this_one(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """What ``plan`` prints without the compiler; benchmarks/shipped_plans.py writes it."""
    found, _ = pair
    row = {row.config: row for row in shipped.rows()}[found["config"]]
    assert row.jax == found["jax"]
    if not CONFIGS[row.config].overrides:
        assert row.needed_gib == pytest.approx(found["needed_gib"], rel=0.02)


def test_collectives_are_unchanged(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    found, golden = pair
    assert found["traffic"] == golden["traffic"]


def test_only_parameters_are_communicated_in_bfloat16(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """These limits do not depend on the golden plan."""
    found, _ = pair
    allowed = CONFIGS[found["config"]]
    large = [row for row in found["traffic"] if row["wire_bytes"] > 1e6]
    assert {row["dtype"] for row in large} <= {"bf16"}
    assert {row["kind"] for row in large} >= allowed.kinds
    assert {row["kind"] for row in found["traffic"]} <= allowed.kinds | {"all-reduce"}
    gathered = sum(row["wire_bytes"] for row in found["traffic"] if row["kind"] == "all-gather")
    most = allowed.gathers * found["elements"] + allowed.file_weights * found["file_weights"]
    assert gathered <= 1.01 * 2 * most  # bfloat16
    sent = sum(row["wire_bytes"] for row in found["traffic"])
    assert sent <= allowed.sent * found["formula_bytes"]


def test_attention_is_fused(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """It is called for each layer and microbatch, once in each direction."""
    found, _ = pair
    calls = CONFIGS[found["config"]].attention
    assert found["attention"] == {"forward": calls, "backward": calls}


def test_kernels_are_unchanged(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Every convolution is a call of cuDNN, and every large matmul a kernel for tensor cores."""
    found, golden = pair
    assert found["kernels"]["other_convolutions"] == 0
    assert found["kernels"] == golden["kernels"]


def test_the_largest_temporaries_belong_to_the_model_or_the_optimizer(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    found, _ = pair
    assert len(found["largest"]) == 5
    # step.py accumulates the gradients of microbatches.
    ours = ("models/", "optim/muon.py", "training/step.py")
    known = [lines[0] for lines in found["largest"] if lines]
    assert all(line.startswith(ours) for line in known)
    # One may be the compiler's: it pads the gradient of a masked LM's logits for a matmul.
    assert len(known) >= 4


@pytest.mark.parametrize("name", REMAT)
def test_the_rematerialization_is_the_fastest_that_fits(name: str) -> None:
    run = config.named(name)
    plans = programs.by_remat(Planner(name, []), run)
    assert programs.fastest(plans) == run.model.remat


if __name__ == "__main__":
    for one in sys.argv[1:] or CONFIGS:
        text = json.dumps(summary(one), indent=1)
        (PLANS / f"{one}.json").write_text(text + "\n")
