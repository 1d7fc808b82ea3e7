"""Compiles a step in a process of its own, whose jax believes in GPUs that are not there."""

import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.distributed import subprocess_worker
from jaxtrain.distributed.subprocess_worker import SubprocessWorker, WorkerFailed
from jaxtrain.planning import buffers

Findings = dict[str, Any]

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_FUNCTION = "jaxtrain.planning.compilation:run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
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


def compile_step(request: PlanRequest, timeout_s: float) -> Findings:
    """What the compiler says of the step; ``{"failure": ...}`` where it could not compile it.

    The findings are described at :func:`jaxtrain.planning.compilation.compile_step`.

    Raises:
        InputError: the config cannot be built.
    """
    with tempfile.TemporaryDirectory() as dump:
        asked = dataclasses.asdict(request) | {"dump": dump, "estimate": not gpu_compiler()}
        variables = environment(os.environ, Path(dump))
        try:
            with SubprocessWorker(_FUNCTION, asked, variables, grace_s=0.0) as worker:
                (findings,) = worker.messages(timeout_s)
        except TimeoutError:
            return {"failure": f"not done after {timeout_s:.0f} s"}
        except WorkerFailed as failed:
            lines = "".join(f"\n{line}" for line in failed.last_lines)
            return {"failure": failed.error or f"the compiler {failed.how}{lines}"}
        return findings


def environment(outside: Mapping[str, str], dump: Path) -> dict[str, str]:
    """The worker's variables: no GPU, and none needed."""
    return subprocess_worker.environment(
        outside,
        without=("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"),
        CUDA_VISIBLE_DEVICES="-1",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",  # the plugin would look for a driver
        XLA_FLAGS=f"{outside.get('XLA_FLAGS', '')} {buffers.flags(dump)}".strip(),
    )
