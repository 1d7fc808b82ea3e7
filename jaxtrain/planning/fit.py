"""Searches for variants of a run that need less memory; each is compiled before it is suggested."""

import bisect
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.errors import InputError
from jaxtrain.sharding import fitted

Overrides = tuple[str, ...]
Clock = Callable[[], float]
Kind = tuple[str, str | None]  # mesh.shard, model.remat


@dataclasses.dataclass(frozen=True)
class Tried:
    """A compiled candidate.

    Attributes:
        overrides: to add to the typed ones; () for the config as it is.
        needed: bytes per device.
        spare: bytes per device; negative if it does not fit (known only if ``exact``).
        best: the fewest predicted seconds per step.
        exact: whether ``needed`` is exact; False if compiled for another platform.
    """

    overrides: Overrides
    needed: float
    spare: float
    best: float
    exact: bool = True

    @property
    def fits(self) -> bool | None:
        """Whether a device has enough memory; None if unknown."""
        return self.spare >= 0 if self.exact else None


def search(
    run: config.Run,
    attempt: Callable[[Overrides, float], Tried | None],
    budget_s: float,
    enough: int | None = None,
    clock: Clock = time.monotonic,
) -> tuple[list[Tried], bool]:
    """Compiles candidates until the time budget is spent.

    Each combination of sharding and rematerialization is tried with the fewest microbatches that
    fit: one if possible; otherwise by bisection, as memory falls with their number. The global
    batch size stays the same.

    Args:
        run: the config.
        attempt: compiles a candidate within the given seconds; returns None if it could not.
        budget_s: seconds for all candidates.
        enough: ends the search once this many fit; None tries all.
        clock: monotonic seconds.

    Returns:
        The candidates (those that fit first, the fastest first), and whether all were tried.
    """
    ends = clock() + budget_s
    tried: dict[Overrides, Tried | None] = {}

    def compiled(changes: Overrides) -> Tried | None:
        if changes not in tried:
            left = ends - clock()
            if left <= 0:
                raise TimeoutError
            tried[changes] = attempt(changes, left)
        return tried[changes]

    too_large: list[tuple[Kind, int]] = []

    def fits(kind: Kind, parts: int) -> bool:
        if any(_needs_more(kind, parts, *other) for other in too_large):
            return False
        one = compiled(_changes(run, kind, parts))
        if one is None:
            return False
        if one.spare < 0:  # the search follows estimates, too
            too_large.append((kind, parts))
            return False
        if (
            enough is not None
            and sum(o is not None and o.fits is True for o in tried.values()) >= enough
        ):
            raise _EnoughError
        return True

    whole = False
    with contextlib.suppress(TimeoutError, _EnoughError):
        fits((run.mesh.shard, getattr(run.model, "remat", None)), run.optim.accumulate)
        first, *more = microbatches(run)
        for kind in [kind for kind in kinds(run) if not fits(kind, first)]:
            # Sorted: too few microbatches do not fit (False), then all fit.
            bisect.bisect_left(more, True, key=functools.partial(fits, kind))
        whole = True
    found = [one for one in tried.values() if one is not None]
    found.sort(key=lambda one: (not one.fits, one.best if one.fits else one.needed))
    return found, whole


class _EnoughError(Exception):
    """Ends the search: enough candidates fit."""


def _needs_more(kind: Kind, parts: int, other: Kind, parts_of_other: int) -> bool:
    """Whether a candidate needs at least as much memory as the other, for any model."""
    shards = ("params", "optimizer", "none")  # ascending memory
    remats = (None, "block", "ends", "none")  # ascending memory; None is alone
    return (
        parts <= parts_of_other
        and shards.index(kind[0]) >= shards.index(other[0])
        and remats.index(kind[1]) >= remats.index(other[1])
    )


def kinds(run: config.Run) -> Iterator[Kind]:
    """Yields (mesh.shard, model.remat), the config's own first; remat is None if not supported."""
    remats: Sequence[str | None] = (None,)
    if hasattr(run.model, "remat"):
        choices = overrides.choices(run.model, "remat")
        remats = sorted(choices, key=lambda name: name != run.model.remat)
    shards = overrides.choices(run.mesh, "shard") if run.mesh.fsdp > 1 else (run.mesh.shard,)
    for shard in sorted(shards, key=lambda name: name != run.mesh.shard):
        for remat in remats:
            yield shard, remat


def microbatches(run: config.Run) -> list[int]:
    """Returns the values of optim.accumulate that divide the per-device batch size, ascending."""
    rows = run.data.batch_size // run.mesh.devices
    return [parts for parts in range(1, rows + 1) if rows % parts == 0]


def _changes(run: config.Run, kind: Kind, parts: int) -> Overrides:
    shard, remat = kind
    changes: list[str] = []
    if parts != run.optim.accumulate:
        changes += ["--optim.accumulate", str(parts)]
    if remat is not None and remat != run.model.remat:
        changes += ["--model.remat", remat]
    if shard != run.mesh.shard:
        changes += ["--mesh.shard", shard]
    return tuple(changes)


def spread(run: config.Run, nodes: int, gpus: int) -> Overrides:
    """Returns overrides that put a run on other devices (:func:`jaxtrain.sharding.fitted`)."""
    changes = fitted(run, nodes, gpus, f"--gpus {nodes}x{gpus}")
    return tuple(word for name, value in changes.items() for word in (f"--{name}", str(value)))


def parse_devices(text: str) -> tuple[int, int]:
    """Parses ``"2x8"`` as two nodes of eight GPUs, and ``"4"`` as one node of four.

    Raises:
        InputError: the text has another form.
    """
    nodes, _, gpus = text.rpartition("x")
    try:
        found = int(nodes or 1), int(gpus)
    except ValueError:
        found = (0, 0)
    if min(found) < 1:
        raise InputError(
            f"--gpus {text}: use NODESxGPUS, such as 2x8, or the GPUs of one node, such as 4"
        )
    return found
