"""BLiMP on small files, with a model whose probabilities the test chooses."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import blimp


class Chosen:
    """A model that knows the probabilities of some texts; -1 for the others."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values, self.asked = values, list[str]()

    def log_probabilities(self, texts: Sequence[str], rows: int) -> np.ndarray:
        self.asked += texts
        if "too long" in texts:
            raise InputError("'too long' has 9 tokens, but the context window has 8")
        return np.array([self.values.get(text, -1.0) for text in texts])


def line(good: str, bad: str, field: str = "syntax") -> str:
    """A line of a file, with some of the fields that BLiMP has."""
    content = {"sentence_good": good, "sentence_bad": bad, "field": field, "UID": "x"}
    return json.dumps(content) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a_1.jsonl").write_text(line("g1", "b1") + line("g2", "b2"))
    (tmp_path / "b.jsonl").write_text(line("g1", "g1", "syntax/semantics") * 4)
    (tmp_path / "c.jsonl").write_text(line("g1", "b1") * 3)
    return tmp_path


def score(values: dict[str, float], paradigms: list[blimp.Paradigm]) -> blimp.BlimpScore:
    model = Chosen(values)
    return blimp.score(model, paradigms, 4, lambda done, count: None)  # type: ignore[arg-type]


def test_the_more_probable_sentence_is_the_answer(folder: Path) -> None:
    """A mean of paradigms, whatever their number of pairs; equally probable is half an answer."""
    assert blimp.is_blimp(folder)
    found = score({"g1": -2.0, "b1": -3.0, "g2": -5.0, "b2": -4.0}, blimp.read(folder))
    assert [(one.name, one.accuracy) for one in found.paradigms] == [
        *(("a_1", 0.5), ("b", 0.5), ("c", 1.0))
    ]
    assert [(one.name, one.pairs, one.accuracy) for one in found.fields] == [
        *(("syntax", 5, 0.75), ("syntax_semantics", 4, 0.5))
    ]
    assert found.accuracy == pytest.approx(2 / 3)
    assert score({"g1": -2.0, "b1": -2.0}, blimp.read(folder, 1)).accuracy == 0.5
    table = list(blimp.rows_of(found))
    assert [row[:4] for row in table[1:]] == [
        *(("syntax", "2", "5", "0.7500"), ("syntax_semantics", "1", "4", "0.5000")),
        ("mean", "3", "9", "0.6667"),
    ]
    assert table[1][4:] == ("0.615", "0.648", "0.637", "0.794")


def test_each_sentence_is_measured_once(folder: Path) -> None:
    model = Chosen({})
    blimp.score(model, blimp.read(folder), 4, lambda done, count: None)  # type: ignore[arg-type]
    assert model.asked == ["g1", "b1", "g2", "b2", "g1", "g1", "b1"]


def test_a_long_sentence_names_its_file(folder: Path) -> None:
    (folder / "c.jsonl").write_text(line("too long", "b1"))
    with pytest.raises(InputError, match=r"^c\.jsonl: 'too long' has 9 tokens, but"):
        score({}, blimp.read(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "c.jsonl, line 1: it is not JSON: write one JSON object per line"),
        ("[1]\n", "c.jsonl, line 1: sentence_good is None: write a text"),
        (line("g", " "), "c.jsonl, line 1: sentence_bad is ' ': write a text"),
        (line("g", "b") + line("g", "b", ""), "c.jsonl, line 2: field is '': write a text"),
        ("", "c.jsonl has no pairs: remove the file"),
    ],
)
def test_damaged_files_are_named(folder: Path, content: str, message: str) -> None:
    (folder / "c.jsonl").write_text(content)
    with pytest.raises(InputError) as caught:
        blimp.read(folder)
    assert message in str(caught.value)


def test_other_folders_are_not_blimp(tmp_path: Path) -> None:
    assert not blimp.is_blimp(tmp_path)
    file = tmp_path / "a.jsonl"
    for content in ("", "{", '{"text": "a"}', "[]"):
        file.write_text(content)
        assert not blimp.is_blimp(tmp_path)
    file.write_text(line("g", "b"))
    assert blimp.is_blimp(tmp_path)
    assert not blimp.is_blimp(file)
