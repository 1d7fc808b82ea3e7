"""``jaxtrain plan`` without JAX's GPU compiler: the state is exact, the rest an estimate.

tests/gpu_programs tests planning with that compiler, which requires the cuda12 extra.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from planning.step_findings import compiled
from program import TINY_MLM

from jaxtrain import main
from jaxtrain.cli import plan
from jaxtrain.planning import planner
from jaxtrain.planning.compilation import CompiledStep
from jaxtrain.xla import platform

TINY = ["plan", *TINY_MLM, "--loop.steps", "50", "--gpus", "2x2"]


@pytest.fixture(autouse=True)
def no_gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)


@pytest.mark.slow
def test_an_estimate_is_labeled_and_its_state_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    price = ["--price-per-gpu-hour", "2"]
    more = ["--mesh.min_shard_elements", "1", "--loop.replay_every", "120"]
    assert main.main([*TINY, *price, *more, "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "ESTIMATE" in printed
    assert "config demo_mlm names no GPU: planning for h100" in printed
    assert "unknown whether it fits: parameters, optimizer, second state, and batch take" in printed
    assert "time and cost need the GPU compiler" in printed
    found = json.loads(output.read_text())
    step = found["step"]
    assert (step["cost"]["devices"], found["nodes"]) == (4, 2)
    # Arrays are sharded four ways, except those whose sizes four does not divide.
    assert step["elements"] <= step["parameters"] < 1.1 * step["elements"]
    assert step["optimizer"] == pytest.approx(2 * step["parameters"], rel=0.01)
    # Float32 parameters, AdamW's two moments, and a few counters, of all devices together.
    assert step["checkpoint"] == pytest.approx(3 * 4 * step["elements"], rel=0.01)
    assert step["cost"]["temporaries"] > 0
    # A step that is computed twice starts from a copy of the state.
    assert step["second_state"] >= step["parameters"] + step["optimizer"]
    assert found["run"]["steps"] == 50


Compile = Callable[[Sequence[str]], CompiledStep]


def compiles(monkeypatch: pytest.MonkeyPatch, compile_step: Compile) -> None:
    """Replaces the compiling process."""
    monkeypatch.setattr(
        "jaxtrain.planning.planner.compile_step", lambda _, settings, *rest: compile_step(settings)
    )


def fails(error: Exception) -> NoReturn:
    raise error


def test_a_batch_is_checked_for_the_requested_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 devices divide 120; the config's own 16 do not."""
    requests: list[Sequence[str]] = []

    def refuse(settings: Sequence[str]) -> CompiledStep:
        requests.append(settings)
        fails(planner.NotCompiled("enough"))

    compiles(monkeypatch, refuse)
    at = ["--config", "h100_16", "--gpus", "3x8", "--data.batch_size", "120"]
    assert main.main(["plan", *at, "--mesh.fsdp", "16"]) == 2
    assert requests[0].count("--mesh.fsdp") == 1
    assert requests[0][requests[0].index("--mesh.fsdp") + 1] == "24"


def test_a_config_that_does_not_fit_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The alternatives that fit are listed, each with complete overrides."""

    def compile_step(settings: Sequence[str]) -> CompiledStep:
        parts = int(dict(itertools.pairwise(settings))["--optim.accumulate"])
        return compiled(temporaries=int(4e11 / parts))

    compiles(monkeypatch, compile_step)
    output = tmp_path / "plan.json"
    at = ["--config", "h100_16", "--gpus", "4", "--json", str(output)]
    assert main.main(["plan", *at]) == plan.DOES_NOT_FIT
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "the fastest alternatives that fit" in printed
    written = json.loads(output.read_text())
    assert not written["fits"]
    found = written["fit"]["tried"][0]
    assert found["overrides"][:4] == ["--mesh.data", "1", "--mesh.fsdp", "4"]
    assert found["overrides"].count("--optim.accumulate") == 1
    assert found["fits"]


def test_without_a_gpu_compiler_it_is_unknown_whether_alternatives_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiles(monkeypatch, lambda _: compiled(temporaries=3 * 10**11, estimate=True))
    output = tmp_path / "plan.json"
    assert main.main(["plan", "--config", "h100_16", "--fit", "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "whether one of them fits is unknown without JAX's GPU compiler: " in printed
    assert "whether the run fits, its time, and its cost stay unknown" in printed.splitlines()[0]
    assert 0 < printed.index("compiling the step for a CPU") < printed.index("ESTIMATE")
    assert "none of them fits" not in printed
    assert "-2" not in printed.replace(str(output), "")  # no negative number of GiB to spare
    assert {one["fits"] for one in json.loads(output.read_text())["fit"]["tried"]} == {None}
