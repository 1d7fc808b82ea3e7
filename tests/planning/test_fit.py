"""Tests the search for variants that fit: it finds them all and compiles few."""

import pytest

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.planning import fit

RUN = config.load("h100_16", ["--model.remat", "ends"])  # 8 clips per device, shard params
KINDS = [(remat, shard) for remat, shard, parts in fit.candidates(RUN) if parts == 1]


def tried(changes: fit.Overrides, *, room: float) -> fit.Tried:
    """Needs 100 / microbatches, 20% more without remat; remat and microbatches cost time."""
    given = dict(zip(changes[::2], changes[1::2], strict=True))
    parts = int(given.get("--optim.accumulate", 1))
    plain = given.get("--model.remat") == "none"
    needed = 100 / parts * (1.2 if plain else 1)
    best = (0.8 if plain else 1) + 0.01 * parts
    return fit.Tried(changes, needed, room - needed, best, fits=room >= needed)


@pytest.mark.parametrize("room", [10, 13, 26, 55, 61, 101, 121])
def test_each_kind_uses_the_fewest_microbatches_that_fit(room: float) -> None:
    found, whole = fit.search(RUN, lambda changes, _: tried(changes, room=room), 1e9)
    assert whole
    for remat, shard in KINDS:
        fitting = [
            parts
            for parts in fit.microbatches(RUN)
            if tried(fit._changes(RUN, remat, shard, parts), room=room).fits
        ]
        of_kind = [one for one in found if one.fits and one.overrides in _all_changes(shard, remat)]
        if fitting:
            assert fit._changes(RUN, remat, shard, fitting[0]) in [one.overrides for one in of_kind]
        else:
            assert not of_kind


def _all_changes(shard: str, remat: str | None) -> list[fit.Overrides]:
    return [fit._changes(RUN, remat, shard, parts) for parts in fit.microbatches(RUN)]


def test_candidates_that_fit_come_first_sorted_by_time() -> None:
    found, _ = fit.search(RUN, lambda changes, _: tried(changes, room=55), 1e9)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    times = [one.best for one in found if one.fits]
    assert times == sorted(times)
    assert () in [one.overrides for one in found]


def test_the_search_ends_with_its_budget() -> None:
    now = [0.0]

    def attempt(changes: fit.Overrides, timeout_s: float) -> fit.Tried:
        assert timeout_s == 100 - now[0]
        now[0] += 40
        return tried(changes, room=1000)

    found, whole = fit.search(RUN, attempt, 100, clock=lambda: now[0])
    assert len(found) == 3
    assert not whole


def test_a_candidate_that_does_not_compile_is_skipped() -> None:
    def attempt(changes: fit.Overrides, _: float) -> fit.Tried | None:
        return None if "none" in changes else tried(changes, room=55)

    found, _ = fit.search(RUN, attempt, 1e9)
    assert found
    assert all("none" not in one.overrides for one in found)


def test_candidates_keep_the_batch_and_are_valid_configs() -> None:
    for remat, shard, parts in fit.candidates(RUN):
        changes = fit._changes(RUN, remat, shard, parts)
        other = config.load("h100_16", overrides.merged(("--model.remat", "ends"), changes))
        assert other.data.batch_size == RUN.data.batch_size
        assert (other.mesh.shard, other.model.remat) == (shard, remat)
        assert other.optim.accumulate == parts


def test_the_configs_own_remat_comes_first_with_every_sharding() -> None:
    first = KINDS[:3]
    assert first == [("ends", "params"), ("ends", "optimizer"), ("ends", "none")]
    assert {shard for _, shard in first} == set(overrides.choices(RUN.mesh, "shard"))


def test_numbers_of_microbatches_that_cannot_suffice_are_omitted() -> None:
    asked: list[fit.Overrides] = []

    def attempt(changes: fit.Overrides, _: float) -> fit.Tried:
        asked.append(changes)
        return tried(changes, room=26)

    fit.search(RUN, attempt, 1e9)
    of_ends = [changes for changes in asked if "--model.remat" not in changes]
    assert of_ends == [  # 100 of memory need 4 microbatches, not 2, with every sharding
        (),
        ("--optim.accumulate", "4"),
        ("--optim.accumulate", "4", "--mesh.shard", "optimizer"),
        ("--optim.accumulate", "4", "--mesh.shard", "none"),
    ]
    asked.clear()
    two = config.load("h100_16", ["--model.remat", "ends", "--optim.accumulate", "2"])
    fit.search(two, lambda changes, _: attempt(changes or ("--optim.accumulate", "2"), _), 1e9)
    assert asked[1] == ("--optim.accumulate", "4")  # 1 needs more than the config's own 2


def test_if_everything_fits_each_kind_is_compiled_once() -> None:
    found, _ = fit.search(RUN, lambda changes, _: tried(changes, room=1000), 1e9)
    assert len(found) == len(KINDS)


def test_the_search_ends_when_enough_fit_and_skips_what_needs_more() -> None:
    asked: list[fit.Overrides] = []

    def attempt(changes: fit.Overrides, _: float) -> fit.Tried:
        asked.append(changes)
        return tried(changes, room=55)

    found, _ = fit.search(RUN, attempt, 1e9, enough=3)
    assert sum(one.fits for one in found) == 3
    assert asked[0] == ()  # does not fit, so neither does a run without rematerialization
    assert ("--model.remat", "none") not in asked
    assert ("--mesh.shard", "none") not in asked
