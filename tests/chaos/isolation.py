"""Isolates the harness: its mounts, processes and leftovers affect nothing else and end with it.

The harness restarts itself in separate mount and process namespaces. There, ``/dev/shm`` contains
only files of the run, only the run's processes are visible, a small disk can be mounted and filled,
and the kernel ends everything with the harness, however the harness ends.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_INSIDE = "JAXTRAIN_CHAOS_INSIDE"
# Room for a dozen of the tiny checkpoints, and quickly filled.
DISK_MIB = 48


class Unavailable(Exception):
    """This machine does not permit the isolation."""


def inside() -> bool:
    """Whether this process has its own namespaces."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> None:
    """Replaces this process with the harness in separate namespaces.

    Raises:
        Unavailable: this machine does not permit namespaces.
    """
    # bash is process 1 and reaps orphans, like an init.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare += ["bash", "-c", 'mount -t tmpfs chaos /dev/shm && "$@"; exit $?', "bash"]
    if shutil.which("unshare") is None:
        raise Unavailable("unshare not found: install util-linux")
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        raise Unavailable(
            f"this machine does not permit namespaces ({probe.stderr.strip()}): run as root"
        )
    here = str(Path(__file__).parent)
    os.environ[_INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, here, *arguments])


class Disk:
    """A small disk for the run directory, which can be full for a while."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ballast = directory / "ballast"
        directory.mkdir(parents=True)
        options = f"size={DISK_MIB}m"
        command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(directory)]
        subprocess.run(command, check=True)

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while ballast.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Frees the space; does nothing if the disk was not full."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts the disk."""
        subprocess.run(["umount", "--lazy", str(self.directory)], check=False)


def shared_memory() -> list[str]:
    """Returns the files in ``/dev/shm``, which are those of the run."""
    return sorted(os.listdir("/dev/shm"))


def clear_shared_memory() -> None:
    """Removes leftovers of an earlier run."""
    for name in shared_memory():
        Path("/dev/shm", name).unlink()
