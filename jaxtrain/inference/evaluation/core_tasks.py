"""CORE: a score of causal language models over tasks that need no training (DCLM).

Its folder, `eval_bundle`, is not part of jaxtrain:

* ``core.yaml``: the list ``icl_tasks``, each with ``label``, ``icl_task_type``, ``dataset_uri``,
  ``num_fewshot`` (a list, of which the first counts), and ``continuation_delimiter``.
* ``eval_data/DATASET_URI``: one example per line, in JSON.
* ``eval_meta_data.csv``: the ``Random baseline`` of each ``Eval Task``, in percent.

A task is of one of three kinds. In ``multiple_choice``, one query has several continuations, and in
``schema``, several contexts have the same continuation: the model chooses the one with the lowest
mean loss per token. In ``language_modeling``, each token of the continuation must be the most
likely one. The accuracy is centered, `(accuracy - baseline) / (1 - baseline)`, and CORE is the mean
over the tasks (https://arxiv.org/abs/2406.11794). The order of the examples, the examples that are
shown in the prompt, and the prompts are those of nanochat (nanochat/core_eval.py at 92d63d4).
"""

import csv
import dataclasses
import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from jaxtrain.config import field_values
from jaxtrain.errors import InputError, first_line
from jaxtrain.inference.language_model import CausalModel, Continuation
from jaxtrain.storage import atomic

TASKS = "core.yaml"
_DATA, _BASELINES = "eval_data", "eval_meta_data.csv"
_TASK, _BASELINE = "Eval Task", "Random baseline"
_MULTIPLE_CHOICE, _SCHEMA, _LANGUAGE_MODELING = "multiple_choice", "schema", "language_modeling"
_KINDS = (_MULTIPLE_CHOICE, _SCHEMA, _LANGUAGE_MODELING)
_ORDER_SEED, _SHOWN_SEED = 1337, 1234
_GROUP = 256  # examples whose prompts are in memory at the same time
_MOST_BYTES = 2**30


class Example(NamedTuple):
    """One question.

    Attributes:
        contexts: several in a schema task.
        continuations: several in a multiple-choice task.
    """

    line: int
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    def with_answer(self, delimiter: str) -> str:
        """Returns the question with its answer, as a later prompt shows it."""
        context = self.contexts[min(self.gold, len(self.contexts) - 1)]
        answer = self.continuations[min(self.gold, len(self.continuations) - 1)]
        return f"{context}{delimiter}{answer}\n\n"


@dataclasses.dataclass(frozen=True)
class Task:
    """One task, with its examples in the order in which they are measured.

    Attributes:
        baseline: accuracy of random answers, 0 to 1.
    """

    label: str
    kind: str
    shots: int
    delimiter: str
    baseline: float
    file: Path
    examples: list[Example]

    def prompts(self, index: int) -> tuple[list[str], str]:
        """Returns a prompt for each possible answer, and the first without its continuation."""
        example, other_count = self.examples[index], len(self.examples) - 1
        chosen = random.Random(_SHOWN_SEED + index).sample(range(other_count), self.shots)
        shots = "".join(self.examples[i + (i >= index)].with_answer(self.delimiter) for i in chosen)
        begun = [f"{shots}{context}{self.delimiter}" for context in example.contexts]
        return [prompt + end for prompt in begun for end in example.continuations], begun[0].strip()

    def continuations(self, index: int, model: CausalModel) -> list[Continuation]:
        """Returns the tokens of each prompt; what is common to all prompts is not scored.

        At least one token is: the last of a continuation that is the beginning of another one.
        """
        texts, begun = self.prompts(index)
        tokens = [model.document(text) for text in texts]
        shortest = min(map(len, tokens))
        if self.kind == _SCHEMA:
            common = _common([ids[::-1] for ids in tokens])
            starts = [len(ids) - max(common, 1) for ids in tokens]
        else:
            prefixes = [model.document(begun)] if self.kind == _LANGUAGE_MODELING else []
            starts = [min(_common([*tokens, *prefixes]), shortest - 1)] * len(tokens)
        # The beginning of a prompt that is too long is cut off.
        cut = [max(0, len(ids) - model.longest) for ids in tokens]
        for ids, start, less in zip(tokens, starts, cut, strict=True):
            if start <= less:
                raise InputError(
                    f"{self.file}, line {self.examples[index].line}: the continuation has "
                    f"{len(ids) - start} tokens, which do not fit into the context window of "
                    f"{model.longest}: use a model with longer sequences, or remove the line"
                )
        return [
            Continuation(ids[less:], start - less)
            for ids, start, less in zip(tokens, starts, cut, strict=True)
        ]

    def is_right(self, index: int, losses: np.ndarray, most_likely: np.ndarray) -> bool:
        """Returns whether the answer is right, from the scores of :meth:`continuations`."""
        if self.kind == _LANGUAGE_MODELING:
            return bool(most_likely[0])
        return int(losses.argmin()) == self.examples[index].gold


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """The result of a task.

    Attributes:
        accuracy: fraction of right answers.
        centered: `(accuracy - baseline) / (1 - baseline)`.
    """

    label: str
    kind: str
    shots: int
    examples: int
    accuracy: float
    baseline: float
    centered: float


