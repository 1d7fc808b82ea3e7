"""Compiles one step in this process, and writes what the compiler says of it as JSON.

    python -m jaxtrain.planning.worker REQUEST.json

Started by :mod:`jaxtrain.planning.request`, with the variables that jax and XLA read when they are
imported.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from jaxtrain.errors import InputError

_LONGEST = 300  # characters of a compiler's error


def main(path: str) -> int:
    """Reads a request, compiles, writes the findings.

    ``{"wrong": ...}`` in place of them for a wrong config, ``{"failure": ...}`` where the compiler
    failed.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads(Path(path).read_text())
    from jaxtrain.planning import compilation

    try:
        findings = compilation.compile_step(request)
    except InputError as error:
        findings = {"wrong": str(error)}
    except Exception as error:  # the compiler's, with pages of its own stack
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        findings = {"failure": f"{type(error).__name__}: {first[:_LONGEST]}"}
    Path(request["output"]).write_text(json.dumps(findings))
    return 0


def _end_with(parent: int) -> None:
    """Whoever started this may be killed; nobody waits for the answer then."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
