"""What the opened data of a config states about itself."""

from typing import Any

import pytest

from jaxtrain.data.source import Sources


def a(length: int) -> Any:
    return range(length)


@pytest.mark.parametrize(("train", "val", "warned"), [(3, 4, True), (3, 3, False), (3, 1, False)])
def test_more_validation_than_training_is_a_warning(train: int, val: int, warned: bool) -> None:
    sources = Sources(train=a(train), val=a(val), files=9, bad=(), summary="")
    line = (
        f"warning: {val} examples are for validation, and only {train} for training: add training "
        "data, or set --data.val_path"
    )
    assert sources.small_training == (line if warned else "")
