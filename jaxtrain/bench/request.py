"""Runs a measurement in a worker process; one that fails keeps its findings so far."""

from collections.abc import Sequence
from typing import Any

from jaxtrain.jobs import subprocess_worker
from jaxtrain.jobs.subprocess_worker import SubprocessWorker, WorkerFailed

MEASUREMENTS = ("steps", "trace", "pipeline", "save", "ceilings")
_TIMEOUT_S = 3600.0
WORKER = "worker"  # has failed if the worker ended before all measurements
_FUNCTION = "jaxtrain.bench.measurement:measure"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


def findings(
    config_name: str,
    overrides: Sequence[str],
    *,
    compiled: str,
    measurements: Sequence[str] = MEASUREMENTS,
    seconds: float = 20.0,
    simulate_devices: int | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Any]:
    """Measures a config in a worker; returns ``failure`` and ``detail`` instead of rows on failure.

    Args:
        compiled: folder of compiled programs; an empty one makes a cold start.
        measurements: a subset of :data:`MEASUREMENTS`; () measures only startup.
        seconds: for the steps, and again for the pipeline.
        simulate_devices: number of virtual CPU devices; None uses the real ones.
        timeout_s: seconds after which the worker is stopped.
    """
    request = {
        "config": config_name,
        "overrides": [*overrides],
        "compiled": compiled,
        "measurements": [*measurements],
        "seconds": seconds,
        "simulate_devices": simulate_devices,
    }
    received: dict[str, Any] = {}
    # The variable would override the folder of compiled programs.
    variables = subprocess_worker.environment(without=("JAX_COMPILATION_CACHE_DIR",))
    try:
        with SubprocessWorker(_FUNCTION, request, variables) as worker:
            for message in worker.messages(timeout_s):
                received = message  # each includes the earlier ones
        return received
    except TimeoutError:
        failure = {
            "failure": f"took longer than {timeout_s:.0f} s",
            "detail": "measure fewer --seconds, or a smaller batch",
        }
    except WorkerFailed as failed:
        failure = _failure(failed)
    if received:  # what the worker sent before it failed
        received["notes"][WORKER] = failure["failure"]
        received["failed"].append(WORKER)
    return received or failure


def _failure(failed: WorkerFailed) -> dict[str, Any]:
    detail = [failed.error] if failed.error else failed.last_lines
    output = "\n".join([failed.error, *failed.last_lines])
    if any(phrase in output for phrase in _OUT_OF_MEMORY) or failed.killed_by == "SIGKILL":
        return {"failure": "out of memory", "detail": detail[-1] if detail else "killed"}
    return {"failure": failed.how, "detail": "\n".join(detail)}
