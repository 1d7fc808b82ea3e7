"""What a tracker implements (:class:`Recorder`), and what it is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PROJECT = "jaxtrain"
"""The project or experiment, unless the tracker's own environment variable names another."""


class Row(NamedTuple):
    """What a run has measured at a step."""

    step: int
    time: float
    values: dict[str, float]
    samples: dict[str, Path]


class Info(NamedTuple):
    """What a tracker shows about a run.

    Attributes:
        id: eight hexadecimal digits, always the same for a run directory.
        config: all fields of the config by section; versions; hardware; the command line.
        sent: the last step that an earlier start has sent; -1 for none.
    """

    id: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    sent: int


class Recorder(Protocol):
    """An open run of a tracker. Any method may raise any error, or hang.

    After an error, another one is made in the same process, without :meth:`close`.

    Attributes:
        destination: the URL or folder of the run, for the user.
        last: the last step that the tracker has; -1 for none.
        keeps: whether it has a row once :meth:`record` has returned, even if the process is killed;
            otherwise once :meth:`close` has.
    """

    destination: str
    last: int
    keeps: bool

    def record(self, row: Row) -> None:
        """Sends a row."""

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run."""
