"""Replacing arrays of a state, and checksums of weights from files."""

import numpy as np
import pytest
from training import toy

from jaxtrain.training.state import checksums, with_values


def test_replaced_arrays_keep_their_dtypes_and_shardings() -> None:
    stepper = toy.stepper(toy.Config(), fsdp=4, shard="params")
    name, before = "blocks.0.up.kernel", stepper.state.params
    old = before[name]
    values = np.arange(old.size, dtype=np.float64).reshape(old.shape)
    state = with_values(stepper.state, {name: values}, {})
    new = state.params[name]
    assert (new.dtype, new.sharding) == (old.dtype, old.sharding)
    assert not new.sharding.is_fully_replicated
    np.testing.assert_array_equal(new, values)
    assert [other for other in before if state.params[other] is not before[other]] == [name]
    with pytest.raises(ValueError, match=rf"{name} has shape \(1,\)"):
        with_values(stepper.state, {name: np.ones(1)}, {})
    with pytest.raises(ValueError, match="no such array"):
        with_values(stepper.state, {}, {"unknown": np.ones(1)})


def test_each_part_of_the_weights_has_a_checksum_of_names_types_shapes_and_values() -> None:
    base = {
        "lpips.a": np.zeros((2, 3), np.float32),
        "lpips.b": np.zeros(2, np.float32),
        "teacher.a": np.zeros(2, np.float32),
    }
    known = checksums(base)
    assert set(known) == {"lpips", "teacher"}
    assert checksums(dict(reversed(base.items()))) == known
    changes = {
        "lpips.a": (np.zeros((3, 2), np.float32), np.ones((2, 3), np.float32)),
        "lpips.b": (np.zeros(2, np.int32),),
    }
    for name, arrays in changes.items():
        for array in arrays:
            changed = checksums(base | {name: array})
            assert changed["lpips"] != known["lpips"]
            assert changed["teacher"] == known["teacher"]
    renamed = {name.replace("lpips.b", "lpips.c"): array for name, array in base.items()}
    assert checksums(renamed)["lpips"] != known["lpips"]
