"""What the NVIDIA driver of this host says, without jax."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

MIB = 2**20

_QUERY = (
    "--query-gpu=index,name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
_TIMEOUT_S = 10.0
_PROC = Path("/proc/driver/nvidia/version")

LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA's major version -> the oldest driver on Linux: NVIDIA, CUDA compatibility, minor version
compatibility, table 1 (docs.nvidia.com/deploy/cuda-compatibility)."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of this host; bytes."""

    index: int
    name: str
    memory: int
    used: int


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this host.

    Attributes:
        version: None where there is none, or it does not answer.
        gpus: that it sees.
        failure: what nvidia-smi said in place of an answer.
    """

    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""

    @property
    def present(self) -> bool:
        """Whether this host has a driver, working or not."""
        return self.version is not None or bool(self.failure)


Run = Callable[[Sequence[str]], tuple[int, str]]


def read(run: Run | None = None, proc: Path = _PROC) -> Driver:
    """Asks nvidia-smi, or the kernel where there is none.

    Args:
        run: runs nvidia-smi with arguments -> exit code and what it printed. None is the real one,
            if this host has one.
        proc: the kernel module's version file.
    """
    if run is None:
        program = shutil.which("nvidia-smi")
        if program is None:
            return of_kernel(proc)
        run = _runner(program)
    try:
        code, said = run(_QUERY)
    except subprocess.TimeoutExpired:
        return Driver(failure=f"no answer within {_TIMEOUT_S:.0f} s")
    if code != 0:
        return Driver(failure=" ".join(said.split()) or f"exit code {code}")
    return parse(said)


def parse(said: str) -> Driver:
    """The driver from nvidia-smi's lines, as "0, NVIDIA H200, 550.90.07, 143771, 4"."""
    gpus, version = [], None
    for line in said.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5 or not fields[0].isdecimal():
            return Driver(failure=f"an answer of another form: {line.strip()[:100]!r}")
        index, name, version, memory, used = fields
        gpus.append(Gpu(int(index), name, _mib(memory), _mib(used)))
    return Driver(version, tuple(gpus), "" if gpus else "no devices were found")


def of_kernel(proc: Path) -> Driver:
    """The driver from the kernel module's file, where no nvidia-smi is installed."""
    try:
        line = proc.read_text().partition("\n")[0]
    except OSError:
        return Driver()
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
    return Driver(found[1] if found else None, (), "" if found else f"{proc}: {line[:100]}")


def _runner(program: str) -> Run:
    def run(arguments: Sequence[str]) -> tuple[int, str]:
        ended = subprocess.run(
            [program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return ended.returncode, ended.stdout

    return run


def _mib(field: str) -> int:
    return int(field) * MIB if field.isdecimal() else 0  # "[N/A]" on some cards
