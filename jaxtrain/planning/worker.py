"""Compiles one step in this process, and writes what the compiler says of it as JSON.

    python -m jaxtrain.planning.worker REQUEST.json

Started by :mod:`jaxtrain.planning.request`, with the variables that jax and XLA read when they are
imported.
"""

import json
import sys
from pathlib import Path

from jaxtrain.errors import InputError


def main(path: str) -> int:
    """Reads a request, compiles, writes the findings."""
    request = json.loads(Path(path).read_text())
    from jaxtrain.planning import compilation

    try:
        findings = compilation.compile_step(request)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Path(request["output"]).write_text(json.dumps(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
