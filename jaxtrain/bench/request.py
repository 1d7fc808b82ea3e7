"""Starts workers, and keeps what they found whatever becomes of them."""

import dataclasses
from typing import Any

from jaxtrain.xla import subprocess_worker
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed

PARTS = ("steps", "trace", "pipeline", "save", "ceilings")
_FUNCTION = "jaxtrain.bench.measurement:measure"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRequest:
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
        """Runs the worker; ``failure`` (and ``detail``) in place of rows where it failed.

        Raises:
            InputError: the config is wrong.
            RunAgain: likewise for now.
        """
        findings: dict[str, Any] = {}
        # The variable would put the folder of compiled programs elsewhere.
        variables = subprocess_worker.environment(without=("JAX_COMPILATION_CACHE_DIR",))
        try:
            with SubprocessWorker(_FUNCTION, dataclasses.asdict(self), variables) as worker:
                for message in worker.messages(self.timeout_s):
                    findings = message  # each has all that was found before it
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
