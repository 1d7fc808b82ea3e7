"""Searches for variants of a run that need less memory; each is compiled before it is suggested."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

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

    Each combination of sharding and rematerialization is tried with ascending numbers of
    microbatches until it fits. The global batch size stays the same.

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
    complete = True
    for changes in _candidates(run, tried):
        left = ends - clock()
        if left <= 0 or sum(one.fits is True for one in tried.values() if one) == enough:
            complete = False
            break
        tried[changes] = attempt(changes, left)
    found = [one for one in tried.values() if one is not None]
    found.sort(key=lambda one: (not one.fits, one.best if one.fits else one.needed))
    return found, complete


def _candidates(run: config.Run, tried: Mapping[Overrides, Tried | None]) -> Iterator[Overrides]:
    """Yields what to try, the config itself first; reads the results of what it yielded before.

    With more microbatches, memory falls at most in proportion, so numbers that cannot suffice are
    omitted, also for shardings that need more memory.
    """
    yield ()
    own, own_kind = tried[()], (run.mesh.shard, run.model.remat)
    least: dict[str | None, float] = collections.defaultdict(float)
    for shard, remat in kinds(run):
        if (shard, remat) == own_kind and own is not None and own.spare < 0:
            least[remat] = max(least[remat], _least(run.optim.accumulate, own))
        for parts in microbatches(run):
            if parts < least[remat]:
                continue
            changes = _changes(run, (shard, remat), parts)
            if changes not in tried:
                yield changes
            one = tried[changes]
            if one is None or one.spare >= 0:  # the search follows estimates, too
                break
            least[remat] = _least(parts, one)


def _least(parts: int, one: Tried) -> float:
    """Returns the fewest microbatches that may fit, by those of one that does not fit."""
    return parts * one.needed / (one.needed + one.spare)


def kinds(run: config.Run) -> Iterator[Kind]:
    """Yields (mesh.shard, model.remat), the config's own remat first; None if not supported.

    For each remat, the shardings come in the order of the memory that they need.
    """
    remats: Sequence[str | None] = (None,)
    if run.model.remat is not None:
        choices = overrides.choices(run.model, "remat")
        remats = sorted(choices, key=lambda name: name != run.model.remat)
    shards = ("params", "optimizer", "none") if run.mesh.fsdp > 1 else (run.mesh.shard,)
    return ((shard, remat) for remat in remats for shard in shards)


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
