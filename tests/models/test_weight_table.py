"""Tests that a table of weights converts arrays both ways and names what does not fit."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.models import gpt, llama, mlm, modern_bert, video_ae, weight_table
from jaxtrain.models.weight_table import KERNEL, MATRIX, POINTWISE, SAME, Layout, Row, WeightTable

TINY = video_ae.Config.tiny()
MODELS: tuple[Any, ...] = (
    gpt.Config.tiny(),
    llama.Config.tiny(),
    mlm.Config.tiny(),
    modern_bert.Config.tiny(),
    TINY,
    dataclasses.replace(TINY, decoder="super"),
)
TABLE = WeightTable(
    rows=(
        Row("word", "table"),
        Row(("h.{}.a", "h.{}.b"), "blocks.{}.ab", MATRIX),
    ),
    unused=("angles",),
    tied={"head": "word"},
)
SHAPES = {"table": (3, 4), "blocks.0.ab": (4, 6), "blocks.1.ab": (4, 6)}


def drawn(shapes: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("model", MODELS)
def test_a_models_tables_have_all_its_parameters(model: Any) -> None:
    expected = weight_table.shapes_of(lambda: model.build(nnx.Rngs(0)))
    params = drawn(expected)
    for table in model.weight_tables():
        found = table.inward(table.outward(params), expected, "x", "")
        assert found.keys() == params.keys()
        for name, array in params.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("layout", "theirs", "ours"),
    [
        (SAME, (2, 3), (2, 3)),
        (MATRIX, (2, 3), (3, 2)),
        (KERNEL, (2, 3, 4, 5), (4, 5, 3, 2)),
        (KERNEL, (2, 3, 4, 5, 6), (4, 5, 6, 3, 2)),
        (POINTWISE, (2, 3, 1, 1), (3, 2)),
    ],
)
def test_layouts_are_inverses(layout: Layout, theirs: Any, ours: Any) -> None:
    tensor = np.arange(np.prod(theirs)).reshape(theirs)
    assert layout.inward(tensor).shape == ours
    np.testing.assert_array_equal(layout.outward(layout.inward(tensor)), tensor)


def test_one_of_our_arrays_may_be_several_of_theirs() -> None:
    params = drawn(SHAPES)
    theirs = TABLE.outward(params)
    assert list(theirs) == ["word", "h.0.a", "h.0.b", "h.1.a", "h.1.b"]
    np.testing.assert_array_equal(theirs["h.1.b"], params["blocks.1.ab"][:, 3:].T)
    assert TABLE.shapes(SHAPES)["h.1.b"] == (3, 4)


def test_unused_arrays_and_aliases_are_skipped_and_an_alias_stands_for_its_array() -> None:
    theirs = TABLE.outward(drawn(SHAPES)) | {"h.0.angles": np.zeros(2)}
    word = theirs.pop("word")
    found = TABLE.inward(theirs | {"head": word}, SHAPES, "x", "")
    np.testing.assert_array_equal(found["table"], word)
    with pytest.raises(InputError, match="x: head differs from word"):
        TABLE.inward(theirs | {"word": word, "head": word + 1}, SHAPES, "x", "")


def test_everything_that_does_not_fit_is_named() -> None:
    theirs = TABLE.outward(drawn(SHAPES))
    del theirs["h.0.a"]
    theirs |= {"h.1.a": np.zeros((2, 2), np.float32), "more": np.zeros(1)}
    message = (
        r"x does not fit this model; missing: h\.0\.a; extra: more; "
        r"misshapen: h\.1\.a \(2, 2\) instead of \(3, 4\)\. Use another$"
    )
    with pytest.raises(InputError, match=message):
        TABLE.inward(theirs, SHAPES, "x", "Use another")
    fewer = dataclasses.replace(TABLE, complete=False)
    with pytest.raises(InputError, match=r"missing: h.0.a; misshapen"):
        fewer.inward(theirs, SHAPES, "x", "")
    many = {str(number): (1,) for number in range(9)}
    with pytest.raises(InputError, match=r"missing: 0, 1, 2, 3, 4, 5 and 3 more\."):
        weight_table.check({}, many, "x", "")


def test_integers_are_refused() -> None:
    theirs = TABLE.outward(drawn(SHAPES)) | {"word": np.zeros((3, 4), np.int8)}
    with pytest.raises(InputError, match="x: word contains integers"):
        TABLE.inward(theirs, SHAPES, "x", "")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_with_nan_or_inf_are_refused_by_name(value: float) -> None:
    theirs = TABLE.outward(drawn(SHAPES))
    theirs["word"] = theirs["word"].copy()
    theirs["word"].flat[2] = value
    with pytest.raises(InputError, match=r"x: word contains NaN or Inf \(1 of 12 numbers\)"):
        TABLE.inward(theirs, SHAPES, "x", "")
