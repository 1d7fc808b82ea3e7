"""Tells whether a change is better: pairs of runs, and an interval valid after each of them."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.terminal import Say

if TYPE_CHECKING:
    from jaxtrain.comparison.experiment import Comparison, Question


def compare(
    question: "Question", output_dir: Path | None, runs_dir: Path | None, say: Say
) -> "Sequence[Comparison]":
    """Compares a config with changes, and writes ``compare.json`` after each pair.

    Args:
        question: what is asked.
        output_dir: folder of the results; None derives it from the question.
        runs_dir: folder of the runs; None is ``runs`` in it.
        say: prints a line.

    Returns:
        The answer about each change.

    Raises:
        InputError: wrong use, or a run that cannot end well.
        RunAgain: only temporary failures; the same call continues.
    """
    from jaxtrain.comparison import experiment, runs, side

    folder = output_dir or experiment.default_folder(question)
    say(f"comparing in {folder}; reading the configs, the data, and the code")
    # Errors at once. Those of a config of other code come from the process that has this code.
    loaded = [config.load(one.config, one.overrides) for one in question.sides if one.code is None]
    for label, run in zip(question.labels, loaded, strict=False):
        side.check(run, question.metric, label)
        if run.seed != loaded[0].seed:
            raise InputError(
                f"the sides of a pair share their seed, but side {label} has seed {run.seed}, and "
                f"a {loaded[0].seed}: change other fields"
            )
    with (
        contextlib.ExitStack() as stack,
        runs.Trainer(os.environ, question.simulate_devices, say) as trainer,
    ):
        sides = [
            one
            if one.code is None
            else dataclasses.replace(
                one, code=stack.enter_context(one.code.checked_out(folder / "code"))
            )
            for one in question.sides
        ]
        question = dataclasses.replace(question, sides=tuple(sides))
        made = experiment.Experiment(
            question,
            folder.absolute(),
            (runs_dir or folder / "runs").absolute(),
            trainer,
            runs.slots(loaded[0].mesh, question.simulate_devices),
            say,
        )
        answers = made.run()
    say(f"results: {folder / experiment.NAME}")
    return answers
