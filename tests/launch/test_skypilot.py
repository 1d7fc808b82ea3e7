"""skypilot.yaml: its keys, and its script with a stand-in for Python.

SkyPilot's own parser (``sky.Task.from_yaml`` of skypilot 0.14.1) accepts the file.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.stub import LAUNCH, Stubs

from jaxtrain import config
from jaxtrain.config import flags
from jaxtrain.config.run_flags import RunFlags

# The keys that the file uses, from SkyPilot's reference of task files.
KEYS = {"name", "workdir", "resources", "file_mounts", "envs", "setup", "run"}
# Replaces rsync: copies, and records its arguments.
RSYNC = """\
#!/bin/sh
echo "$*" >>"$STUBS/rsync.txt"
for last; do from=$to to=$last; done
cp -R "$from." "$to"
"""
RESOURCES = {"accelerators", "use_spot", "disk_size", "job_recovery"}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def script(task: dict[str, Any], stubs: Stubs) -> "subprocess.CompletedProcess[str]":
    """Runs ``run`` in the directory of the stand-ins, as SkyPilot runs it in the checkout."""
    (stubs.directory / ".venv/bin").mkdir(parents=True)
    (stubs.directory / ".venv/bin/python").symlink_to(stubs.stubs / "python")
    (stubs.stubs / "rsync").write_text(RSYNC)
    (stubs.stubs / "rsync").chmod(0o755)
    (stubs.directory / "copy").mkdir(exist_ok=True)
    variables = stubs.environment(**(task["envs"] | {"RUN": "run", "COPY": "copy"}))
    return subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=stubs.directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_keys_are_skypilots(task: dict[str, Any]) -> None:
    assert set(task) == KEYS
    assert set(task["resources"]) == RESOURCES
    assert {one["mode"] for one in task["file_mounts"].values()} == {"MOUNT", "MOUNT_CACHED"}
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)


def test_paths_are_on_the_mounts_and_gpus_fit_the_config(task: dict[str, Any]) -> None:
    assert task["envs"]["DATA"] in task["file_mounts"]
    assert task["envs"]["COPY"] in task["file_mounts"]
    assert not any(task["envs"]["RUN"].startswith(mount) for mount in task["file_mounts"])
    gpu, count = task["resources"]["accelerators"].split(":")
    mesh = config.load(task["envs"]["CONFIG"]).mesh
    assert task["envs"]["CONFIG"].startswith(gpu.lower())
    assert mesh.data * mesh.fsdp == int(count)


def test_doctor_plan_and_train_run_in_this_order(task: dict[str, Any], tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    found = script(task, stubs)
    assert found.returncode == 0, found.stderr
    calls = [call[3:] for call in stubs.calls(0)]
    assert [call[2] for call in calls] == ["doctor", "plan", "--config"]
    doctor, plan, training = calls
    assert plan[2:] == ["plan", "--config", "h100_8"]
    assert (
        doctor[3:]
        == training[2:8]
        == [*("--config", "h100_8", "--data.path", "/data", "--output-dir", "run")]
    )
    typed, problems = flags.parse(RunFlags, "train", training[2:])
    assert not problems
    assert (typed.config, typed.output_dir, typed.resume) == ("h100_8", "run", "latest")
    assert config.load(typed.config, typed.overrides).data.path == "/data"


def test_a_replaced_machine_resumes_without_a_plan(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "copy/checkpoints").mkdir(parents=True)
    (tmp_path / "copy/checkpoints/5.json").write_text("{}")
    stubs = Stubs(tmp_path, "play() { save 7; }")
    assert script(task, stubs).returncode == 0
    assert (tmp_path / "run/checkpoints/5.json").is_file()
    assert (tmp_path / "copy/checkpoints/7.json").is_file()
    fetched, *_, copied = (stubs.stubs / "rsync.txt").read_text().splitlines()
    assert "--delete" not in fetched
    assert "--update copy/ run/" in fetched
    assert "--delete-after" in copied
    assert [call[5] for call in stubs.calls(0)] == ["doctor", "--config"]
