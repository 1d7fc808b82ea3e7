"""``jaxtrain doctor`` from the command line: on a ready machine, and on one with many faults."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import sample_videos
from examined import small_disk
from program import TINY_MLM, command, environment, run, write_corpus

from jaxtrain import main
from jaxtrain.distributed import cluster_env

TEXT = [*TINY_MLM, "--data.path", "corpus", "--loop.steps", "50"]
GROUPS = ["processes", "devices", "system", "collective", "data", "checkpoint"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    return tmp_path


def leftovers(place: Path) -> list[Path]:
    return list(place.rglob("*jaxtrain-doctor*"))


def flat(page: str) -> str:
    """Returns a page without its line breaks."""
    return " ".join(page.split())


@pytest.mark.slow
def test_a_ready_machine(place: Path) -> None:
    devices = ["--simulate-devices", "2", "--mesh.fsdp", "2"]
    found = run(place, "doctor", *TEXT, *devices, "--output-dir", "out", "--json", "found.json")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert [line for line in lines if line in GROUPS] == GROUPS
    assert lines[-1].startswith("ready")
    assert max(map(len, lines)) <= 100
    assert found.stdout.isascii()
    assert not found.stderr
    page = flat(found.stdout)
    for seen in (
        "2 x cpu, as demo_mlm requires",
        "over 2 devices is exact",
        "6 text files (0 bad)",
    ):
        assert seen in page
    assert "equal: the config's complete state" in page
    report = json.loads((place / "found.json").read_text())
    assert report["ready"]
    assert "jax" in report["versions"]
    assert {one["group"] for one in report["findings"]} == set(GROUPS)
    assert not (place / "out").exists()
    assert not leftovers(place)


@pytest.mark.long
def test_a_machine_with_many_faults(place: Path) -> None:
    """Every fault is reported, each with its fix."""
    folder = place / "videos"
    for number in range(3):
        sample_videos.write(folder / f"good{number}.mp4", 30)
    (folder / "bad.mp4").write_text("no video")
    with small_disk(place / "disk", "64k") as disk:
        arguments = ["--config", "demo", "--data.path", str(folder), "--output-dir", str(disk)]
        arguments += [
            "--data.workers",
            "8",
            "--simulate-devices",
            "3",
            "--json",
            str(place / "found.json"),
        ]
        found = subprocess.run(
            ["bash", "-c", 'ulimit -n 120; exec "$@"', "bash", *command("doctor", *arguments)],
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not leftovers(disk)
    assert found.returncode == 1, found.stdout + found.stderr
    page = flat(found.stdout)
    for seen, fix in {
        "needs 1 device, but --simulate-devices gives 3": "--simulate-devices 1",
        "--data.workers 8 needs about 136 open files": "use at most 6 workers",
        "checkpoints of 8.2 MiB": "set another --output-dir",
        "bad.mp4": "fix or remove them",
    }.items():
        assert seen in page
        assert fix in page.split(seen, 1)[1]
    assert disk.is_symlink() or "on tmpfs" in page  # a link: mounted elsewhere
    last = found.stdout.splitlines()[-1]
    assert last.startswith("not ready: ")
    assert all(group in last for group in ("devices", "system", "data"))
    assert not json.loads((place / "found.json").read_text())["ready"]


@pytest.mark.long
def test_a_missing_gpu_is_reported(place: Path) -> None:
    found = run(place, "doctor", "--config", "h100_8", JAX_PLATFORMS="cpu")
    assert found.returncode == 1
    assert "PROBLEM  h100_8 is for NVIDIA H100 80GB HBM3, but jax uses the CPU" in found.stdout


@pytest.mark.slow
def test_ctrl_c_cleans_up(place: Path) -> None:
    """Sends SIGINT to all processes of the group, as a terminal does."""
    process = subprocess.Popen(
        command("doctor", *TEXT, "--output-dir", "."),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(place.glob(".jaxtrain-doctor-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)  # the kill of procps 4.0.2 may read -1234 as -1
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in printed
    assert not leftovers(place)


@pytest.mark.slow
def test_a_closed_output_pipe_stops_it(place: Path) -> None:
    process = subprocess.Popen(
        command("doctor", *TEXT),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr as errors:
        assert "demo_mlm on" in process.stdout.readline()
        process.stdout.close()
        printed = errors.read()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in printed
    assert not leftovers(place)


def srun_variables(index: int, job: int) -> dict[str, str]:
    """Returns the variables of one of two tasks on this machine."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_LOCALID": str(index),
        "SLURM_PROCID": str(index),
    }


def free_job() -> int:
    """Returns the number of a job whose port, which is derived from it, is free."""
    for number in range(1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", cluster_env._port(number)))
            return number
    raise AssertionError("all ports are in use")


@pytest.mark.long
def test_two_processes_report_together(place: Path) -> None:
    """Only process 1 may open too few files: process 0 reports that too, and both exit with 1.

    Twelve workers need 168 files.
    """
    job = free_job()
    devices = ["--simulate-devices", "4", "--mesh.fsdp", "4"]
    workers = ["--data.workers", "12"]
    program = command("doctor", *TEXT, *devices, *workers, "--output-dir", "out")
    started = [
        subprocess.Popen(
            ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *program],
            cwd=place,
            env=environment(place, **srun_variables(number, job)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, limit in enumerate((4096, 160))
    ]
    try:
        pages = [flat(process.communicate(timeout=200)[0]) for process in started]
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
    assert [process.returncode for process in started] == [1, 1], pages
    for seen in (
        "2 processes on 1 host have connected at localhost:",
        "(SLURM)",
        "clocks are at most",
        "the same config, code, and packages in all processes",
        "every process reads what the others write",
        "4 x cpu, as demo_mlm requires",
        "over 4 devices is exact",
        "the same data in all processes",
        "equal: the config's complete state",
    ):
        assert all(seen in page for page in pages), (seen, pages)
    assert "--data.workers 12 needs about 168 open files" in pages[1]
    assert "PROBLEM process 1 (" in pages[0]
    assert "system: --data.workers 12 needs about 168 open files" in pages[0]
    assert not leftovers(place)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--output-dir", "x"], "--config is missing"),
        (["--config", "h100_9"], "did you mean"),
        (["--config", "demo", "--optim.peek_lr", "1"], "--optim.peak_lr"),
        (["--config", "demo", "--data.batch_size", "7", "--mesh.fsdp", "2"], "7"),
        (["--config", "demo", "--simulate-devices", "none"], "--simulate-devices"),
        (["--config", "demo", "--simulate-devices", "0"], "--simulate-devices 0"),
        (["--config", "demo", "--json", "/nowhere/at/all.json"], "/nowhere/at"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert main.main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_help_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main.main(["doctor", *arguments]) == 0
        assert "--output-dir" in capsys.readouterr().out
