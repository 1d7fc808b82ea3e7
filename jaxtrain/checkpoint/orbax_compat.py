"""Where Orbax needs help: the log lines beside its errors, and a temporary folder that fails late.

Importing this module takes a second, as it imports Orbax.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp


def quiet_orbax() -> None:
    """Hides what Orbax prints beside the errors that it raises.

    After the first failed read or write of several, the others have nobody to report to: hundreds
    of lines, of which one counts.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(filter, _NoTracebacks) for filter in logger.filters):
            logger.addFilter(_NoTracebacks())
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


class _NoTracebacks(logging.Filter):
    """Drops the tracebacks that Orbax and asyncio log of errors which Orbax also raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        of_orbax = record.levelno >= logging.ERROR and "orbax" in record.pathname
        return not (of_orbax or "exception was never retrieved" in str(record.msg))


class _Unraisable:
    """What Python calls for errors in callbacks; those of a closed event loop are Orbax's.

    So are those of its coroutines that nobody waits for any more, as they are thrown away.
    """

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and "Event loop is closed" not in str(unraisable.exc_value):
            self._before(unraisable)


class TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """The folder that Orbax writes a checkpoint into before it renames it.

    Where the folder cannot be made, this reports it at the end of the save. Orbax's own class
    reports it at once, which leaves other threads of the save, in all processes, waiting for the
    folder, and the program cannot end before they do: 300 s (0.12.8,
    ``multihost.coordination_timeout``). Without the folder they fail too, soon.
    """

    _failure: OSError | None = None

    async def create(self) -> Any:
        """Makes the folder, or remembers why not."""
        try:
            return await super().create()
        except OSError as error:
            self._failure = error
            return self.get()

    async def finalize(self) -> None:
        """Renames the folder.

        Raises:
            OSError: that of :meth:`create` too.
        """
        if self._failure is not None:
            raise self._failure
        await super().finalize()
