"""Tells whether a change is better: pairs of runs, and an interval valid after each of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain import config

if TYPE_CHECKING:
    from jaxtrain.comparison.experiment import At, Comparison


def run(
    a: config.Run,
    b: config.Run,
    words: tuple[str, str],
    *,
    metric: str | None,
    practical: float | None,
    at: "At",
    pairs: int,
    hours: float | None,
    output_dir: Path | None,
    runs_dir: Path | None,
    simulate_devices: int | None,
    say: Callable[[str], None],
) -> "Comparison":
    """Compares two configs, and writes ``compare.json`` and the report after each pair.

    Args:
        a: the config without the change.
        b: the config with the change.
        words: what each side is, for people.
        metric: None takes ``checkpoint.best_metric`` of a.
        practical: see :class:`jaxtrain.comparison.experiment.Question`, as ``at``, ``pairs`` and
            ``hours``.
        at: see there.
        pairs: see there.
        hours: see there.
        output_dir: folder of the results; None derives it from the question.
        runs_dir: folder of the runs; None is ``runs`` in it.
        simulate_devices: as the flag of a run.
        say: prints a line.

    Raises:
        InputError: wrong use, or a run that cannot end well.
        RunAgain: only temporary failures; the same call continues.
    """
    from jaxtrain.comparison import costs, experiment, report, runs

    question = experiment.asked(a, b, words, metric, practical, at, pairs, hours)
    folder = output_dir or experiment.default_folder(question)
    shared = runs_dir or folder / "runs"

    def measured() -> tuple[float, float]:
        return (
            costs.of_flops(a, b, say)
            if at == "flops"
            else costs.of_times(a, b, simulate_devices, say)
        )

    trainer = runs.Trainer(os.environ, simulate_devices)
    made = experiment.Experiment(
        question,
        folder.absolute(),
        shared.absolute(),
        trainer,
        runs.slots(a, simulate_devices),
        simulate_devices,
        measured,
        say,
        lambda answer: report.write(answer, words, folder.absolute() / report.NAME),
    )
    answer = made.run()
    say(f"report: {folder / report.NAME}")
    return answer
