"""``jaxtrain doctor`` from the command line: on a ready machine, and on one with many faults."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from data.video import sample_videos
from doctor.examined import small_disk
from program import TINY_MLM, command, environment, run, started, write_corpus

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
        arguments += ["--data.workers", "8", "--simulate-devices", "3"]
        arguments += ["--json", str(place / "found.json")]
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
        "--data.workers 8: the system refuses so many processes": "use fewer",
        "checkpoints of ": "set another --output-dir",
        "bad.mp4": "fix or remove them",
    }.items():
        assert seen in page
        assert fix in page.split(seen, 1)[1]
    assert disk.is_symlink() or "on tmpfs" in page  # a link: mounted elsewhere
    last = found.stdout.splitlines()[-1]
    assert last.startswith("not ready: ")
    assert all(group in last for group in ("devices", "system", "data"))
    assert not json.loads((place / "found.json").read_text())["ready"]


@pytest.mark.slow
def test_ctrl_c_cleans_up(place: Path) -> None:
    """Sends SIGINT to all processes of the group, as a terminal does."""
    process = started(place, "doctor", *TEXT, "--output-dir", ".")
    try:
        deadline = time.monotonic() + 120
        while not list(place.glob(".jaxtrain-doctor-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)  # the kill of procps 4.0.2 may read -1234 as -1
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in printed
    assert not leftovers(place)
