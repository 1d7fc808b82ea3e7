"""The same run in less memory: candidates, each of which is compiled before it is recommended."""

import bisect
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.errors import InputError

Overrides = tuple[str, ...]
Clock = Callable[[], float]
Kind = tuple[str, str | None]  # mesh.shard, model.remat


@dataclasses.dataclass(frozen=True)
class Tried:
    """A candidate that was compiled.

    Attributes:
        overrides: to paste, besides those that were typed; () is the config as it is.
        needed: bytes a device.
        spare: bytes; below zero it does not fit, if the compiler's word is exact.
        best: seconds of a step at the card's ceilings, predicted.
        exact: whether what it needs is known; False for the program of another platform.
    """

    overrides: Overrides
    needed: float
    spare: float
    best: float
    exact: bool = True

    @property
    def fits(self) -> bool | None:
        """Whether a device has enough memory; None where that is not known."""
        return self.spare >= 0 if self.exact else None


def search(
    run: config.Run,
    attempt: Callable[[Overrides, float], Tried | None],
    budget_s: float,
    enough: int | None = None,
    clock: Clock = time.monotonic,
) -> tuple[list[Tried], bool]:
    """Compiles candidates until the budget is spent; those that fit first, the fastest first.

    Each way to shard and to rematerialise is tried with the fewest microbatches that fit: with one,
    else memory falls with their number, so that it is found by halving. The global batch stays.

    Args:
        run: the config.
        attempt: compiles a candidate within so many seconds; None if it could not.
        budget_s: seconds for all of them.
        enough: ends the search when so many fit; None looks for all.
        clock: seconds, monotonic.

    Returns:
        The candidates, and whether there was time for all.
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
        if one.spare < 0:  # where that is no more than an estimate, the search follows it
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
            # Rising, so it does not fit (False) up to the one that is looked for.
            bisect.bisect_left(more, True, key=functools.partial(fits, kind))
        whole = True
    found = [one for one in tried.values() if one is not None]
    found.sort(key=lambda one: (not one.fits, one.best if one.fits else one.needed))
    return found, whole


class _EnoughError(Exception):
    """So many fit as were asked for."""


def _needs_more(kind: Kind, parts: int, other: Kind, parts_of_other: int) -> bool:
    """Whether it needs at least as much memory as the other, whatever the model."""
    shards = ("params", "optimizer", "none")  # rising
    remats = (None, "block", "ends", "none")  # rising; None is alone
    return (
        parts <= parts_of_other
        and shards.index(kind[0]) >= shards.index(other[0])
        and remats.index(kind[1]) >= remats.index(other[1])
    )


def kinds(run: config.Run) -> Iterator[Kind]:
    """(mesh.shard, model.remat), what the config has first; remat is None for a model without."""
    remats: Sequence[str | None] = (None,)
    if hasattr(run.model, "remat"):
        choices = overrides.choices(run.model, "remat")
        remats = sorted(choices, key=lambda name: name != run.model.remat)
    shards = overrides.choices(run.mesh, "shard") if run.mesh.fsdp > 1 else (run.mesh.shard,)
    for shard in sorted(shards, key=lambda name: name != run.mesh.shard):
        for remat in remats:
            yield shard, remat


def microbatches(run: config.Run) -> list[int]:
    """Values of optim.accumulate that divide a device's part of the global batch, rising."""
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
    """Overrides that put a run on other devices; the global batch stays.

    As many examples at a time on a device as before, or the next fewer that divide its part.

    Raises:
        InputError: the devices do not divide the batch.
    """
    devices = nodes * gpus
    batch = run.data.batch_size
    if batch % devices:
        raise InputError(
            f"--devices {nodes}x{gpus}: {devices} devices do not divide data.batch_size {batch}; "
            f"set --data.batch_size {max(batch // devices, 1) * devices}"
        )
    rows = batch // devices
    parts = next(p for p in range(1, rows + 1) if rows % p == 0 and rows // p <= run.rows_at_once)
    hybrid = run.mesh.data > 1 and nodes > 1
    data, fsdp = (nodes, gpus) if hybrid else (1, devices)
    changes = ("--mesh.data", str(data), "--mesh.fsdp", str(fsdp))
    return (*changes, "--optim.accumulate", str(parts))


def parse_devices(text: str) -> tuple[int, int]:
    """``"2x8"`` -> two nodes of eight GPUs; ``"4"`` -> one node of four.

    Raises:
        InputError: it is neither.
    """
    nodes, _, gpus = text.rpartition("x")
    try:
        found = int(nodes or 1), int(gpus)
    except ValueError:
        found = (0, 0)
    if min(found) < 1:
        raise InputError(
            f"--devices {text}: write NODESxGPUS, as 2x8, or the GPUs of one node, as 4"
        )
    return found