@dataclasses.dataclass(frozen=True)
class CoreScore:
    """The result of all tasks.

    Attributes:
        cut: number of prompts whose beginning did not fit into the context window.
    """

    core: float
    cut: int
    tasks: list[TaskScore]


def score(
    model: CausalModel, tasks: Sequence[Task], rows: int, each: Callable[[int, int], None]
) -> CoreScore:
    """Measures a model."""
    scores, scored, cut = [], 0, 0
    total = sum(len(task.examples) for task in tasks)
    for task in tasks:
        right = 0
        for first in range(0, len(task.examples), _GROUP):
            indices = range(len(task.examples))[first : first + _GROUP]
            prompts = [task.continuations(index, model) for index in indices]
            flat = [prompt for several in prompts for prompt in several]
            cut += sum(int(prompt.tokens[0]) != model.begin for prompt in flat)
            losses, most_likely = model.predict(flat, rows)
            begin = 0
            for index, several in zip(indices, prompts, strict=True):
                mine = slice(begin, begin + len(several))
                right += task.is_right(index, losses[mine], most_likely[mine])
                begin = mine.stop
            scored += len(indices)
            each(scored, total)
        accuracy, baseline = right / len(task.examples), task.baseline
        centered = (accuracy - baseline) / (1 - baseline)
        counts = task.shots, len(task.examples)
        scores.append(TaskScore(task.label, task.kind, *counts, accuracy, baseline, centered))
    return CoreScore(sum(result.centered for result in scores) / len(scores), cut, scores)


def is_core(path: Path) -> bool:
    """Returns whether a path is the folder of these tasks."""
    return (path / TASKS).is_file()


def read(folder: Path, max_examples: int | None = None) -> list[Task]:
    """Reads the tasks of a folder.

    Args:
        max_examples: per task, in the order in which they are measured; None is all.
    """
    file = folder / TASKS
    try:
        content = yaml.safe_load(_text(file))
        listed = content["icl_tasks"]
        if not isinstance(listed, list) or not listed:
            raise TypeError
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    except (KeyError, TypeError):
        raise InputError(f"{file} has no list icl_tasks: pass the folder eval_bundle") from None
    baselines = _baselines(folder / _BASELINES)
    tasks: list[Task] = []
    problems: list[str] = []
    for number, settings in enumerate(listed, 1):
        try:
            task = _task(folder, settings, f"{file}, task {number}", baselines)
            if any(task.label == other.label for other in tasks):
                raise InputError(f"{file}, task {number}: label {task.label} appears twice")
            tasks.append(dataclasses.replace(task, examples=_examples(task, max_examples)))
        except InputError as error:
            problems += error.messages
    if problems:
        raise InputError(*problems)
    return tasks


