"""ssh.sh with real sshd processes on two hosts: kills, signals, lost connections, two launchers.

Needs root and Debian's openssh-server, so it is not part of the default suite: pass the file.
"""

import contextlib
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.hosts import Host, require, run, two_hosts, wait_for
from launch.stub import LAUNCH
from launch.test_real_run import newest_checkpoint
from program import CHECKOUT, TINY_MLM, environment, losses, write_corpus

PROGRAMS = {
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
STEPS = 60
FLAGS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.shard", "none"],
    *["--simulate-devices", "2", "--checkpoint.every", "10", "--loop.steps", str(STEPS)],
]
SSHD = """\
Port 22
HostKey {key}
AuthorizedKeysFile {authorized}
PidFile none
UsePAM no
PasswordAuthentication no
StrictModes no
SetEnv {variables}
"""


class Cluster:
    """Two hosts that ssh can reach, and a folder that both share."""

    def __init__(self, directory: Path, hosts: tuple[Host, Host], config: Path) -> None:
        self.directory, self.hosts, self._config = directory, hosts, config

    def serve(self, host: Host) -> None:
        """Starts a host's sshd, and waits until the launcher can connect."""
        settings = str(self.directory / f"sshd_config.{host.name}")
        log = self.directory / f"sshd.{host.name}.log"
        host.start("/usr/sbin/sshd", "-D", "-e", "-f", settings, log=log)
        asked = self.hosts[0].on_its_network("ssh", "-F", str(self._config), host.name, "hostname")

        def answers() -> bool:
            found = subprocess.run(asked, capture_output=True, text=True, check=False)
            return found.stdout == f"{host.name}\n"

        wait_for(answers, f"ssh to {host.name}", seconds=60, explain=log.read_text)

    @contextlib.contextmanager
    def launch(self, *arguments: str, **more: str) -> Iterator["Launcher"]:
        """Runs the launcher with these arguments; it ends with the block at the latest."""
        launcher = Launcher(self, arguments, more)
        try:
            yield launcher
        finally:
            launcher.end()

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """Returns the launcher's command line on n1, and its environment."""
        variables = environment(
            self.directory,
            PYTHON=sys.executable,
            RESTART_DELAY_S="0",
            SSH_OPTIONS=f"-F {self._config}",
        )
        kept = {name: value for name, value in variables.items() if not name.startswith("JAX_")}
        script = ("launch/ssh.sh", "hosts.txt", *arguments)
        # It also ends if the test is killed.
        return self.hosts[0].on_its_network("setpriv", "--pdeathsig", "TERM", *script), kept


