"""Chooses what to measure, and runs each measurement in a worker process.

A measurement that fails keeps its findings so far. A point of a sweep that runs out of memory is
shown in the table and does not end the sweep.
"""

import dataclasses
from typing import Any

from jaxtrain import config
from jaxtrain.xla import subprocess_worker
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed

PARTS = ("steps", "trace", "pipeline", "save", "ceilings")
_DOUBLINGS = (-2, -1, 0, 1, 2, 3)
WORKER = "worker"  # the part that has failed if the worker ended before all parts
_FUNCTION = "jaxtrain.bench.measurement:measure"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


def batch_sizes(run: config.Run) -> dict[str, tuple[str, ...]]:
    """Returns the points of a sweep, label -> overrides, in the order of measurement.

    They are per-device microbatch sizes, from 1/4 to 8 times the config's.
    """
    unit = run.mesh.devices * run.optim.accumulate
    sizes = sorted({int(run.microbatch_size * 2.0**power) for power in _DOUBLINGS} - {0})
    return {str(size): ("--data.batch_size", str(size * unit)) for size in sizes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """A measurement for a worker.

    Attributes:
        config: a name or a path.
        overrides: as typed.
        simulate_devices: number of virtual CPU devices; None uses the real ones.
        parts: a subset of :data:`PARTS`; () measures only startup.
        seconds: for the steps, and again for the pipeline.
        compiled: folder of compiled programs; an empty one makes a cold start.
        timeout_s: seconds after which the worker is stopped.
    """

    config: str
    overrides: tuple[str, ...]
    simulate_devices: int | None
    parts: tuple[str, ...]
    seconds: float
    compiled: str
    timeout_s: float

    def findings(self) -> dict[str, Any]:
        """Runs the worker; returns ``failure`` and ``detail`` instead of rows if it failed.

        Raises:
            InputError: the config is invalid.
            RunAgain: a temporary failure.
        """
        findings: dict[str, Any] = {}
        # The variable would override the folder of compiled programs.
        variables = subprocess_worker.environment(without=("JAX_COMPILATION_CACHE_DIR",))
        try:
            with SubprocessWorker(_FUNCTION, dataclasses.asdict(self), variables) as worker:
                for message in worker.messages(self.timeout_s):
                    findings = message  # each includes the earlier ones
        except TimeoutError:
            failure = {
                "failure": f"took longer than {self.timeout_s:.0f} s",
                "detail": "measure fewer --seconds, or a smaller batch",
            }
        except WorkerFailed as failed:
            failure = _failure(failed)
        else:
            return findings
        if findings:  # what the worker sent before it failed
            findings["notes"][WORKER] = failure["failure"]
            findings["failed"].append(WORKER)
        return findings or failure


def _failure(failed: WorkerFailed) -> dict[str, Any]:
    detail = [failed.error] if failed.error else failed.last_lines
    said = "\n".join([failed.error, *failed.last_lines])
    if any(words in said for words in _OUT_OF_MEMORY) or failed.killed_by == "SIGKILL":
        return {"failure": "out of memory", "detail": detail[-1] if detail else "killed"}
    return {"failure": failed.how, "detail": "\n".join(detail)}
