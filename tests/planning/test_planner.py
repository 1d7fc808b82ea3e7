"""Tests the compiling worker process: its environment, failures and time limit."""

from pathlib import Path

import pytest
from data.video import sample_videos

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.planning import compilation, planner
from jaxtrain.xla import platform

RUN = config.load("h100_16", ["--model.remat", "ends"])


def compiled(*typed: str, name: str = "demo", timeout_s: float = 60.0) -> compilation.CompiledStep:
    return planner.compile_step(name, typed, "h100", 8, timeout_s)


def test_the_worker_sees_no_gpu_and_writes_its_dump_to_the_given_folder(tmp_path: Path) -> None:
    outside = {"XLA_FLAGS": "--xla_dump_to=/mine", "JAX_PLATFORMS": "cuda", "PYTHONPATH": "/x"}
    found = planner.environment(outside, tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "JAX_PLATFORMS" not in found
    assert found["XLA_FLAGS"].endswith(compilation.dump_flags(tmp_path))  # the last one wins
    assert found["PYTHONPATH"].endswith("/x")


def test_a_worker_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(planner.TimedOut, match="demo could not be compiled: timed out after 0 s"):
        compiled(timeout_s=0.2)


def test_a_wrong_config_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    with pytest.raises(InputError, match="did you mean"):
        compiled("--optim.peak_lrr", "1", timeout_s=120)


def test_a_killed_worker_reports_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_FUNCTION", "jobs.worker_functions:kill_itself")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with pytest.raises(planner.NotCompiled) as caught:
        compiled()
    assert str(caught.value).endswith("the compiler was ended by SIGKILL (out of host memory?)")


def test_other_devices_are_fitted() -> None:
    """tests/test_sharding.py tests the function that a run uses, too."""
    changes = ("--mesh.data", "1", "--mesh.fsdp", "4", "--optim.accumulate", "4")
    assert planner.spread(RUN, 1, 4) == changes
    with pytest.raises(InputError, match=r"over 24 devices \(--gpus 3x8\): use"):
        planner.spread(RUN, 3, 8)


@pytest.mark.parametrize("text", ["", "x", "2x", "0x8", "2x-1", "two", "2x8x1"])
def test_invalid_devices_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match="NODESxGPUS"):
        planner.parse_devices(text)


@pytest.mark.long
def test_a_compilers_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax reads a setting with a value that it does not have."""
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: False)
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "exact")
    with pytest.raises(planner.NotCompiled, match="Error: ") as caught:
        compiled(timeout_s=120)
    assert "\n" not in str(caught.value)


def test_videos_that_a_run_would_cut_are_counted(tmp_path: Path) -> None:
    """Those that this machine does not have are not, and the plan says so."""
    sample_videos.write(tmp_path / "videos/one.mp4", 30)
    data = ["--data.path", str(tmp_path / "videos"), "--data.cache_dir", str(tmp_path / "cache")]
    (estimate,) = planner.Planner("h100_1", data)._preparation
    assert estimate.what == "1 video (30 frames)"
    assert 0 < estimate.core_s < 1
    elsewhere = planner.Planner("h100_1", ["--data.path", str(tmp_path / "nowhere")])
    assert elsewhere._preparation == ()
    assert "preparing the data is not counted: --data.path" in elsewhere.messages[-1]
