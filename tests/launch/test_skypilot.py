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
from jaxtrain.cli import flags
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.storage import bucket

# The keys that the file uses, from SkyPilot's reference of task files.
KEYS = {"name", "workdir", "resources", "file_mounts", "envs", "setup", "run"}
RESOURCES = {"accelerators", "use_spot", "disk_size", "job_recovery"}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def script(task: dict[str, Any], stubs: Stubs) -> "subprocess.CompletedProcess[str]":
    """Runs ``run`` in the directory of the stand-ins, as SkyPilot runs it in the checkout."""
    (stubs.directory / ".venv/bin").mkdir(parents=True)
    (stubs.directory / ".venv/bin/python").symlink_to(stubs.stubs / "python")
    more = {"BUCKETS": str(stubs.directory / "buckets"), "JAXTRAIN_CACHE": "cache"}
    variables = stubs.environment(**(task["envs"] | more))
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
    assert {one["mode"] for one in task["file_mounts"].values()} == {"MOUNT"}
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)


def test_the_run_is_in_a_bucket_and_gpus_fit_the_config(task: dict[str, Any]) -> None:
    assert task["envs"]["DATA"] in task["file_mounts"]
    assert bucket.is_bucket(task["envs"]["RUN"])
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
    run = task["envs"]["RUN"]
    assert doctor[3:] == ["--config", "h100_8", "--data.path", "/data", "--output-dir", run]
    assert training[2:] == [*doctor[3:], "--again"]
    typed, problems = flags.parse(RunFlags, "train", training[2:])
    assert not problems
    assert config.load(typed.config, typed.overrides).data.path == "/data"
