"""Measures one config in this process, and writes what it found as JSON.

    python -m jaxtrain.bench.worker REQUEST.json

Started by :mod:`jaxtrain.bench.request`. It imports nothing heavy before it looks at the clock, and
Grain's worker processes, which import this module again, do not run it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_STARTED_AT = time.time()


def main(path: str) -> int:
    """Reads a request, measures, writes the findings as they come; 0 also where memory ran out."""
    request = json.loads(Path(path).read_text())
    began = time.perf_counter()
    import jax  # the import is part of what is measured

    from jaxtrain import terminal
    from jaxtrain.bench import measurement
    from jaxtrain.errors import InputError, RunAgain, first_line

    imported_s = time.perf_counter() - began
    started = {
        "start/interpreter": _STARTED_AT - request["launched_at"],
        "start/imports": imported_s,
    }

    def keep(findings: dict[str, Any]) -> None:
        partial = f"{request['output']}.partial"
        Path(partial).write_text(json.dumps(findings))
        os.replace(partial, request["output"])

    try:
        measurement.measure(request, started, keep)
    except (InputError, RunAgain) as error:
        terminal.warn(f"error: {error}")
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        keep({"failure": "out of memory", "detail": first_line(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
