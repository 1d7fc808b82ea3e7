"""What nvidia-smi and the kernel say."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_packages import EIGHT_H100, KERNEL, MISMATCH, NO_DRIVER

from jaxtrain.doctor import nvidia


def saying(code: int, text: str) -> nvidia.Run:
    return lambda arguments: (code, text)


def test_gpus_with_their_memory() -> None:
    found = nvidia.read(saying(0, EIGHT_H100))
    assert (found.version, found.failure, len(found.gpus)) == ("550.90.07", "", 8)
    assert found.gpus[3] == nvidia.Gpu(3, "NVIDIA H100 80GB HBM3", 81559 * 2**20, 4 * 2**20)
    assert nvidia.parse("0, NVIDIA GB10, 580.1, [N/A], [N/A]").gpus[0].memory == 0


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (18, MISMATCH, "Driver/library version mismatch NVML library version: 550.90"),
        (9, NO_DRIVER, "couldn't communicate with the NVIDIA driver"),
        (6, "No devices were found\n", "No devices were found"),
        (0, "", "no devices were found"),
        (0, "something else\n", "another form: 'something else'"),
        (1, "", "exit code 1"),
    ],
)
def test_a_driver_that_does_not_work_is_present_all_the_same(
    code: int, text: str, said: str
) -> None:
    found = nvidia.read(saying(code, text))
    assert said in found.failure
    assert found.present
    assert not found.gpus


def test_a_driver_that_does_not_answer() -> None:
    def hang(arguments: Sequence[str]) -> tuple[int, str]:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    assert "no answer within" in nvidia.read(hang).failure


def test_the_kernel_is_asked_where_there_is_no_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    proc = tmp_path / "version"
    assert not nvidia.read(proc=proc).present
    proc.write_text(KERNEL)
    assert nvidia.read(proc=proc).version == "550.90.07"


def test_the_real_command_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" >&2\nprintf '{EIGHT_H100}'\n".replace("\\n", "\n"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "another form" in nvidia.read().failure  # its words on stderr count too
    program.write_text(program.read_text().replace('echo "$@" >&2\n', ""))
    assert len(nvidia.read().gpus) == 8
