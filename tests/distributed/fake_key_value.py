"""Simulates jax's key-value service in memory, with threads as the processes of a run."""

import collections
import threading
from collections.abc import Callable

from jaxtrain.distributed.key_value import KeyValueStore


class FakeClient:
    """Behaves like jax's client; ``before`` is called first, and may fail or hang."""

    def __init__(self, processes: int = 2) -> None:
        self.processes = processes
        self.values: dict[str, str] = {}
        self.before: Callable[[], None] = lambda: None
        self._came: collections.Counter[str] = collections.Counter()
        self._changed = threading.Condition()

    def stores(self) -> list[KeyValueStore]:
        """Returns the store of each process."""
        return [KeyValueStore(index, self.processes, self) for index in range(self.processes)]

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.before()
        with self._changed:
            assert value
            assert allow_overwrite or key not in self.values, f"ALREADY_EXISTS: {key}"
            self.values[key] = value
            self._changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.before()
        folder = key.rstrip("/") + "/"  # like the service: without the key itself
        with self._changed:
            return [pair for pair in self.values.items() if pair[0].startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {name: v for name, v in self.values.items() if not name.startswith(key)}

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}\nstack")
            return self.values[key]

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        with self._changed:
            self._came[barrier_id] += 1
            self._changed.notify_all()
            complete = lambda: self._came[barrier_id] == self.processes  # noqa: E731
            if not self._changed.wait_for(complete, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {barrier_id}\nstack")
