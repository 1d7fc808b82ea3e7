"""Which engine and which part of the work the flags and the environment choose."""

import pytest

from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.errors import InputError
from jaxtrain.jobs import engines
from jaxtrain.jobs.resumable import Part

ARRAY = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "4"}
TASKS = {"SLURM_STEP_NUM_TASKS": "2"}


def parsed(*arguments: str) -> commands.PrepareClips:
    flags = command_line.parse("prepare clips", ["in", "out", *arguments])
    assert isinstance(flags, commands.PrepareClips)
    return flags


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({}, Part(0, 1)),
        ({"SLURM_PROCID": "0"}, Part(0, 1)),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Part(0, 1)),
        (TASKS | {"SLURM_PROCID": "1"}, Part(1, 2)),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "1"}, Part(0, 4)),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "4"}, Part(3, 4)),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_STEP": "2"}, Part(3, 4)),
        (ARRAY | TASKS | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "1"}, Part(5, 8)),
    ],
)
def test_slurm_chooses_the_part(environment: dict[str, str], part: Part) -> None:
    assert job_flags.part(parsed(), environment) == part
    assert job_flags.part(parsed("--part", "2/3"), environment) == Part(2, 3)


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(InputError, match=r"SLURM_ARRAY_TASK_ID 9: .* pass --part I/N"):
        job_flags.part(parsed(), ARRAY | {"SLURM_ARRAY_TASK_ID": "9"})


@pytest.mark.parametrize("text", ["1", "a/2", "1/x", "-1/2", "1/2/3", "/"])
def test_a_malformed_part_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write I/N, such as 0/4"):
        job_flags.part(parsed(f"--part={text}"), {})


def test_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "host:1")
    assert job_flags.engine(parsed("--workers", "2")) == engines.Processes(2)
    assert job_flags.engine(parsed("--engine", "ray")) == engines.Ray("host:1")
    chosen = job_flags.engine(parsed("--engine", "ray", "--ray-address", "auto", "--workers", "3"))
    assert chosen == engines.Ray("auto", 3)
    with pytest.raises(InputError, match="--ray-address auto requires --engine ray"):
        job_flags.engine(parsed("--ray-address", "auto"))
    with pytest.raises(InputError, match="--workers 0: use at least 1"):
        parsed("--workers", "0")
