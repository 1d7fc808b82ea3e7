"""Tests the compiling worker process: its environment, failures and time limit."""

from pathlib import Path

import pytest
from program import TINY_MLM

from jaxtrain.errors import InputError
from jaxtrain.planning import buffers, cards, input_rate, planner, prediction
from jaxtrain.xla import platform, subprocess_worker


def asked(config: str = "demo", **more: object) -> planner.PlanRequest:
    fields = {"config": config, "overrides": (), "gpu": "h100", "gpus_per_node": 8}
    return planner.PlanRequest(**(fields | more))  # type: ignore[arg-type]


def test_the_worker_sees_no_gpu_and_writes_its_dump_to_the_given_folder(tmp_path: Path) -> None:
    outside = {"XLA_FLAGS": "--xla_dump_to=/mine", "JAX_PLATFORMS": "cuda", "PYTHONPATH": "/x"}
    found = planner.environment(outside, tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "JAX_PLATFORMS" not in found
    assert found["XLA_FLAGS"].endswith(buffers.flags(tmp_path))  # the last one wins
    assert found["PYTHONPATH"].endswith("/x")


def test_prepared_clips_are_planned_as_they_are_sent() -> None:
    def added(name: str, *typed: str, **host: object) -> tuple[str, ...]:
        known = input_rate.Host(**host)  # type: ignore[arg-type]
        return planner.Planner(name, list(typed), None, None, None, host=known).settings

    assert added("h100_8", source="clips") == ("--data.convert_on", "device")
    assert added("h100_8", "--data.convert_on", "host", source="clips")[1] == "host"
    assert added("h100_8", source="videos") == added("mlm_h200_8") == ()


def test_a_worker_that_takes_too_long_is_stopped() -> None:
    found = planner.compile_step(asked(), timeout_s=0.2)
    assert found == {"failure": "timed out after 0 s", "timed_out": True}


def test_a_wrong_config_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    with pytest.raises(InputError, match="did you mean"):
        planner.compile_step(asked(overrides=("--optim.peak_lrr", "1")), timeout_s=120)


def test_a_worker_that_exits_reports_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_worker.sys, "executable", "/bin/false")
    found = planner.compile_step(asked(), timeout_s=60)
    assert found == {"failure": "the compiler ended with exit code 1"}


def test_a_killed_worker_reports_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_FUNCTION", "worker_functions:kill_itself")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    failure = planner.compile_step(asked(), timeout_s=60)["failure"]
    assert failure == "the compiler was ended by SIGKILL (out of host memory?)"


@pytest.mark.slow
def test_a_step_that_is_computed_twice_needs_a_second_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    typed = (*TINY_MLM[2:], "--loop.steps", "9", "--loop.replay_every", "120")
    found = planner.compile_step(asked("demo_mlm", overrides=typed), 300)
    rows = prediction.memory(found, cards.card("h100"), 1, 8).rows
    assert "outputs" not in rows
    assert rows["second state"] >= rows["parameters"] + rows["optimizer"]


@pytest.mark.long
def test_a_compilers_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax reads a setting with a value that it does not have."""
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "exact")
    found = planner.compile_step(asked(), timeout_s=120)
    assert "Error: " in found["failure"]
    assert "\n" not in found["failure"]
