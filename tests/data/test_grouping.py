"""Groups of inputs: of about one size, and changed little by inputs that are added."""

import hashlib

import numpy as np
import pytest

from jaxtrain.data import grouping

Groups = dict[str, list[str]]


def groups_of(sizes: dict[str, int], most: int) -> Groups:
    listed = list(grouping.divided(list(sizes), str, sizes.__getitem__, most))
    groups = dict(listed)
    assert len(groups) == len(listed)
    return groups


def bits_of(name: str) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    return f"{number:0256b}"


def names(count: int) -> list[str]:
    return [f"folder/{number}.mp4" for number in range(count)] + ["ü.mp4", "a\udcff.mp4"]


@pytest.mark.parametrize("most", [1, 40, 1000, 10**6])
def test_groups_have_all_inputs_once_and_are_not_too_large(most: int) -> None:
    rng = np.random.default_rng(most)
    sizes = {
        name: int(size) for name, size in zip(names(200), rng.integers(0, 40, 202), strict=True)
    }
    groups = groups_of(sizes, most)
    assert sorted(name for group in groups.values() for name in group) == sorted(sizes)
    for bits, group in groups.items():
        assert group
        assert all(bits_of(name).startswith(bits) for name in group)
        assert group == sorted(group, key=bits_of)
        total = sum(sizes[name] for name in group)
        assert total <= most or len(group) == 1
        if bits:  # both halves together are too large
            above = [name for name in sizes if bits_of(name).startswith(bits[:-1])]
            assert sum(sizes[name] for name in above) > most
    assert (list(groups) == [""]) == (most == 10**6)


def test_groups_do_not_depend_on_the_order() -> None:
    sizes = {name: 1 + number % 7 for number, name in enumerate(names(100))}
    backwards = dict(reversed(sizes.items()))
    assert groups_of(sizes, 20) == groups_of(backwards, 20)


def test_an_input_that_is_added_changes_or_divides_one_group() -> None:
    sizes = dict.fromkeys(names(300), 10)
    before = groups_of(sizes, 100)
    divided = 0
    for number in range(30):
        after = groups_of(sizes | {f"new {number}": 10}, 100)
        changed = next((bits for bits, group in before.items() if after.get(bits) != group), None)
        new = {bits: group for bits, group in after.items() if before.get(bits) != group}
        if changed is not None:  # else it is alone in a new group
            assert all(bits.startswith(changed) for bits in new)
            divided += changed not in after
        assert sorted(name for group in new.values() for name in group) == sorted(
            [*before.get(changed or "", []), f"new {number}"]
        )
        assert len(before.keys() - after.keys()) == (changed is not None and changed not in after)
    assert 0 < divided < 30


def test_nothing_has_no_groups() -> None:
    assert groups_of({}, 10) == {}
