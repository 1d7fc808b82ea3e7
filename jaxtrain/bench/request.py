"""Starts workers, and keeps what they found whatever becomes of them."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError

PARTS = ("steps", "trace", "pipeline", "save", "ceilings")
_LAST_LINES = 5
_TIMED_OUT = 124  # as of timeout(1)
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a worker is to measure.

    Attributes:
        config: a name or a path.
        overrides: as typed.
        simulate_devices: virtual CPU devices; None takes what is there.
        parts: of :data:`PARTS`; () measures the start alone.
        seconds: for steps, and for the pipeline.
        compiled: folder of compiled programs; an empty one makes a cold start.
        timeout_s: a worker that takes longer is ended.
    """

    config: str
    overrides: tuple[str, ...]
    simulate_devices: int | None
    parts: tuple[str, ...]
    seconds: float
    compiled: str
    timeout_s: float

    def findings(self) -> dict[str, Any]:
        """Runs the worker; ``failure`` (and ``detail``) in place of rows where it failed."""
        with tempfile.TemporaryDirectory() as folder:
            path, output = Path(folder) / "request.json", Path(folder) / "findings.json"
            written = dataclasses.asdict(self) | {"output": str(output)}
            path.write_text(json.dumps(written | {"launched_at": time.time()}))
            command = [sys.executable, "-m", "jaxtrain.bench.worker", str(path)]
            ended = _run(command, self.timeout_s)
            if output.exists():
                found: dict[str, Any] = json.loads(output.read_text())
                if ended.returncode != 0 and "failure" not in found:
                    found["notes"]["worker"] = _failure(ended)["failure"]
                return found
        return _failure(ended)


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a worker. It stays in this process's group: whoever ends that, ends it too."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, _TIMED_OUT, "", f"took longer than {timeout_s:.0f} s"
        )


def _environment() -> dict[str, str]:
    """The worker has to find this jaxtrain, installed or not."""
    checkout = str(Path(__file__).resolve().parents[2])
    paths = [checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def _failure(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    last = ended.stderr.strip().splitlines()[-_LAST_LINES:]
    if last and last[-1].startswith("error: "):
        raise InputError(last[-1].removeprefix("error: "))
    if ended.returncode == _TIMED_OUT:
        return {"failure": ended.stderr, "detail": ""}
    if any(words in ended.stderr for words in _OUT_OF_MEMORY) or ended.returncode == -9:
        return {"failure": "out of memory", "detail": last[-1] if last else "killed"}
    return {"failure": f"exit code {ended.returncode}", "detail": "\n".join(last)}
