"""What Orbax prints beside the errors that it raises: hundreds of lines, of which one counts."""

import logging
import sys
from collections.abc import Callable
from typing import Any


class _NoTracebacks(logging.Filter):
    """Drops the tracebacks that Orbax and asyncio log of errors which Orbax also raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        of_orbax = record.levelno >= logging.ERROR and "orbax" in record.pathname
        return not (of_orbax or "exception was never retrieved" in str(record.msg))


def quiet_orbax() -> None:
    """After the first failed read or write of several, the others have nobody to report to."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, _NoTracebacks) for one in logger.filters):
            logger.addFilter(_NoTracebacks())
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


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
