"""Runs the harness in separate namespaces: loopback network only, and no surviving processes."""

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
    """Replaces this process with the harness in separate namespaces.

    Args:
        arguments: of the command line.

    Returns:
        Only if this is not possible: the reason.
    """
    # bash is process 1 and reaps orphans, like an init.
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare += ["bash", "-c", '"$@"; exit $?', "bash"]
    if shutil.which("unshare") is None:
        return "unshare not found"
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return probe.stderr.strip()
    os.environ[_INSIDE] = "1"
    return os.execvp(unshare[0], [*unshare, sys.executable, str(Path(__file__).parent), *arguments])


def start_loopback() -> None:
    """Enables the loopback device, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        (flags,) = struct.unpack_from("H", fcntl.ioctl(handle, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))
