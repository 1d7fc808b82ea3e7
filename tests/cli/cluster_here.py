"""Stands in for a Ray cluster: one worker, in this process."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.jobs import engines


class ClusterHere(engines.Ray):
    """A cluster that finishes the items in reverse, and loses the worker of some of them."""

    def __init__(self, kills: Callable[[Any], bool] = lambda item: False) -> None:
        super().__init__("here", gpus=0)
        self.__dict__.update(_kills=kills, items=[])

    def map(self, begin: Any, items: Any) -> Iterator[Any]:
        elsewhere = contextlib.chdir("/")  # workers have other working directories
        with elsewhere:
            process = pickle.loads(pickle.dumps(begin))(engines.Worker(0, 2))
        for item in reversed(list(items)):
            sent = pickle.loads(pickle.dumps(item))
            self.items.append(sent)
            if self._kills(item):
                yield item, None
                continue
            with elsewhere:
                result = process(sent)
            yield item, pickle.loads(pickle.dumps(result))
