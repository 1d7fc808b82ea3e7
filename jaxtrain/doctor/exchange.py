"""Texts that the processes of a run tell one another, through jax's coordination service.

Not through the devices: what is asked here is whether those work. And every wait has a limit.
"""

import dataclasses
from typing import Any, Self

import jax

from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError


class Silent(InputError):
    """A process did not answer in time."""


@dataclasses.dataclass
class Exchange:
    """Says and hears what concerns the processes of a run.

    Attributes:
        index: of this one.
        count: of all.
        service: client of the coordination service; None where there is only one process.
    """

    index: int
    count: int
    service: Any

    @classmethod
    def of_run(cls) -> Self:
        """Between the processes that jax has connected."""
        run = process_group.members()
        return cls(run.index, run.count, run.service)

    def all_say(self, topic: str, text: str, timeout_s: float) -> list[str]:
        """Says something, and returns what each process said about it, this one included.

        Args:
            topic: each can be used once.
            text: what this process says.
            timeout_s: for each of the others.

        Raises:
            Silent: a process said nothing.
        """
        if self.count == 1:
            return [text]
        self.say(topic, text)
        return [
            text if process == self.index else self.hear(topic, process, timeout_s)
            for process in range(self.count)
        ]

    def say(self, topic: str, text: str) -> None:
        """Says something; whoever wants to know reads it."""
        # A value may not be empty, so each begins with a mark.
        self.service.key_value_set(_key(topic, self.index), f"={text}")

    def hear(self, topic: str, process: int, timeout_s: float) -> str:
        """What a process said.

        Raises:
            Silent: nothing in this time.
        """
        try:
            said = self.service.blocking_key_value_get(_key(topic, process), int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            raise Silent(
                f"process {process} did not say its {topic} within {timeout_s:.0f} s: see what it "
                "printed, and start all processes at the same time"
            ) from error
        return str(said)[1:]

    def meet(self, place: str, timeout_s: float) -> None:
        """Returns when all processes are here.

        Raises:
            Silent: not in this time.
        """
        if self.count == 1:
            return
        try:
            self.service.wait_at_barrier(f"jaxtrain/doctor/{place}", int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            raise Silent(
                f"not all {self.count} processes came to '{place}' within {timeout_s:.0f} s: see "
                "what the others printed, and start all at the same time"
            ) from error


def _key(topic: str, process: int) -> str:
    return f"jaxtrain/doctor/{topic}/{process}"
