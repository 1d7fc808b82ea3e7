"""Runs a rendezvous of two processes while strangers send bytes.

    main(FILE)

Process 0 and process 1 are threads here; the sockets are real. The strangers send the contents of
the file, a JSON list with one line per item (or plain bytes if it is no longer JSON), before
process 1 calls and while it waits.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from pathlib import Path

from jaxtrain.distributed import cluster_env, rendezvous
from jaxtrain.distributed.cluster_env import Cluster
from jaxtrain.errors import InputError, RunAgain

_PATIENCE_S = "10"
_STRANGERS = 8


def main() -> int:
    """Returns 0 if both processes met."""
    data = Path(sys.argv[1]).read_bytes()
    environment = {cluster_env.PATIENCE: _PATIENCE_S}
    for name in ("_LINGER_S", "_LATE_S"):  # shorter waits, for more cases
        if hasattr(rendezvous, name):
            setattr(rendezvous, name, 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    found: dict[int, Exception | None] = {}

    def join(index: int) -> None:
        cluster = Cluster(
            scheme="test",
            coordinator=f"127.0.0.1:{port}",
            source="TEST",
            count=2,
            index=index,
            hosts=None,
            devices=[],
        )
        try:
            rendezvous.join(cluster, environment)
            found[index] = None
        except (InputError, RunAgain) as error:
            found[index] = error

    processes = [threading.Thread(target=join, args=(index,), daemon=True) for index in range(2)]
    processes[0].start()
    strangers = [_connected(port) for _ in _lines(data)]
    for stranger, line in zip(strangers, _lines(data), strict=True):
        with contextlib.suppress(OSError):
            stranger.sendall(line)
    processes[1].start()
    for process in processes:
        process.join(3 * float(_PATIENCE_S))
    for stranger in strangers:
        stranger.close()
    if len(found) < 2:
        print("error: a process of the run is still waiting", file=sys.stderr)
        return 3
    errors = [error for error in found.values() if error is not None]
    if errors:
        print(f"error: {errors[0]}", file=sys.stderr)
        return 75 if any(isinstance(error, RunAgain) for error in errors) else 2
    return 0


def _connected(port: int) -> socket.socket:
    until = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 2)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _lines(data: bytes) -> list[bytes]:
    """Returns what each stranger sends: an item of the list, or the complete file."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = []
    items = content if isinstance(content, list) else [content]
    lines = []
    for item in items[: _STRANGERS - 1]:
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.dumps(item).encode() + b"\n")
    return [*lines, data + b"\n"]
