"""Stands in for a Ray cluster (jaxtrain.data.engine.Ray): one worker, in this process."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any


class ClusterHere:
    """A cluster that finishes the items in reverse, and loses the worker of some of them.

    Args:
        kills: whether an item kills its worker.

    Attributes:
        items: those that were given to the worker.
        at_once: how many it may process at once.
    """

    where = "the cluster"

    def __init__(self, kills: Callable[[Any], bool] = lambda item: False) -> None:
        self._kills = kills
        self.items: list[Any] = []
        self.at_once: int | None = 1

    def with_models(
        self, begin: Any, items: Any, *fixed: Any, died: Any, at_once: int | None = 1
    ) -> Iterator[Any]:
        self.at_once = at_once
        elsewhere = contextlib.chdir("/")  # workers have other working directories
        with elsewhere:
            process = begin(2, *pickle.loads(pickle.dumps(fixed)))
        for item in reversed(list(items)):
            sent = pickle.loads(pickle.dumps(item))
            self.items.append(sent)
            killed = self._kills(item)
            with elsewhere:
                result = died(item) if killed else process(sent)
            yield item, pickle.loads(pickle.dumps(result))
