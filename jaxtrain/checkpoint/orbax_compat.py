"""Workarounds for Orbax: silences redundant logs, and reports late if a folder cannot be created.

Importing this module takes a second, as it imports Orbax.
"""

import asyncio
import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils


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
    "Global object size logging disabled",  # a warning of each save on disks of their own
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
        what = unraisable.object
        codes = (getattr(what, "cr_code", None), getattr(what, "ag_code", None))
        files = {code.co_filename for code in codes if code is not None}
        files |= {frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)}
        if not any("orbax" in file for file in files) and "Event loop is closed" not in str(
            unraisable.exc_value
        ):
            self._before(unraisable)


def handlers(state: str, meta: str, *, own_disk: bool) -> ocp.CompositeCheckpointHandler:
    """Returns the handlers of the two items of a checkpoint.

    Args:
        state: name of the item with the arrays.
        meta: name of the JSON item.
        own_disk: whether each process has a disk of its own. It then writes a checkpoint of its
            own, with all shards that it has; otherwise all write parts of the same one.
    """
    options = ocp.options.MultiprocessingOptions(primary_host=None if own_disk else 0)
    own: dict[str, Any] = {}
    if own_disk:
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=None, replica_id=None, use_replica_parallel=False
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        own = {
            state: ocp.PyTreeCheckpointHandler(
                multiprocessing_options=options, type_handler_registry=registry
            ),
            meta: ocp.JsonCheckpointHandler(multiprocessing_options=options),
        }
    return ocp.CompositeCheckpointHandler(
        *(() if own_disk else (state, meta)),
        composite_options=ocp.CompositeOptions(
            temporary_path_class=TemporaryPath,
            multiprocessing_options=options,
            async_options=async_options(own_disk=own_disk),
        ),
        **own,
    )


def async_options(*, own_disk: bool, **more: Any) -> ocp.options.AsyncOptions:
    """Returns options for saves in the background.

    With a disk for each process, folders are created before the save returns. In the background, a
    process would continue once any process has created its folder, because Orbax's signal (0.12.8,
    ``AwaitableSignalsContract``) does not name the process. On a slower disk, it would write to a
    folder that it then deletes as a leftover.

    Args:
        own_disk: see :func:`handlers`.
        more: other options.
    """
    return ocp.options.AsyncOptions(create_directories_asynchronously=not own_disk, **more)


def merge_parts(states: list[Path]) -> None:
    """Moves the arrays of several checkpoints into the first, each of which has other shards.

    Orbax does the same with the parts of processes that share a disk, at the end of a save.

    Args:
        states: the folders with the arrays; all but the first are used up.
    """
    first = states[0]
    for state in states[1:]:
        for folder in (*state.glob("ocdbt.process_*"), *state.glob("array_metadatas/*")):
            to = first / folder.relative_to(state)
            if not to.exists():
                folder.rename(to)
    (first / "manifest.ocdbt").unlink()
    shutil.rmtree(first / "d", ignore_errors=True)  # the index of the first part's shards
    asyncio.run(
        ocdbt_utils.merge_ocdbt_per_process_files(
            ocdbt_utils.epath.Path(first),
            ts_context=tensorstore_utils.get_ts_context(use_ocdbt=True),
            use_zarr3=False,
            enable_validation=False,
        )
    )


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
