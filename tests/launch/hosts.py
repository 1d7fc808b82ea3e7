"""Several hosts on one machine, for tests: Linux namespaces joined by a virtual network.

Each host has its own name, network, process ids, mounts, shared memory, and boot identifier, and
shares the file system with the others, like the hosts of a run. Killing its first process ends a
host.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

# Bash is process 1 of a host: it reaps orphaned processes.
BOOT = """
hostname "$1"
mount -t tmpfs tmpfs /run
mkdir -m 0755 /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount --bind "$3" /proc/sys/kernel/random/boot_id
ip link set lo up
echo booted
while :; do sleep infinity & wait; done
"""


class Host:
    def __init__(self, name: str, address: str, table: Path) -> None:
        self.name, self.address = name, address
        boot = table.with_name(f"boot-{name}")
        boot.write_text(f"{uuid.uuid4()}\n")
        self._services: list[subprocess.Popen[bytes]] = []
        self._outer = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # the host ends with the test
                *("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork"),
                *("--mount-proc", "--kill-child", "bash", "-ec", BOOT, "boot", name, str(table)),
                str(boot),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "booted\n":
            pytest.fail(f"no namespaces for {name}: {self._outer.communicate()[1]}", pytrace=False)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def command(self, *arguments: str) -> list[str]:
        """Returns a command line that runs ``arguments`` on this host."""
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ["nsenter", "--target", str(self.pid), *spaces, *arguments]

    def on_its_network(self, *arguments: str) -> list[str]:
        """Returns a command line that runs ``arguments`` here, in this host's network.

        Signals reach the command, because nsenter replaces itself with it.
        """
        return ["nsenter", "--target", str(self.pid), "--net", *arguments]

    def processes(self, *variables: str) -> list[int]:
        """Returns the pids, as seen by the test, of the host's trainers with these variables."""
        found = []
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                values = (path / "environ").read_bytes().split(b"\0")
                if (
                    os.readlink(path / "ns/pid") == space
                    and b"jaxtrain.main" in arguments
                    and arguments[1] == b"-m"
                    and all(one.encode() in values for one in variables)
                ):
                    found.append(int(path.name))
        return found

    def start(self, *arguments: str, log: Path) -> None:
        """Starts a service, which ends with the host."""
        with log.open("ab") as file:
            self._services.append(
                subprocess.Popen(
                    self.command(*arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )

    def crash(self) -> None:
        """Takes the host off the network, then ends all its services and other processes.

        No connection is closed, so the other host does not notice.
        """
        run(*self.command("ip", "link", "set", "eth0", "down"))
        run(*self.command("bash", "-c", "kill -KILL -1"))
        while self._services:
            self._services.pop().communicate()

    def come_back(self) -> None:
        """Puts a crashed host back on the network, without services."""
        run(*self.command("ip", "link", "set", "eth0", "up"))

    def end(self) -> None:
        """Ends every process of the host at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for process in (self._outer, *self._services):
            process.communicate()


@contextlib.contextmanager
def _hosts(directory: Path, *names: str) -> Iterator[list[Host]]:
    """Starts hosts, which are not connected yet; they end with the block."""
    addresses = {name: f"10.99.0.{number}" for number, name in enumerate(names, start=1)}
    table = directory / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    table.write_text("\n".join(lines) + "\n")
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, address in addresses.items():
            host = Host(name, address, table)
            stack.callback(host.end)
            hosts.append(host)
        yield hosts


def _bring_up(hosts: Sequence[Host]) -> None:
    for host in hosts:
        run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", "eth0"))
        run(*host.command("ip", "link", "set", "eth0", "up"))


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Starts hosts n1 and n2, which reach each other by name; they end with the block."""
    with _hosts(directory, "n1", "n2") as (first, second):
        ends = ("netns", str(first.pid), "type", "veth", "peer", "eth0", "netns", str(second.pid))
        run("ip", "link", "add", "eth0", *ends)
        _bring_up((first, second))
        yield first, second


@contextlib.contextmanager
def three_hosts(directory: Path) -> Iterator[list[Host]]:
    """Starts hosts n1, n2, and n3 likewise; a bridge on n1 connects them."""
    with _hosts(directory, "n1", "n2", "n3") as hosts:
        first, *others = hosts
        run(*first.command("ip", "link", "add", "eth0", "type", "bridge"))
        for host in others:
            ends = ("netns", str(first.pid), "type", "veth", "peer", "eth0")
            run("ip", "link", "add", host.name, *ends, "netns", str(host.pid))
            run(*first.command("ip", "link", "set", host.name, "master", "eth0", "up"))
        _bring_up(hosts)
        yield hosts


def run(*command: str) -> str:
    """Runs a command that must succeed; returns its output."""
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, f"{' '.join(command)}\n{found.stdout}{found.stderr}"
    return found.stdout


def require(packages: Mapping[str, str]) -> None:
    """Fails if a program is missing, with the command that installs it.

    Args:
        packages: program -> Debian package.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in packages if shutil.which(name, path=path) is None]
    if missing:
        install = " ".join(dict.fromkeys(packages[name] for name in missing))
        pytest.fail(f"no {', '.join(missing)}: apt-get install {install}", pytrace=False)
    if os.geteuid() != 0:
        # In a user namespace with one user, sshd ends with "setgroups: Operation not permitted".
        pytest.fail("network namespaces and sshd need root: run this test as root", pytrace=False)


def wait_for(
    condition: Callable[[], bool],
    what: str,
    *,
    seconds: float = 120,
    explain: Callable[[], str] = str,
) -> None:
    """Waits until a condition holds; fails with ``what`` and the explanation if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s\n{explain()}"
        time.sleep(0.05)
