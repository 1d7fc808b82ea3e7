"""When a launcher starts a run again: a pure function of what it has seen."""

import itertools
import random

import pytest

from jaxtrain.supervisor import NONE, NOTHING, UNUSABLE, Count, Newest

WORDS: list[Newest] = [NOTHING, NONE, UNUSABLE]


@pytest.mark.parametrize("seed", range(200))
def test_any_sequence_of_starts(seed: int) -> None:
    chance = random.Random(seed)
    count = Count(chance.choice([*WORDS, 3]))
    started, vain = True, 0
    for _ in range(50):
        newest = chance.choice([*WORDS, chance.randrange(10)])
        lost, after = count.lost(newest), count.after(newest, started=started)
        # What was there is remembered until there is something to continue from.
        assert after.newest == (count.newest if lost else newest)
        # A run is never lost if it has a checkpoint, or if it had none and its directory exists.
        assert not (lost and isinstance(newest, int))
        assert not (lost and newest == UNUSABLE)
        assert bool(lost) == (
            (newest == NOTHING and count.newest != NOTHING)
            or (newest == NONE and isinstance(count.newest, int))
        )
        # Only a later checkpoint ends a row; everything else that took a start or a look adds one.
        before = count.newest if isinstance(count.newest, int) else -1
        if isinstance(newest, int) and newest > before:
            vain = 1
        else:
            vain += bool(started or lost)
        assert after.in_vain == vain
        # A launcher looks again without a start as long as the run is lost.
        started, count = not lost, after


def test_no_run_is_started_forever_without_a_later_checkpoint() -> None:
    for sequence in itertools.product([*WORDS, 1, 2], repeat=4):
        count = Count(2)
        for newest in sequence:
            last, count = count, count.after(newest)
            later = isinstance(newest, int) and (
                not isinstance(last.newest, int) or newest > last.newest
            )
            assert later or count.in_vain == last.in_vain + 1


def test_a_run_that_is_found_again_continues_its_row() -> None:
    count = Count(18).after(NOTHING).after(NOTHING, started=False)
    assert count == Count(18, 2)
    assert count.after(18, started=False) == Count(18, 2)
    assert count.after(19, started=False) == Count(19, 1)
