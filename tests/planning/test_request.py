"""The process that compiles: what it is told, and what becomes of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.errors import InputError
from jaxtrain.planning import buffers, request


def asked(config: str = "demo", **more: object) -> request.Request:
    fields = {"config": config, "overrides": (), "gpu": "h100", "gpus_per_node": 8}
    return request.Request(**(fields | more))  # type: ignore[arg-type]


def test_the_worker_sees_no_gpu_and_its_dump_goes_where_it_is_looked_for(tmp_path: Path) -> None:
    outside = {"XLA_FLAGS": "--xla_dump_to=/mine", "JAX_PLATFORMS": "cuda", "PYTHONPATH": "/x"}
    found = request.environment(outside, tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "JAX_PLATFORMS" not in found
    assert found["XLA_FLAGS"].endswith(buffers.flags(tmp_path))  # the last one holds
    assert found["PYTHONPATH"].endswith("/x")


def test_a_worker_that_takes_too_long_is_ended() -> None:
    assert request.compile_step(asked(), timeout_s=0.2) == {"failure": "not done after 0 s"}


def test_a_wrong_config_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "gpu_compiler", lambda: False)
    with pytest.raises(InputError, match="did you mean"):
        request.compile_step(asked(overrides=("--optim.peak_lrr", "1")), timeout_s=120)


def test_a_worker_that_dies_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.sys, "executable", "/bin/false")
    assert request.compile_step(asked(), timeout_s=60)["failure"].startswith("exit code 1")


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even a killed one, which can end nobody."""
    fifo = tmp_path / "request.json"
    os.mkfifo(fifo)  # the worker waits for its request
    starter = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'jaxtrain.planning.worker', {str(fifo)!r}])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        stdout=subprocess.PIPE,
        text=True,
        env=request.environment(os.environ, tmp_path),
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(1)
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ends = time.monotonic() + 20
    while _alive(worker) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not _alive(worker)


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_worker_is_said_to_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -9, "", "")

    monkeypatch.setattr(request.subprocess, "run", killed)
    failure = request.compile_step(asked(), timeout_s=1)["failure"]
    assert failure == "the compiler was ended by SIGKILL (out of host memory?)"


def test_a_compilers_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^40 clips of 8 x 64 x 64 x 3 are more than a dimension can count."""
    monkeypatch.setattr(request, "gpu_compiler", lambda: False)
    found = request.compile_step(asked(overrides=("--data.batch_size", str(2**40))), timeout_s=120)
    assert "Error: " in found["failure"]
    assert "\n" not in found["failure"]
