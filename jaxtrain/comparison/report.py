"""The page of a comparison: the answers, their pairs, and the curves of all sides."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.comparison.experiment import Comparison, coverage, ends, hours
from jaxtrain.reporting import page, run_files
from jaxtrain.reporting.markup import Html, element, table
from jaxtrain.storage.atomic import write_whole

NAME = "report.html"


def write(answers: Sequence[Comparison], descriptions: Sequence[str], out: Path) -> None:
    """Writes the page.

    Raises:
        OSError: it cannot be written.
    """
    labels = ["a", *(["b"] if len(answers) == 1 else [f"b{n + 1}" for n in range(len(answers))])]
    directories: dict[str, tuple[int, int]] = {}  # of a run -> its side and its seed
    for number, answer in enumerate(answers):
        for pair in answer.pairs:
            for color, directory in zip((0, number + 1), pair.directories, strict=True):
                directories[directory] = color, pair.seed
    runs = [
        dataclasses.replace(run_files.read(Path(path), f"{labels[color]} {seed}"), color=color)
        for path, (color, seed) in directories.items()
    ]
    sides = element(
        "ul",
        *(
            element(
                "li",
                element("span", class_=f"dot run-{color}", aria_hidden="true"),
                f" {label}: {description}",
            )
            for color, (label, description) in enumerate(zip(labels, descriptions, strict=True))
        ),
    )
    metric = answers[0].metric
    title = f"{metric}: is {'b' if len(answers) == 1 else 'a change'} better than a?"
    blocks = [block for answer in answers for block in _answer(answer)]
    text = page.comparison(title, [sides, *blocks], runs)
    write_whole(out, text.encode(errors="replace"))


def _answer(answer: Comparison) -> list[Html]:
    pill = element("span", answer.verdict, class_=f"pill {_PILLS.get(answer.verdict, '')}")
    probability = coverage(answer.level)
    cards = [
        ("b - a, center", f"{answer.interval.center:+.4g}"),
        (f"{probability} at every look", ends(answer.interval)),
        ("pairs", str(len(answer.pairs))),
        ("training", hours(answer.seconds)),
    ]
    rows = [
        [
            f"seed {pair.seed}",
            "diverged" if pair.a is None else f"{pair.a:.6g}",
            "diverged" if pair.b is None else f"{pair.b:.6g}",
            "identical"
            if pair.identical
            else "-"
            if pair.difference is None
            else f"{pair.difference:+.4g}",
        ]
        for pair in answer.pairs
    ]
    direction = "larger" if answer.mode == "max" else "smaller"
    return [
        element("p", pill, f" {answer.change}: ", answer.reason, class_="state"),
        *(element("p", f"Warning: {warning}.", class_="note") for warning in answer.warnings),
        element(
            "dl",
            *(element("div", element("dt", name), element("dd", cell)) for name, cell in cards),
            class_="cards",
        ),
        table(["", "a", "b", "b - a"], rows),
        element(
            "p",
            f"{direction.capitalize()} values are better. The interval contains the center of the "
            f"differences after every pair at once with a probability of {probability}, if they "
            "are symmetric around it, as they are if a and b do not differ.",
            class_="note",
        ),
    ]


_PILLS = {
    "better": "done",
    "worse": "failed",
    "diverged": "failed",
    "equivalent": "done",
    "identical": "done",
}
