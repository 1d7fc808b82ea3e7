"""Runs one measurement in a worker process, and keeps its findings even if the worker fails."""

import dataclasses
from typing import Any

from jaxtrain.xla import subprocess_worker
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed

PARTS = ("steps", "trace", "pipeline", "save", "ceilings")
_FUNCTION = "jaxtrain.bench.measurement:measure"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


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
            failure = {"failure": f"took longer than {self.timeout_s:.0f} s", "detail": ""}
        except WorkerFailed as failed:
            failure = _failure(failed)
        else:
            return findings
        if findings:
            findings["notes"]["worker"] = failure["failure"]
        return findings or failure


def _failure(failed: WorkerFailed) -> dict[str, Any]:
    detail = [failed.error] if failed.error else failed.last_lines
    said = "\n".join([failed.error, *failed.last_lines])
    if any(words in said for words in _OUT_OF_MEMORY) or failed.killed_by == "SIGKILL":
        return {"failure": "out of memory", "detail": detail[-1] if detail else "killed"}
    return {"failure": failed.how, "detail": "\n".join(detail)}