def _task(folder: Path, settings: Any, location: str, baselines: Mapping[str, float]) -> Task:
    if not isinstance(settings, dict):
        raise InputError(f"{location} is {settings!r:.60}: write its settings, such as label: NAME")
    for name in ("label", "icl_task_type", "dataset_uri"):
        if not isinstance(settings.get(name), str):
            raise InputError(f"{location}: {name} is {settings.get(name)!r:.60}: write a text")
    label, kind = settings["label"], settings["icl_task_type"]
    location = f"{location} ({label})"
    if kind not in _KINDS:
        raise InputError(
            f"{location}: icl_task_type {kind} is unknown; "
            f"{field_values.did_you_mean(kind, _KINDS)}"
        )
    shots, delimiter = settings.get("num_fewshot"), settings.get("continuation_delimiter", " ")
    first = shots[0] if isinstance(shots, list) and shots else None
    if type(first) is not int or first < 0:
        raise InputError(f"{location}: num_fewshot is {shots!r:.60}: write a list, such as [10]")
    if not isinstance(delimiter, str):
        raise InputError(f"{location}: continuation_delimiter is {delimiter!r:.60}: write a text")
    if label not in baselines:
        raise InputError(
            f"{folder / _BASELINES} has no {_TASK} {label}, which {TASKS} lists: add a line with "
            f"its {_BASELINE}, in percent"
        )
    file = folder / _DATA / settings["dataset_uri"]
    return Task(label, kind, first, delimiter, baselines[label], file, [])


def _baselines(file: Path) -> dict[str, float]:
    """Reads the accuracies of random answers, 0 to 1."""
    reader = csv.DictReader(io.StringIO(_text(file)))
    for name in (_TASK, _BASELINE):
        if name not in (reader.fieldnames or ()):
            raise InputError(f"{file}: no column {name}: pass the folder eval_bundle")
    baselines = {}
    for row in reader:
        try:
            value = float(row[_BASELINE])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < 100:
            raise InputError(
                f"{file}, line {reader.line_num}: {_BASELINE} {row[_BASELINE]!r:.60} of "
                f"{row[_TASK]!r:.60} is not a percentage: write a number from 0 to below 100"
            )
        baselines[row[_TASK]] = value / 100
    return baselines


def _examples(task: Task, max_examples: int | None) -> list[Example]:
    examples = []
    for number, line in enumerate(_text(task.file).split("\n"), 1):
        if line.strip():
            location = f"{task.file}, line {number}"
            try:
                content = atomic.parse_json(line)
            except ValueError as error:
                raise InputError(f"{location}: {error}: write one JSON object per line") from None
            examples.append(_example(content, task.kind, number, location))
    random.Random(_ORDER_SEED).shuffle(examples)
    examples = examples[:max_examples]
    if len(examples) <= task.shots:
        raise InputError(
            f"{task.file}: {len(examples)} examples to measure, but task {task.label} requires at "
            f"least {task.shots + 1} (num_fewshot + 1): add examples, or measure more of them"
        )
    return examples


def _example(content: Any, kind: str, number: int, location: str) -> Example:
    if not isinstance(content, dict):
        raise InputError(f"{location} is {content!r:.60}: write one JSON object per line")

    def strings(name: str, several: bool) -> tuple[str, ...]:
        value = content.get(name)
        values = value if several and isinstance(value, list) else [value]
        if not values or any(type(item) not in (str, int, float) for item in values):
            expected = "a list of texts" if several else "a text"
            raise InputError(f"{location}: {name} is {value!r:.60}: write {expected}")
        return tuple(map(str, values))

    if kind == _MULTIPLE_CHOICE:
        contexts, continuations = strings("query", False), strings("choices", True)
    elif kind == _SCHEMA:
        contexts, continuations = strings("context_options", True), strings("continuation", False)
    else:
        contexts, continuations = strings("context", False), strings("continuation", False)
        if not continuations[0].strip():
            raise InputError(f"{location}: continuation is empty: write a text")
        return Example(number, (contexts[0].strip(),), continuations, 0)
    gold, count = content.get("gold"), len(contexts) * len(continuations)
    if type(gold) is not int or not 0 <= gold < count:
        raise InputError(f"{location}: gold is {gold!r:.60}: write a number from 0 to {count - 1}")
    return Example(number, contexts, continuations, gold)


def _text(file: Path) -> str:
    try:
        return atomic.read_regular(file, _MOST_BYTES).decode()
    except FileNotFoundError:
        raise InputError(f"{file} is missing: pass the complete folder eval_bundle") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file} cannot be read: {first_line(error)}") from None


def _common(sequences: Sequence[np.ndarray]) -> int:
    """Returns the length of the common beginning."""
    shortest = min(map(len, sequences))
    equal = [ids[:shortest] == sequences[0][:shortest] for ids in sequences]
    return int(np.logical_and.reduce([*equal, np.ones(shortest, bool)]).cumprod().sum())
