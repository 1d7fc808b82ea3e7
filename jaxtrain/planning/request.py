"""Compiles a step in a process of its own, whose jax believes in GPUs that are not there."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.planning import buffers

Findings = dict[str, Any]

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_LAST_LINES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compiled.

    Attributes:
        config: a name or a path.
        overrides: as typed.
        gpu: short name of the card.
        gpus_per_node: the last node may have fewer only if it is the only one.
    """

    config: str
    overrides: tuple[str, ...]
    gpu: str
    gpus_per_node: int


def gpu_compiler() -> bool:
    """Whether jax can compile for GPUs here (extra ``cuda12`` or ``cuda13``)."""
    return any(importlib.util.find_spec(name) for name in _PLUGINS)


def compile_step(request: Request, timeout_s: float) -> Findings:
    """What the compiler says of the step; ``{"failure": ...}`` where it could not compile it.

    The findings are described at :func:`jaxtrain.planning.compilation.compile_step`.

    Raises:
        InputError: the config cannot be built.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "request.json", Path(folder) / "findings.json"
        dump = Path(folder) / "dump"
        asked = {"output": str(output), "dump": str(dump), "estimate": not gpu_compiler()}
        path.write_text(json.dumps(dataclasses.asdict(request) | asked))
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "jaxtrain.planning.worker", str(path)],
                capture_output=True,
                text=True,
                env=environment(os.environ, dump),
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {timeout_s:.0f} s"}
        if ended.returncode == 0:
            found: Findings = json.loads(output.read_text())
            if "wrong" in found:
                raise InputError(found["wrong"])
            return found
    if ended.returncode < 0:
        number = -ended.returncode
        killed = " (out of host memory?)" if number == signal.SIGKILL else ""
        return {"failure": f"the compiler was ended by {signal.Signals(number).name}{killed}"}
    last = ended.stderr.strip().splitlines()[-_LAST_LINES:]
    return {"failure": f"exit code {ended.returncode}: " + "\n".join(last)}


def environment(outside: Mapping[str, str], dump: Path) -> dict[str, str]:
    """The worker's variables: this jaxtrain, installed or not; no GPU, and none needed."""
    checkout = str(Path(__file__).resolve().parents[2])
    dropped = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")
    kept = {name: value for name, value in outside.items() if name not in dropped}
    return kept | {
        "PYTHONPATH": os.pathsep.join([checkout, *filter(None, [outside.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the plugin would look for a driver
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"{outside.get('XLA_FLAGS', '')} {buffers.flags(dump)}".strip(),
    }
