"""Runs the harness in its own namespaces: only a loopback network, and no surviving processes."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

_INSIDE = "JAXTRAIN_FUZZ_INSIDE"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def inside() -> bool:
    """Whether this process has its own namespaces."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> str:
    """Replaces this process by the same program in namespaces of its own.

    Args:
        arguments: of the command line.

    Returns:
        Why that is not possible here, if it is not.
    """
    # bash waits as process 1 and reaps what loses its parent, as an init does.
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare += ["bash", "-c", '"$@"; exit $?', "bash"]
    if shutil.which("unshare") is None:
        return "there is no unshare here"
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return probe.stderr.strip()
    os.environ[_INSIDE] = "1"
    return os.execvp(unshare[0], [*unshare, sys.executable, str(Path(__file__).parent), *arguments])


def start_loopback() -> None:
    """A new network namespace has a loopback device that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        (flags,) = struct.unpack_from("H", fcntl.ioctl(handle, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
