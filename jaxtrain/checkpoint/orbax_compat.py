"""What we need of Orbax, and workarounds for it, such as for redundant logs.

Importing this module takes a second, as it imports Orbax.
"""

import asyncio
import errno
import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxtrain.checkpoint.pointer import INDEX, INDEX_DATA
from jaxtrain.storage.disks import reason


def quiet_orbax() -> None:
    """Hides what Orbax prints in addition to the errors that it raises.

    After the first of several reads or writes fails, the others log their errors: hundreds of
    lines, of which one matters.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(filter, _NoTracebacks) for filter in logger.filters):
            logger.addFilter(_NoTracebacks())
    # Of reads that were waiting or had not begun when another failed. How many depends on the load.
    warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


_ABANDONED = (
    *("exception was never retrieved", "Task was destroyed but it is pending"),
    "Global object size logging disabled",  # of each save on disks of their own
)


class _NoTracebacks(logging.Filter):
    """Drops logged tracebacks of errors that Orbax also raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        of_orbax = record.levelno >= logging.ERROR and "orbax" in record.pathname
        return not (of_orbax or any(text in str(record.msg) for text in _ABANDONED))


class _Unraisable:
    """Python's hook for errors in callbacks; ignores those that Orbax causes.

    These are errors of its closed event loop, and of abandoned coroutines when they are freed.
    """

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        source = unraisable.object
        codes = (getattr(source, "cr_code", None), getattr(source, "ag_code", None))
        files = {code.co_filename for code in codes if code is not None}
        files |= {frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)}
        if not any("orbax" in file for file in files) and "Event loop is closed" not in str(
            unraisable.exc_value
        ):
            self._before(unraisable)


def checkpointer(
    *, own_disk: bool, timeout_s: int, barrier: Callable[..., None]
) -> ocp.AsyncCheckpointer:
    """Returns what writes arrays in the background.

    The format is OCDBT: a few files of each process in a folder of its own, and an index of all
    arrays, which needs the files of all processes. On a shared disk, Orbax makes it at the end of
    a save; without one, :func:`index_arrays` makes it where a checkpoint is fetched.

    Orbax's other format, zarr, needs no index, but has a file for each shard: 538 instead of 22
    for 14 MiB in two processes, and small states take 3 times as long (benchmarks/LOG.md).

    Args:
        own_disk: whether each process has a disk of its own.
        timeout_s: for all processes to write their part.
    """
    options = ocp.options.MultiprocessingOptions(primary_host=None if own_disk else 0)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    if own_disk:  # it would look for the shapes of the arrays, which process 0 writes
        handler._handler_impl._enable_post_merge_validation = False
    return ocp.AsyncCheckpointer(
        handler,
        temporary_path_class=TemporaryPath,
        multiprocessing_options=options,
        async_options=ocp.options.AsyncOptions(
            timeout_secs=timeout_s,
            barrier_sync_fn=barrier,
            # With a disk for each process, in the background, a process would continue once any
            # process has created its folder, because Orbax's signal (0.12.8,
            # ``AwaitableSignalsContract``) does not name the process. On a slower disk, it would
            # write to a folder that it then deletes as a leftover.
            create_directories_asynchronously=not own_disk,
        ),
    )


def index_arrays(state: Path) -> None:
    """Makes the index of the arrays in a folder with the files of all processes; replaces it.

    Args:
        state: the folder that :func:`checkpointer` has written.

    Raises:
        OSError: it cannot be written.
    """
    (state / INDEX).unlink(missing_ok=True)
    shutil.rmtree(state / INDEX_DATA, ignore_errors=True)
    handlers = ocp.type_handlers
    context = handlers.get_ts_context(use_ocdbt=True)
    merge = handlers.merge_ocdbt_per_process_files(state, context, use_zarr3=False)
    try:
        with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread has a loop that runs
            pool.submit(asyncio.run, merge).result()
    except ValueError as error:  # of TensorStore, for example on a full disk
        raise OSError(errno.EIO, reason(error), str(state)) from error


class TemporaryPath(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """The folder that Orbax writes a checkpoint into before it renames it.

    If the folder cannot be created, this class raises at the end of the save. Orbax's own class
    raises at once, while other threads of the save, in all processes, wait for the folder for 300 s
    (0.12.8, ``multihost.coordination_timeout``), and the program cannot exit before. When the save
    continues without the folder, those threads fail quickly.
    """

    _failure: OSError | None = None

    async def create(self) -> Any:
        """Creates the folder, or stores the error."""
        try:
            return await super().create()
        except OSError as error:
            self._failure = error
            return self.get()

    async def finalize(self) -> None:
        """Renames the folder.

        Raises:
            OSError: including that of :meth:`create`.
        """
        if self._failure is not None:
            raise self._failure
        await super().finalize()
