"""Rules for all files in launch/, and NCCL's variables, platform.sh and the image."""

import re
import subprocess
import tomllib
from pathlib import Path

from launch.stub import LAUNCH, Stubs

RUN = ("--config", "demo", "--output-dir", "run")
TEXTS = [path for path in sorted(LAUNCH.iterdir()) if path.is_file()]
# From NCCL's documentation ("Environment Variables"); other names have no effect.
NCCL = {
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_IB_TIMEOUT",
    # mentioned only with the reason why they are not set
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE"),
}


def test_scripts_are_strict_and_can_be_started() -> None:
    for path in [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]:
        sourced = path.name in ("supervise.sh", "nccl.sh")
        assert ("set -euo pipefail" in path.read_text()) != sourced
        assert bool(path.stat().st_mode & 0o100) != sourced


def test_only_variables_that_nccl_reads_are_used() -> None:
    for path in TEXTS:
        text = path.read_text()
        assert set(re.findall(r"\bNCCL_[A-Z0-9_]+", text)) <= NCCL, path
        assert "TORCH_" not in text, path


def settings(hosts: int, **own: str) -> dict[str, str]:
    command = f"source {LAUNCH}/nccl.sh; nccl_settings {hosts}; env"
    found = subprocess.run(
        ["bash", "-euc", command],
        env={"PATH": "/usr/bin:/bin", **own},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return dict(line.split("=", 1) for line in found.splitlines() if line.startswith("NCCL_"))


def test_nccl_gets_few_settings_and_more_with_more_hosts() -> None:
    assert settings(1) == {"NCCL_DEBUG": "WARN"}
    few = settings(2)
    assert few["NCCL_SOCKET_IFNAME"] == "^lo,docker,virbr,veth"
    assert settings(5) == few
    assert settings(6) == settings(7) == few | {"NCCL_IB_TIMEOUT": "21"}
    assert settings(8) == settings(64) == few | {"NCCL_IB_TIMEOUT": "22"}


def test_the_users_settings_have_precedence() -> None:
    own = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_NTHREADS": "1",
        "NCCL_NSOCKS_PERTHREAD": "1",
        "NCCL_IB_TIMEOUT": "14",
    }
    assert settings(8, **own) == own
    assert settings(8, NCCL_SOCKET_IFNAME="")["NCCL_SOCKET_IFNAME"] == ""


def test_a_node_of_a_platform_runs_one_process_and_restarts_it(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { env >env.$2; (($2 == 2)) || exit 75; }")
    node = {"WORLD_SIZE": "6", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert stubs.run("platform.sh", *RUN, **node)[0] == 0
    assert [call[3:] for call in stubs.calls(3)] == [["-m", "jaxtrain.main", *RUN, "--again"]] * 2
    environment = (tmp_path / "env.1").read_text()
    for name, value in node.items():
        assert f"{name}={value}\n" in environment
    assert "NCCL_IB_TIMEOUT=21\n" in environment
    assert "JAX_NUM_PROCESSES" not in environment


def test_a_node_that_is_started_again_continues_the_run(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    (tmp_path / "run").mkdir()
    for restarts in ("", "1"):
        assert stubs.run("platform.sh", *RUN, "--resume", "400", RESTARTS=restarts)[0] == 0
    own = [*RUN, "--resume", "400"]
    assert [call[5:] for call in stubs.calls(0)] == [own, [*own, "--again"]]


def test_the_image_copies_existing_files_and_installs_the_cuda12_extra() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        name
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert copied
    for name in copied:
        assert (LAUNCH.parent / name).exists(), name
        assert f"!{name}" in ignored, name
    with (LAUNCH.parent / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert "pip install --no-cache-dir '.[cuda12]' -c .ci/constraints.txt" in text
    assert "cuda12" in project["optional-dependencies"]
    # The constraints are for the tests' version of Python.
    assert re.search(r"^ARG BASE=python:3\.11\.", text, re.MULTILINE)
    # The files that setuptools needs for the build.
    assert {"pyproject.toml", "README.md", "LICENSE", "jaxtrain", "configs"} <= set(copied)
