"""CORE on small tasks, with a model whose logits the test chooses; scores are computed by hand."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import core_tasks
from jaxtrain.inference.evaluation.core_tasks import Example, Task
from jaxtrain.inference.language_model import Continuation


class Letters:
    """A model of characters; its prediction depends on the last one only.

    Args:
        logits: characters -> the logit of the second after the first; 0 for the others.
    """

    begin = 0

    def __init__(self, logits: dict[str, float], longest: int = 1000) -> None:
        self.longest, self.seen = longest, list[tuple[str, str]]()
        self.logits = np.zeros((128, 128))
        for (before, after), value in logits.items():
            self.logits[ord(before), ord(after)] = value
        self.costs = np.log(np.exp(self.logits).sum(1, keepdims=True)) - self.logits

    def document(self, text: str) -> np.ndarray:
        return np.array([self.begin, *map(ord, text)], np.int32)

    def predict(
        self, continuations: list[Continuation], rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        losses, right = [], []
        for tokens, start in continuations:
            text = "".join(map(chr, tokens))
            self.seen.append((text[:start], text[start:]))
            pairs = tokens[start - 1 : -1], tokens[start:]
            losses.append(self.costs[pairs].mean())
            right.append((self.logits[pairs[0]].argmax(1) == pairs[1]).all())
        return np.array(losses), np.array(right)


def task(kind: str, *examples: Example, shots: int = 0, delimiter: str = " ") -> Task:
    return Task("t", kind, shots, delimiter, 0.25, Path("t.jsonl"), list(examples))


def score(model: Letters, *tasks: Task) -> core_tasks.CoreScore:
    return core_tasks.score(model, tasks, 16, lambda done, count: None)  # type: ignore[arg-type]


def test_multiple_choice_takes_the_lowest_mean_loss() -> None:
    """Of the tokens after the common beginning, which here contains the first letter."""
    model = Letters({"ax": 2.0, "xy": 1.0, "yy": -3.0, "az": 0.5})
    # After "q a": "xy" costs less per token than "z", though more in total; "xyyy" costs more.
    example = Example(1, ("q",), ("axy", "az", "axyyy"), 0)
    costs = [
        np.mean([model.costs[ord(a), ord(b)] for a, b in pairs])
        for pairs in (("ax", "xy"), ("az",), ("ax", "xy", "yy", "yy"))
    ]
    assert np.argmin(costs) == 0
    assert score(model, task("multiple_choice", example)).tasks[0].accuracy == 1
    assert model.seen == [("\0q a", "xy"), ("\0q a", "z"), ("\0q a", "xyyy")]
    losses, _ = model.predict([Continuation(model.document("q axy"), 4)], 1)
    assert losses == pytest.approx(costs[0])
    wrong = example._replace(gold=1)
    assert score(model, task("multiple_choice", wrong)).tasks[0].accuracy == 0


def test_a_choice_that_begins_another_one_keeps_its_last_token() -> None:
    model = Letters({})
    score(model, task("multiple_choice", Example(1, ("q",), ("10", "100"), 0)))
    assert model.seen == [("\0q 1", "0"), ("\0q 1", "00")]


def test_schema_compares_contexts() -> None:
    """What all contexts end with counts as the continuation."""
    model = Letters({"bs": 1.0})
    example = Example(1, ("the as", "the bs"), ("e",), 1)
    assert score(model, task("schema", example)).tasks[0].accuracy == 1
    assert model.seen == [("\0the a", "s e"), ("\0the b", "s e")]
    assert score(model, task("schema", example._replace(gold=0))).tasks[0].accuracy == 0


def test_language_modeling_requires_each_token() -> None:
    model = Letters({" x": 1.0, "xy": 1.0})
    examples = Example(1, ("c",), ("xy",), 0), Example(2, ("c",), ("xz",), 0)
    assert score(model, task("language_modeling", *examples)).tasks[0].accuracy == 0
    # The prompt is cut at its last character, so the delimiter is predicted, too.
    assert [end for _, end in model.seen] == [" xy", " xz"]
    model = Letters({"c ": 1.0, " x": 1.0, "xy": 1.0})
    assert score(model, task("language_modeling", *examples)).tasks[0].accuracy == 0.5


def test_prompts_show_other_examples_with_their_answers() -> None:
    """Drawn by the index of the question; the question itself is never shown."""
    several = [Example(n, (f"q{n}",), (f"a{n}", f"b{n}"), n % 2) for n in range(5)]
    index = 2
    others = [one for one in several if one is not several[index]]
    first, second = random.Random(1234 + index).sample(others, 2)
    shown = "".join(f"q{one.line}: {'ab'[one.gold]}{one.line}\n\n" for one in (first, second))
    asked = task("multiple_choice", *several, shots=2, delimiter=": ")
    assert asked.prompts(index) == ([f"{shown}q2: a2", f"{shown}q2: b2"], f"{shown}q2:")
    schema = [Example(n, (f"a{n}", f"b{n}"), (f"e{n}",), 1) for n in range(2)]
    asked = task("schema", *schema, shots=1)
    assert asked.prompts(0)[0] == ["b1 e1\n\na0 e0", "b1 e1\n\nb0 e0"]


def test_long_prompts_lose_their_beginning() -> None:
    model = Letters({}, longest=4)
    found = score(model, task("multiple_choice", Example(1, ("abc",), ("x", "y"), 0)))
    assert model.seen == [("bc ", "x"), ("bc ", "y")]
    assert found.cut == 2
    with pytest.raises(InputError) as caught:
        score(model, task("multiple_choice", Example(7, ("abc",), ("x", "yyyy"), 0)))
    assert str(caught.value) == (
        "t.jsonl, line 7: the continuation has 4 tokens, which do not fit into the context window "
        "of 4: use a model with longer sequences, or remove the line"
    )


YAML = """
icl_tasks:
- {label: animals, icl_task_type: multiple_choice, dataset_uri: a/animals.jsonl, num_fewshot: [1],
   continuation_delimiter: "\\nAnswer: "}
