"""Searches for variants of a run that need less memory; each is compiled before it is suggested."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from jaxtrain import config
from jaxtrain.config import overrides

Overrides = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A compiled candidate.

    Attributes:
        overrides: to add to the typed ones; () for the config as it is.
        needed: bytes per device.
        spare: bytes per device; negative if it does not fit.
        best: the fewest predicted seconds per step.
    """

    overrides: Overrides
    needed: float
    spare: float
    best: float
    fits: bool


def search(
    run: config.Run,
    attempt: Callable[[Overrides, float], Tried | None],
    budget_s: float,
    enough: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Tried], bool]:
    """Compiles candidates, the config itself first, until the time is spent.

    Each combination of rematerialization and sharding is tried with ascending numbers of
    microbatches until it fits. With more of them, memory falls at most in proportion, so numbers
    that cannot suffice are omitted. The global batch size stays the same.

    Args:
        attempt: compiles a candidate within the given seconds; returns None if it could not.
        budget_s: seconds for all candidates.
        enough: ends the search once this many fit; None tries all.
        clock: monotonic seconds.

    Returns:
        The candidates (those that fit first, the fastest first), and whether all were tried.
    """
    ends, complete = clock() + budget_s, True
    tried: dict[Overrides, Tried | None] = {(): attempt((), budget_s)}
    settled = set[tuple[str | None, str]]()  # combinations that fit, or do not compile
    min_accumulate: dict[str | None, float] = collections.defaultdict(
        float
    )  # microbatches, by remat
    for remat, shard, accumulate in [(run.model.remat, "", run.optim.accumulate), *candidates(run)]:
        changes = _changes(run, remat, shard or run.mesh.shard, accumulate)
        if (remat, shard) in settled or accumulate < min_accumulate[remat]:
            continue
        if changes not in tried:
            left = ends - clock()
            if left <= 0 or sum(bool(each and each.fits) for each in tried.values()) == enough:
                complete = False
                break
            tried[changes] = attempt(changes, left)
        each = tried[changes]
        if each is None or each.fits:
            settled.add((remat, shard))
        else:
            min_accumulate[remat] = max(
                min_accumulate[remat], accumulate * each.needed / (each.needed + each.spare)
            )
    compiled = [each for each in tried.values() if each is not None]
    compiled.sort(key=lambda each: (not each.fits, each.best if each.fits else each.needed))
    return compiled, complete


def candidates(run: config.Run) -> list[tuple[str | None, str, int]]:
    """Returns (model.remat, mesh.shard, optim.accumulate), in the order of the search.

    The config's own remat, None if it is not supported, comes first; for each remat, the shardings
    in the order of the memory that they need.
    """
    remats: Sequence[str | None] = (None,)
    if run.model.remat is not None:
        choices = overrides.choices(run.model, "remat")
        remats = sorted(choices, key=lambda name: name != run.model.remat)
    shards = ("params", "optimizer", "none") if run.mesh.fsdp > 1 else (run.mesh.shard,)
    return [*itertools.product(remats, shards, microbatches(run))]


def microbatches(run: config.Run) -> list[int]:
    """Returns the values of optim.accumulate that divide the per-device batch size, ascending."""
    rows = run.data.batch_size // run.mesh.devices
    return [accumulate for accumulate in range(1, rows + 1) if rows % accumulate == 0]


def _changes(run: config.Run, remat: str | None, shard: str, accumulate: int) -> Overrides:
    changes: list[str] = []
    if accumulate != run.optim.accumulate:
        changes += ["--optim.accumulate", str(accumulate)]
    if remat is not None and remat != run.model.remat:
        changes += ["--model.remat", remat]
    if shard != run.mesh.shard:
        changes += ["--mesh.shard", shard]
    return tuple(changes)
