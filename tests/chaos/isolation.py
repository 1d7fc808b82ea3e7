"""Isolates the harness: its mounts, processes and leftovers affect nothing else and end with it.

The harness starts itself again in namespaces of its own for mounts and processes. There
``/dev/shm`` is empty but for what the run makes, the process list holds the run alone, a small disk
can be mounted and filled, and the kernel ends all of it with the harness, however that ends.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_INSIDE = "JAXTRAIN_CHAOS_INSIDE"
# Room for a dozen of the tiny checkpoints; what fills it is written in a moment.
DISK_MIB = 48


class Unavailable(Exception):
    """This machine does not permit what the harness requires."""


def inside() -> bool:
    """Whether this process has its own namespaces."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> None:
    """Replaces this process by the same program in namespaces of its own.

    Args:
        arguments: of the command line.

    Raises:
        Unavailable: the machine gives no namespaces.
    """
    # bash waits as process 1 and reaps what loses its parent, as an init does.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare += ["bash", "-c", 'mount -t tmpfs chaos /dev/shm && "$@"; exit $?', "bash"]
    if shutil.which("unshare") is None:
        raise Unavailable("there is no unshare here: install util-linux, or give --shared-machine")
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        raise Unavailable(
            f"this machine gives no namespaces ({probe.stderr.strip()}): run as root, or give "
            "--shared-machine, which fills disks by a limit and cannot judge shared memory"
        )
    here = str(Path(__file__).parent)
    os.environ[_INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, here, *arguments])


class Disk:
    """A small disk that holds the run's directory, and can be full for a while.

    Outside of own namespaces nothing is mounted: a limit of file sizes takes its place, and every
    write of the run's processes then fails with EFBIG instead of ENOSPC.

    Args:
        directory: to mount it at.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ballast = directory / "ballast"
        directory.mkdir(parents=True)
        if inside():
            options = f"size={DISK_MIB}m"
            command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(directory)]
            subprocess.run(command, check=True)

    def fill(self, pids: list[int]) -> None:
        """Leaves no room.

        Args:
            pids: of the run's processes and its launcher, for the limit.
        """
        if not inside():
            _limit_files(pids, "1")
            return
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while ballast.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self, pids: list[int]) -> None:
        """Frees the space; does nothing if the disk was not full."""
        if not inside():
            _limit_files(pids, "unlimited")
            return
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts it."""
        if inside():
            subprocess.run(["umount", "--lazy", str(self.directory)], check=False)


def shared_memory() -> list[str]:
    """Returns the names in ``/dev/shm``, all of them the run's; empty if it is shared."""
    return sorted(os.listdir("/dev/shm")) if inside() else []


def clear_shared_memory() -> None:
    """Removes leftovers of an earlier run."""
    for name in shared_memory():
        Path("/dev/shm", name).unlink()


def _limit_files(pids: list[int], most: str) -> None:
    """The soft limit alone: a process may raise that again, and so may the harness."""
    for pid in pids:
        command = ["prlimit", "--pid", str(pid), f"--fsize={most}:"]
        subprocess.run(command, capture_output=True, check=False)