- {label: who, icl_task_type: schema, dataset_uri: who.jsonl, num_fewshot: [0, 5]}
- {label: words, icl_task_type: language_modeling, dataset_uri: words.jsonl, num_fewshot: [0]}
"""
ANIMALS = [{"query": f"q{n}", "choices": ["a", "b"], "gold": n % 2} for n in range(9)]
WHO = [{"context_options": ["a", "b"], "continuation": "c", "gold": 1}]
WORDS = [{"context": "one two ", "continuation": 3}]
CSV = "Eval Task,Task Category,Random baseline\nanimals,x,50.0\nwho,x,25\nwords,x,0\nother,x,10\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "eval_data/a").mkdir(parents=True)
    (tmp_path / "core.yaml").write_text(YAML)
    (tmp_path / "eval_meta_data.csv").write_text(CSV)
    for name, rows in (("a/animals", ANIMALS), ("who", WHO), ("words", WORDS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"eval_data/{name}.jsonl").write_text(lines)
    return tmp_path


def test_reads_the_folder(folder: Path) -> None:
    animals, who, words = core_tasks.read(folder)
    expected = [Example(n + 1, (f"q{n}",), ("a", "b"), n % 2) for n in range(9)]
    random.Random(1337).shuffle(expected)
    assert animals.examples == expected
    assert (animals.shots, animals.delimiter, animals.baseline) == (1, "\nAnswer: ", 0.5)
    assert (who.shots, who.delimiter, who.baseline) == (0, " ", 0.25)
    assert who.examples == [Example(1, ("a", "b"), ("c",), 1)]
    assert words.examples == [Example(1, ("one two",), ("3",), 0)]
    assert core_tasks.read(folder, 3)[0].examples == expected[:3]


def test_core_is_the_mean_of_centered_accuracies(folder: Path) -> None:
    """All choices cost the same, so the first is taken; of `who`, that is the wrong one."""
    found = score(Letters({"o ": 1.0, " 3": 1.0}), *core_tasks.read(folder))
    animals, who, words = found.tasks
    assert (animals.accuracy, who.accuracy, words.accuracy) == (5 / 9, 0, 1)
    assert animals.centered == pytest.approx((5 / 9 - 0.5) / 0.5)
    assert who.centered == pytest.approx(-0.25 / 0.75)
    assert words.centered == 1
    assert found.core == pytest.approx((1 / 9 - 1 / 3 + 1) / 3)
    assert (animals.examples, who.examples, found.cut) == (9, 1, 0)


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


BAD: list[tuple[str, str, str, str]] = [
    ("core.yaml", YAML, "a: [", "core.yaml is not YAML: while parsing a flow node"),
    ("core.yaml", "icl_tasks", "tasks", "core.yaml has no list icl_tasks: pass the folder"),
    ("core.yaml", "label: who", "label: animals", "core.yaml, task 2: label animals appears twice"),
    (
        *("core.yaml", "type: schema", "type: shema"),
        "core.yaml, task 2 (who): icl_task_type shema is unknown; did you mean schema?",
    ),
    (
        *("core.yaml", "who.jsonl", "whom.jsonl"),
        "eval_data/whom.jsonl is missing: pass the complete folder eval_bundle",
    ),
    ("eval_meta_data.csv", "Random baseline", "Chance", "no column Random baseline: pass the"),
    (
        *("eval_meta_data.csv", "who,x,25", "who,x,100"),
        "eval_meta_data.csv, line 3: Random baseline '100' of 'who' is not a percentage",
    ),
    (
        *("eval_meta_data.csv", "who,", "whom,"),
        "eval_meta_data.csv has no Eval Task who, which core.yaml lists: add a line with its",
    ),
    (
        *("eval_data/words.jsonl", '"continuation"', "continuation"),
        "eval_data/words.jsonl, line 1: it is not JSON: write one JSON object per line",
    ),
    (
        *("eval_data/a/animals.jsonl", '"q1", "choices": ["a", "b"]', '"q1", "choices": []'),
        "eval_data/a/animals.jsonl, line 2: choices is []: write a list of texts",
    ),
    (
        *("eval_data/who.jsonl", '"gold": 1', '"gold": 2'),
        "eval_data/who.jsonl, line 1: gold is 2: write a number from 0 to 1",
    ),
    (
        *("eval_data/who.jsonl", json.dumps(WHO[0]), ""),
        "eval_data/who.jsonl: 0 examples to measure, but task who requires at least 1",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "message"), BAD)
def test_a_bad_folder_is_an_error(
    folder: Path, file: str, old: str, new: str, message: str
) -> None:
    edit(folder / file, old, new)
    with pytest.raises(InputError) as caught:
        core_tasks.read(folder)
    assert [str(one) for one in caught.value.messages] == [str(caught.value)]
    assert str(caught.value).startswith(f"{folder}/{file.partition('/')[0]}") or "whom" in message
    assert message in str(caught.value)


def test_problems_are_found_together(folder: Path) -> None:
    edit(folder / "core.yaml", "type: schema", "type: shema")
    (folder / "eval_data/words.jsonl").write_bytes(b"\xff")
    with pytest.raises(InputError) as caught:
        core_tasks.read(folder, 1)
    whole: Any = caught.value.messages
    assert len(whole) == 3
    assert "1 examples to measure, but task animals requires at least 2" in whole[0]
    assert "words.jsonl cannot be read: " in whole[2]
