"""``jaxtrain plan`` with an invented compiler, and without one.

tests/gpu_programs tests planning with JAX's GPU compiler, which requires the cuda12 extra.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from planning.step_findings import compiled

from jaxtrain import config, main
from jaxtrain.cli import plan
from jaxtrain.config import files
from jaxtrain.cost import cards
from jaxtrain.planning import planner, shipped
from jaxtrain.planning.compilation import CompiledStep
from jaxtrain.xla import platform


@pytest.fixture(autouse=True)
def gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: True)


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


ROW = shipped.Row("h100_8", "h100", 8, 25.91, 71.09, (0.205, 0.28), 100_000, (6.08, 8.26), "0.12.0")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["h100_8"], "the plan of h100_8 as shipped on 8 x NVIDIA H100 80GB HBM3, jax 0.12.0: "),
        (["h100_8", "--gpus", "2x8"], "as shipped (without your changes) on 8 x NVIDIA H100"),
        (["own.py"], None),
    ],
)
def test_without_a_gpu_compiler_the_shipped_plan_is_printed_at_once(
    typed: list[str],
    shown: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    monkeypatch.setattr(shipped, "rows", lambda: [ROW])
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from jaxtrain import config\nrun = config.named('h100_8')\n")
    assert main.main(["plan", *typed, "--price-per-gpu-hour", "2.5"]) == 2
    error = capsys.readouterr().err
    assert "requires JAX's compiler for GPUs, but no GPU: install it" in error
    assert "cuda12" in error
    if shown is None:
        assert "as shipped" not in error
    else:
        assert shown in error
        assert (
            "25.9 of 71.1 GiB per GPU; 0.205 to 0.28 s per step; 100,000 steps in 6.08 to 8.26 h; "
            "cost 122 to 165 at 2.5 per GPU-hour"
        ) in error


def test_every_config_has_its_shipped_plan() -> None:
    assert [row.config for row in shipped.rows()] == sorted(files.names())
    for row in shipped.rows():
        run = config.named(row.config)
        gpu = cards.card_of_config(row.config) or cards.usual_card(row.config)
        assert (row.gpu, row.gpus) == (gpu, run.mesh.devices)
        assert row.steps == run.loop.steps or run.loop.steps is None
