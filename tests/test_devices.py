"""What GPUs say about themselves; here a program stands in for nvidia-smi."""

import time
from pathlib import Path

import pytest

from jaxtrain import devices


def nvidia_smi(folder: Path, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def first_share(utilization: devices.Utilization) -> float:
    deadline = time.monotonic() + 20
    while (share := utilization.share()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return share


def test_memory_is_unknown_on_the_cpu() -> None:
    assert devices.memory_gib() is None


def test_utilization_is_the_mean_of_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, 'echo "$@" > asked; printf "80\\n[N/A]\\n80\\n"; exec sleep 60')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    utilization = devices.Utilization({"CUDA_VISIBLE_DEVICES": "2,3"}, "gpu")
    assert first_share(utilization) == pytest.approx(0.8)
    utilization.close()
    asked = (tmp_path / "asked").read_text()
    assert "--id=2,3" in asked
    assert "utilization.gpu" in asked


def test_nothing_is_said_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    utilization = devices.Utilization({}, "gpu")
    assert utilization.share() is None
    utilization.close()


def test_an_nvidia_smi_that_fails_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, "exit 9")
    monkeypatch.setenv("PATH", str(tmp_path))
    utilization = devices.Utilization({}, "gpu")
    utilization.close()
    assert utilization.share() is None
