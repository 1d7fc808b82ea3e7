"""slurm.sbatch with a real SLURM of two nodes: a time limit, a kill, requeues, and completion.

Needs root and Debian's slurm-wlm and munge, so it is not part of the default suite: pass the file.
Each node is a separate host (hosts.py), so slurmd needs no support for several nodes per machine.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from data.video import sample_videos
from jobs.test_parts import outputs_of
from launch.hosts import Host, require, run, two_hosts, wait_for
from launch.stub import LAUNCH
from launch.test_real_run import newest_checkpoint
from program import TINY_MLM, environment, losses, write_corpus

from jaxtrain.errors import InputError
from jaxtrain.jobs import resumable

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
FLAGS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.shard", "none"],
    *["--simulate-devices", "2", "--checkpoint.every", "10"],
]
# Without cgroups and systemd: linuxproc finds a job's processes in /proc. A requeued job waits for
# the credentials of its last start to expire, by default two minutes (slurm.conf, cred_expire).
CONFIGURATION = """\
ClusterName=jaxtrain
SlurmctldHost=n1({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
NodeName=n1 NodeAddr={first} CPUs={cores}
NodeName=n2 NodeAddr={second} CPUs={cores}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# In place of Python, so that speed does not matter: the first two starts of a job train until
# stopped, the third trains ten more steps.
PYTHON = """\
#!/usr/bin/env bash
newest=$(ls {run}/checkpoints 2>/dev/null | sed 's/[.]json$//' |
    grep -x '[0-9]*' | sort -n | tail -n 1)
steps=1000000
((${{SLURM_RESTART_COUNT:-0}} < 2)) || steps=$((newest + 10))
exec {python} "$@" --loop.steps "$steps"
"""


OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


class Slurm:
    """A cluster of two nodes."""

    def __init__(self, directory: Path, hosts: tuple[Host, Host]) -> None:
        self.directory, self.hosts = directory, hosts
        self.variables = environment(
            directory,
            SLURM_CONF=str(directory / "slurm.conf"),
            HOME=str(directory / "home"),
            RESTART_DELAY_S="0",
            PYTHON=sys.executable,
        )

    def run(self, *command: str, **more: str) -> str:
        """The output of a command on n1, which must succeed."""
        found = subprocess.run(
            self.hosts[0].command(*command),
            cwd=self.directory,
            env=self.variables | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert found.returncode == 0, f"{' '.join(command)}: {found.stdout}{found.stderr}"
        return found.stdout

    def submit(self, *arguments: str, options: tuple[str, ...] = (), **more: str) -> str:
        """Submits slurm.sbatch on two nodes; returns the job's number."""
        script = str(LAUNCH / "slurm.sbatch")
        log = ("--output", str(self.directory / "job.%j.log"))
        return self.run(
            *("sbatch", "--parsable", "--nodes", "2", "--chdir", str(self.directory)),
            *(*log, *options, script, *arguments),
            **more,
        ).strip()

    def log(self, job: str) -> str:
        """The output of all starts of a job."""
        path = self.directory / f"job.{job}.log"
        return path.read_text() if path.exists() else "the job has not started"

    def job(self, job: str) -> dict[str, str]:
        """The fields of a job, as shown by scontrol."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(one.split("=", 1) for one in shown.split() if "=" in one)

    def explain(self, job: str) -> str:
        """Details for the message of a failed test."""
        return f"{self.job(job)}\n{self.log(job)}"

    def trainers(self) -> list[int]:
        """The running trainers of both nodes."""
        return [one for host in self.hosts for one in host.processes("SLURM_STEP_NUM_TASKS=2")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require(PROGRAMS)
    directory = tmp_path_factory.mktemp("slurm")
    write_corpus(directory)
    for name in ("home", "state"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with two_hosts(directory) as hosts:
        first, second = hosts
        configuration = directory / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                directory=directory,
                first=first.address,
                second=second.address,
                cores=os.cpu_count(),
            )
        )
        for host in hosts:
            name = host.name
            run(*host.command("mkdir", "-m", "0755", "/run/munge"))
            host.start(
                *("/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}"),
                *("--pid-file=/run/munge/munged.pid", "--seed-file=/run/munge/munged.seed"),
                log=directory / f"munged.{name}.log",
            )
        for host in hosts:
            (directory / f"spool.{host.name}").mkdir()
            socket = host.command("test", "-S", "/run/munge/munge.socket.2")
            wait_for(lambda one=socket: subprocess.run(one).returncode == 0, "munged", seconds=20)
        log = directory / "services.log"
        first.start("/usr/sbin/slurmctld", "-D", "-f", str(configuration), log=log)
        for host in hosts:
            host.start("/usr/sbin/slurmd", "-D", "-f", str(configuration), log=log)
        cluster = Slurm(directory, hosts)

        def ready() -> bool:
            with contextlib.suppress(AssertionError):
                return cluster.run("sinfo", "--noheader", "--format", "%D %t").strip() == "2 idle"
            return False

        def explain() -> str:
            return "\n".join(path.read_text() for path in directory.glob("*.log"))

        wait_for(ready, "two idle nodes", seconds=60, explain=explain)
        yield cluster
        cluster.run("scancel", "--user", "root")


def finished(slurm: Slurm, job: str, seconds: float) -> dict[str, str]:
    """The fields of a job, as shown by scontrol, once it has ended."""
    wait_for(
        lambda: slurm.job(job)["JobState"] in OVER,
        f"the end of job {job}",
        seconds=seconds,
        explain=lambda: slurm.explain(job),
    )
    return slurm.job(job)


@pytest.mark.timeout(600)
def test_doctor_checks_both_nodes(slurm: Slurm) -> None:
    job = slurm.submit("--doctor", *FLAGS, "--loop.steps", "100", "--output-dir", "checked")
    found = finished(slurm, job, seconds=500)
    log = slurm.log(job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "0"), (
        log
    )
    assert "2 processes on 2 hosts have connected" in log
    assert not (slurm.directory / "checked").exists()


def unlike_the_guide(log: str, run_: Path) -> list[str]:
    """The lines of the log in docs/guides/slurm.md, without those of steps, that a log lacks."""
    guide = (LAUNCH.parent / "docs" / "guides" / "slurm.md").read_text()
    shown = re.search(r"^```text\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert shown

    def same(line: str) -> str:
        # Another test may have compiled the same step.
        line = line.strip().removesuffix(" (read from the compilation cache)")
        return re.sub(r"[\d.,]+", "0", line)

    printed = {same(line) for line in log.replace(str(run_), "/shared/run1").splitlines()}
    lines = [line for line in shown[1].splitlines() if not line.startswith("step ")]
    assert len(lines) > 8
    return [line for line in lines if same(line) not in printed]


@pytest.mark.timeout(1500)
def test_a_job_is_requeued_at_its_time_limit_and_after_a_kill(slurm: Slurm) -> None:
    folder = slurm.directory / "rough" / "checkpoints"
    python = slurm.directory / "python"
    python.write_text(PYTHON.format(run=slurm.directory / "rough", python=sys.executable))
    python.chmod(0o755)

    # SLURM sends SIGTERM 60 to 90 s before the limit.
    options = ("--time", "30", "--signal", "B:TERM@60")
    job = slurm.submit(*FLAGS, "--output-dir", "rough", options=options, PYTHON=str(python))

    def reach(condition: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            assert slurm.job(job)["JobState"] not in OVER, slurm.explain(job)
            return condition()

        wait_for(reached, what, seconds=300, explain=lambda: slurm.explain(job))

    # A limit soon after the first checkpoint, however slow the machine is.
    reach(lambda: newest_checkpoint(folder) > 0, "a checkpoint")
    minutes = int(slurm.job(job)["RunTime"].split(":")[-2]) + 2  # of HH:MM:SS
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    reach(lambda: slurm.job(job)["Restarts"] == "1", "a requeue")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # for the other starts
    limited, log = newest_checkpoint(folder), slurm.log(job)
    assert limited > 0, log
    assert "slurm.sbatch: SIGTERM: forwarded to the tasks" in log
    assert f"stopped by SIGTERM; {limited} of 1000000 steps are done and saved" in log
    assert "ended with 75: requeued, restart 1 of at most 5 without a new checkpoint" in log

    reach(lambda: newest_checkpoint(folder) > limited, "a checkpoint after the requeue")
    trainers = slurm.trainers()
    assert len(trainers) == 2
    os.kill(trainers[1], signal.SIGKILL)
    reach(lambda: slurm.job(job)["Restarts"] == "2", "a requeue after the kill")
    assert "srun: error: n2: task 1: Killed" in slurm.log(job)

    found = finished(slurm, job, seconds=300)
    log = slurm.log(job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "2")
    assert f"resumed from {folder / str(limited)}:" in log
    assert not (wrong := unlike_the_guide(log, folder.parent)), wrong
    assert log.count("resumed from") == 2
    assert not slurm.trainers()
    rough = losses(slurm.directory / "rough")
    steps = max(rough)
    assert newest_checkpoint(folder) == steps > limited

    job = slurm.submit(*FLAGS, "--output-dir", "calm", "--loop.steps", str(steps))
    found = finished(slurm, job, seconds=600)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), slurm.log(job)
    calm = losses(slurm.directory / "calm")
    assert list(calm) == list(range(1, steps + 1))
    assert calm == rough


@pytest.mark.timeout(600)
def test_scancel_saves_the_run_and_the_same_command_resumes_it(slurm: Slurm) -> None:
    """As docs/guides/slurm.md says: with --signal INT, and without it within KillWait seconds."""
    folder = slurm.directory / "stopped" / "checkpoints"
    flags = (*FLAGS, "--loop.steps", "1000000", "--output-dir", "stopped")
    saved = 0
    for signals, state in ((("--signal", "INT"), "FAILED"), ((), "CANCELLED")):
        job = slurm.submit(*flags)
        wait_for(
            lambda before=saved: newest_checkpoint(folder) > before,
            "a checkpoint",
            seconds=200,
            explain=lambda job=job: slurm.explain(job),
        )
        slurm.run("scancel", *signals, job)
        found = finished(slurm, job, seconds=100)
        log = slurm.log(job)
        assert (found["JobState"], found["Restarts"]) == (state, "0"), log
        wait_for(lambda: not slurm.trainers(), "the end of the trainers", seconds=60)
        assert f"resumed from {folder / str(saved)}:" in log or not saved, log
        saved = newest_checkpoint(folder)
        assert f"{saved} of 1000000 steps are done and saved" in slurm.log(job)


@pytest.mark.timeout(300)
def test_tasks_prepare_parts_and_one_is_killed(slurm: Slurm) -> None:
    directory = slurm.directory
    videos = directory / "videos"
    first = sample_videos.write(videos / "0.mp4", sample_videos.busy(200, height=192, width=256))
    for number in range(1, 24):
        shutil.copy(first, videos / f"{number}.mp4")
    size = ("--height", "96", "--width", "128", "--frames", "24", "--min-side", "16", "--workers")
    command = (sys.executable, "-m", "jaxtrain.main", "prepare", "clips", str(videos))
    slurm.run(*command, str(directory / "alone"), *size, "1")
    alone = outputs_of(directory / "alone")

    # Two tasks of srun, each on its node.
    out = directory / "clips"
    text = slurm.run(
        *("srun", "--ntasks", "2", "--nodes", "2", "--label", *command, str(out), *size, "1")
    )
    for task in (0, 1):
        assert f"{task}: SLURM: doing part {task}/2; --part 0/1 does everything" in text
    assert outputs_of(out) == alone

    # Four elements of an array; the process of one is killed, and it is requeued.
    out = directory / "array_clips"
    wrapped = " ".join((*command, str(out), *size, "1"))
    options = ("--array", "1-4", "--requeue", "--output", str(directory / "array.%a.log"))
    job = slurm.run("sbatch", "--parsable", *options, "--wrap", wrapped).strip()

    def victims() -> list[int]:
        tasks = (host.processes("SLURM_ARRAY_TASK_ID=3") for host in slurm.hosts)
        return [number for found in tasks for number in found]

    def elements() -> list[str]:
        return slurm.run("squeue", "--noheader", "--jobs", job).split()

    wait_for(victims, "the third element", seconds=100)
    for number in victims():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    wait_for(lambda: not elements(), "the other elements", seconds=150)
    assert not (out / "report.json").exists(), "the element was killed too late"
    with pytest.raises(InputError, match="is incomplete"):
        resumable.check_complete(out)
    slurm.run("scontrol", "requeue", f"{job}_3")
    wait_for(lambda: not elements(), "the third element again", seconds=150)
    assert outputs_of(out) == alone, (directory / "array.3.log").read_text()
