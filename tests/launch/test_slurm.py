"""slurm.sbatch, with an srun that sets the variables of a real one (SLURM 22.05, two nodes)."""

import os
import signal
from pathlib import Path

import pytest
from launch.stub import LAUNCH, RECORDED, Stubs
from program import wait_for

from jaxtrain.distributed import cluster_env

RUN = ("--config", "demo", "--output-dir", "run")
BATCH = dict(
    line.split("=", 1) for line in (RECORDED / "slurm-two.batch.env").read_text().splitlines()
)


def submitted(stubs: Stubs, *arguments: str, **more: str) -> tuple[int, str]:
    code, _, err = stubs.run("slurm.sbatch", *arguments, **(BATCH | more))
    return code, err


def test_one_task_per_node_with_all_its_gpus() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in directives
    assert "#SBATCH --requeue" in directives
    assert "#SBATCH --signal=B:TERM@300" in directives
    assert not [line for line in directives if "gpus-per-task" in line]
    # sbatch reads its options only above the first command
    first_command = text.index("set -euo pipefail")
    assert all(text.index(line) < first_command for line in directives)


def test_jaxtrain_detects_the_tasks_of_the_job(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { env >env.$1; }")
    code, err = submitted(stubs, *RUN)
    assert code == 0, err
    assert "scontrol requeue" not in stubs.slurm()
    for index in (0, 1):
        lines = (tmp_path / f"env.{index}").read_text().splitlines()
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        found = cluster_env.find(environment | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
        assert found is not None
        assert (found.host, found.count, found.index, found.devices) == ("n1", 2, index, [])
        assert environment["NCCL_DEBUG"] == "WARN"
        assert environment["JAXTRAIN_LAUNCH"] == "slurm-tiny-1"
        assert stubs.calls(index)[0][5:] == [*RUN, "--again"]


def test_all_starts_of_a_job_have_one_name_and_the_users_resume(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { echo $JAXTRAIN_LAUNCH >>names; exit 75; }")
    own = (*RUN, "--resume", "400")
    more = {"SLURM_CLUSTER_NAME": "big"}
    for start in ({}, {"SLURM_RESTART_COUNT": "1"}):
        assert submitted(stubs, *own, **more, **start)[0] == 0
    assert [call[5:] for call in stubs.calls(0)] == [[*own]] * 2
    assert set((tmp_path / "names").read_text().split()) == {"slurm-big-1"}


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (1, True), (2, False), (130, False)])
def test_a_job_is_requeued_if_a_restart_can_help(tmp_path: Path, code: int, requeued: bool) -> None:
    stubs = Stubs(tmp_path, f"play() {{ exit {code}; }}")
    assert submitted(stubs, *RUN)[0] == (0 if requeued else code)
    assert ("scontrol requeue 1" in stubs.slurm()) == requeued


def test_a_job_canceled_by_its_user_is_not_requeued(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    (stubs.stubs / "state").write_text("CANCELLED")
    code, err = submitted(stubs, *RUN)
    assert code == 75
    assert "the job is CANCELLED: not requeued" in err
    assert "scontrol requeue" not in stubs.slurm()


def test_restarts_without_progress_are_counted_over_the_starts_of_a_job(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { save 7; exit 75; }")
    codes = [submitted(stubs, *RUN, MAX_RESTARTS="2")[0]]
    for start in ("1", "2"):
        codes.append(submitted(stubs, *RUN, MAX_RESTARTS="2", SLURM_RESTART_COUNT=start)[0])
    assert codes == [0, 0, 1]
    assert stubs.slurm().count("scontrol requeue") == 2
    # Another job in the same directory starts counting from zero.
    assert submitted(stubs, *RUN, MAX_RESTARTS="2")[0] == 0


def test_restarts_are_counted_in_the_bucket_of_the_run(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    run = ("--config", "demo", "--output-dir", "s3://bucket/one")
    more = {"BUCKETS": str(tmp_path / "buckets"), "MAX_RESTARTS": "1"}
    codes = []
    for start in ({}, {"SLURM_RESTART_COUNT": "1"}):
        more["JAXTRAIN_CACHE"] = str(tmp_path / f"node-{len(codes)}")
        codes.append(submitted(stubs, *run, **more, **start)[0])
    assert codes == [0, 1]
    assert (tmp_path / "buckets/bucket/one/restarts.json").exists()


def test_without_obstore_restarts_of_a_run_in_a_bucket_are_not_counted(tmp_path: Path) -> None:
    """Such as with the Python of a node, beside a container."""
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Lacks:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'obstore':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Lacks())\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'obstore' else "
        "found(name, *rest)\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    code, err = submitted(
        stubs, "--config", "demo", "--output-dir", "s3://bucket/one", PYTHONPATH=path
    )
    assert code == 0, err
    assert err.count("has no obstore, so restarts of a run in a bucket are not counted") == 1
    assert "scontrol requeue 1" in stubs.slurm()
    assert not (tmp_path / "s3:").exists()


def test_sigterm_goes_to_the_tasks_and_the_job_waits_for_them(tmp_path: Path) -> None:
    plan = "play() { trap 'sleep 0.3; touch saved.$index; exit 75' TERM; stopped; }"
    stubs = Stubs(tmp_path, plan)
    with stubs.start("slurm.sbatch", *RUN, **BATCH) as job:
        wait_for(lambda: len(list(stubs.stubs.glob("ready.*"))) == 2, job)
        os.kill(job.pid, signal.SIGTERM)  # only the script, like --signal=B:
        job.communicate(timeout=60)
        assert job.returncode == 0
    assert (tmp_path / "saved.0").exists()
    assert (tmp_path / "saved.1").exists()
    assert "scancel --signal TERM 1" in stubs.slurm()
    assert "scontrol requeue 1" in stubs.slurm()


def test_python_may_run_in_a_container_without_srun(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { (($2 == 2)) || exit 75; }")
    contained = tmp_path / "contained"
    contained.write_text('#!/bin/sh\n[ "$1" != -c ] || exit 1\nexec "$STUBS/python" "$@"\n')
    contained.chmod(0o755)
    code, err = submitted(stubs, *RUN, PYTHON=str(contained))
    assert code == 0, err
    assert f" {contained} -m jaxtrain.main" in stubs.slurm()
    assert "scontrol requeue 1" in stubs.slurm()
    assert stubs.calls(1)[0][5:] == [*RUN, "--again"]


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { :; }")
    for arguments, more, message in (
        (("--config", "demo"), BATCH, "--output-dir is missing"),
        (RUN, {}, "not running in a SLURM job: use sbatch"),
        (RUN, BATCH | {"LAUNCH_DIR": "/nowhere"}, "no supervise.sh in '/nowhere'"),
    ):
        code, _, err = stubs.run("slurm.sbatch", *arguments, **more)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_a_requeued_job_without_its_disk_does_not_start_from_scratch(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { exit 75; }")
    code, err = submitted(stubs, *RUN, SLURM_RESTART_COUNT="1", MAX_RESTARTS="2")
    assert code == 1
    assert err.count("run does not exist now: is its disk mounted? Not starting from scratch") == 2
    assert not (stubs.stubs / "calls.0").exists()
    assert not (tmp_path / "run").exists()


def test_a_job_that_loses_its_disk_is_not_requeued(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, "play() { (($1)) || mv run away; exit 75; }")
    code, err = submitted(stubs, *RUN, MAX_RESTARTS="2")
    assert code == 1
    assert err.count("run does not exist now: is its disk mounted?") == 2
    assert "and run still does not exist: not requeued" in err
    assert "scontrol requeue" not in stubs.slurm()