class Launcher:
    """A running ssh.sh."""

    def __init__(self, cluster: Cluster, arguments: tuple[str, ...], more: dict[str, str]) -> None:
        command, variables = cluster.command(*arguments)
        self._log = cluster.directory / f"launcher.{time.monotonic_ns()}.log"
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cluster.directory,
                env=variables | more,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def output(self) -> str:
        """The output so far."""
        return self._log.read_text()

    def wait(self, seconds: float = 300) -> tuple[int, str]:
        """Waits until it ends; returns the exit code and the output."""
        wait_for(
            lambda: self.process.poll() is not None,
            "the launcher's end",
            seconds=seconds,
            explain=self.output,
        )
        assert self.process.returncode is not None
        return self.process.returncode, self.output()

    def end(self) -> None:
        """Stops it if it is still running."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require(PROGRAMS)
    directory = tmp_path_factory.mktemp("ssh")
    write_corpus(directory)
    (directory / "home").mkdir()
    (directory / "hosts.txt").write_text("n1\nn2\n")
    (directory / "launch").symlink_to(LAUNCH)
    for name in ("user", "n1", "n2"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / f"{name}.key"))
    user = pwd.getpwuid(os.geteuid()).pw_name
    variables = {
        "HOME": directory / "home",
        "JAXTRAIN_CACHE": directory / "cache",
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
        "PYTHONPATH": CHECKOUT,
    }
    config, known = directory / "ssh_config", directory / "known_hosts"
    with two_hosts(directory) as hosts:
        for host in hosts:
            key = directory / f"{host.name}.key"
            public = key.with_suffix(".key.pub").read_text()
            with known.open("a") as file:
                file.write(f"{host.address} {public}")
            with config.open("a") as file:
                file.write(
                    f"Host {host.name}\n HostName {host.address}\n User {user}\n"
                    f" IdentityFile {directory / 'user.key'}\n IdentitiesOnly yes\n"
                    f" UserKnownHostsFile {known}\n StrictHostKeyChecking yes\n"
                )
            settings = directory / f"sshd_config.{host.name}"
            settings.write_text(
                SSHD.format(
                    key=key,
                    authorized=directory / "user.key.pub",
                    variables=" ".join(f'"{name}={value}"' for name, value in variables.items()),
                )
            )
        made = Cluster(directory, hosts, config)
        for host in hosts:
            made.serve(host)
        yield made


def reach(cluster: Cluster, launcher: Launcher, folder: Path, after: int) -> tuple[int, int]:
    """Waits for a checkpoint later than ``after``; returns the trainers of both hosts."""

    def running() -> bool:
        assert launcher.process.poll() is None, launcher.output()
        return newest_checkpoint(folder) > after

    what = f"a checkpoint after {after}"
    wait_for(running, what, seconds=300, explain=launcher.output)
    first, second = (host.processes(f"RANK={index}") for index, host in enumerate(cluster.hosts))
    assert len(first) == len(second) == 1
    return first[0], second[0]


def gone(cluster: Cluster) -> None:
    """Waits until no trainer runs."""
    wait_for(lambda: not any(host.processes() for host in cluster.hosts), "the end of all trainers")


@pytest.mark.timeout(1500)
def test_a_run_survives_a_kill_and_a_signal_with_the_same_losses(cluster: Cluster) -> None:
    with cluster.launch(*FLAGS, "--output-dir", "calm") as launcher:
        code, output = launcher.wait()
    assert code == 0, output
    assert "Connection to" not in output  # ssh's own message

    folder = cluster.directory / "rough" / "checkpoints"
    with cluster.launch(*FLAGS, "--output-dir", "rough") as launcher:
        trainers = reach(cluster, launcher, folder, after=0)
        os.kill(trainers[1], signal.SIGKILL)
        trainers = reach(cluster, launcher, folder, after=newest_checkpoint(folder))
        launcher.process.terminate()
        code, output = launcher.wait()
    assert code == 75, output
    assert "[n2] platform.sh: the process ended with 137 (SIGKILL)" in output
    assert re.search(r"\[n1\] resumed from .*/checkpoints/\d+", output)
    assert not any(host.processes() for host in cluster.hosts)
    left = newest_checkpoint(folder)
    assert left == max(losses(cluster.directory / "rough")) < STEPS

    with cluster.launch(*FLAGS, "--output-dir", "rough") as launcher:
        code, output = launcher.wait()
    assert code == 0, output
    assert re.search(rf"\[n1\] resumed from .*/checkpoints/{left}\b", output)
    calm, rough = (losses(cluster.directory / name) for name in ("calm", "rough"))
    assert list(calm) == list(range(1, STEPS + 1))
    assert calm == rough


@pytest.mark.timeout(1500)
def test_a_run_recovers_from_a_host_that_crashes_and_returns(cluster: Cluster) -> None:
    """Its connections are not closed: only ssh's keepalive detects the crash.

    The run was started from a checkpoint of another one.
    """
    folder = cluster.directory / "crashed" / "checkpoints"
    _, second = cluster.hosts
    with cluster.launch(*FLAGS, "--loop.steps", "10", "--output-dir", "first") as launcher:
        code, output = launcher.wait()
        assert code == 0, output
    flags = (*FLAGS, "--output-dir", "crashed", "--resume", "first")
    with cluster.launch(*flags) as launcher:
        reach(cluster, launcher, folder, after=0)
        second.crash()
        time.sleep(5)
        second.come_back()
        cluster.serve(second)
        code, output = launcher.wait(600)
    assert code == 0, output
    assert "[n2] ssh.sh: the connection is lost: connecting again" in output
    assert list(losses(cluster.directory / "crashed")) == list(range(11, STEPS + 1))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lost", ["one", "launcher", "all"])
def test_a_process_without_its_connection_saves_and_ends(cluster: Cluster, lost: str) -> None:
    name = f"lost-{lost}"
    folder = cluster.directory / name / "checkpoints"
    flags = (*FLAGS[:-1], "1000000", "--checkpoint.every", "1000", "--output-dir", name)
    with cluster.launch(*flags, "--checkpoint.keep", "1") as launcher:

        def trains() -> bool:
            metrics = cluster.directory / name / "metrics.jsonl"
            return metrics.exists() and len(losses(metrics.parent)) > 3

        wait_for(trains, "some steps", seconds=300, explain=launcher.output)
        assert newest_checkpoint(folder) == 0
        if lost != "one":
            launcher.process.kill()
            launcher.process.wait()
        if lost != "launcher":
            clients = subprocess.run(
                ["pgrep", "--session", str(launcher.process.pid), "--exact", "ssh"],
                capture_output=True,
                text=True,
            ).stdout.split()
            assert len(clients) == 2
            for client in clients if lost == "all" else clients[1:]:
                os.kill(int(client), signal.SIGKILL)
        gone(cluster)
        if lost == "one":
            code, output = launcher.wait()
            assert code == 137, output
    assert newest_checkpoint(folder) == max(losses(cluster.directory / name)) > 3


@pytest.mark.timeout(1500)
def test_neither_a_second_launcher_nor_doctor_harms_a_run(cluster: Cluster) -> None:
    """And Ctrl-C ends it."""
    folder = cluster.directory / "busy" / "checkpoints"
    flags = (*FLAGS[:-1], "1000000", "--output-dir", "busy")
    with cluster.launch(*flags) as launcher:
        trainers = reach(cluster, launcher, folder, after=0)
        with cluster.launch(*flags, SAVE_S="1") as second:
            code, output = second.wait()
        assert code == 2, output
        assert re.search(r"\[n1\] error: another run is using busy \(process \d+ on n1\)", output)
        with cluster.launch("--doctor", *flags) as doctor:
            code, output = doctor.wait()
        assert code == 0, output
        assert reach(cluster, launcher, folder, after=newest_checkpoint(folder)) == trainers
        os.killpg(launcher.process.pid, signal.SIGINT)
        code, output = launcher.wait()
    assert code == 130, output
    assert "restart 1 of" not in output
    gone(cluster)
    steps = losses(cluster.directory / "busy")
    assert list(steps) == list(range(1, newest_checkpoint(folder) + 1))


@pytest.mark.timeout(600)
def test_a_wrong_host_is_named(cluster: Cluster) -> None:
    hosts = cluster.directory / "hosts.txt"
    hosts.write_text("n3\nn1\n")
    try:
        with cluster.launch(*FLAGS, "--output-dir", "wrong") as launcher:
            code, output = launcher.wait()
    finally:
        hosts.write_text("n1\nn2\n")
    # 255 is ssh's own; 2 is of n1, to which n3 has no address either, if it gets to say so.
    assert code in (2, 255), output
    assert "[n3] ssh: Could not resolve hostname n3" in output
    gone(cluster)


@pytest.mark.timeout(600)
def test_doctor_checks_both_hosts(cluster: Cluster) -> None:
    with cluster.launch("--doctor", *FLAGS, "--output-dir", "checked") as launcher:
        code, output = launcher.wait()
    assert code == 0, output
    for host in cluster.hosts:
        assert f"[{host.name}] ready\n" in output
    assert re.search(r"^\[n1\] .*2 processes on 2 hosts have connected", output, re.MULTILINE)


@pytest.mark.timeout(600)
def test_doctor_finds_a_host_without_the_shared_storage(cluster: Cluster) -> None:
    directory = cluster.directory / "apart"
    directory.mkdir()
    run(*cluster.hosts[1].command("mount", "-t", "tmpfs", "tmpfs", str(directory)))
    with cluster.launch("--doctor", *FLAGS, "--output-dir", "apart") as launcher:
        code, output = launcher.wait()
    assert code == 1, output
    lines = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("[n1] ")]
    said = " ".join(line[-1] for line in lines)  # what was wrapped, in one piece
    assert "is not the same folder for all processes" in said, output
    assert "process 1 (n2), system: the output directory" in said, output  # reported by process 0
    assert " restart " not in output
