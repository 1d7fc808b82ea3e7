"""The page of a comparison: the answer, its pairs, and both families of curves."""

import dataclasses
from pathlib import Path

from jaxtrain.comparison.experiment import SIDES, Comparison, ends, hours
from jaxtrain.reporting import page, run_files
from jaxtrain.reporting.markup import Html, element, table
from jaxtrain.storage.atomic import write_whole

NAME = "report.html"


def write(answer: Comparison, words: tuple[str, str], out: Path) -> None:
    """Writes the page.

    Args:
        answer: of the comparison.
        words: what each side is, for people.
        out: the file, which is replaced atomically.

    Raises:
        OSError: it cannot be written.
    """
    runs = [
        dataclasses.replace(run_files.read(Path(directory), f"{side} {pair.seed}"), color=color)
        for pair in answer.pairs
        for color, (side, directory) in enumerate(zip(SIDES, pair.directories, strict=True))
    ]
    title = f"{answer.metric}: is b better than a?"
    text = page.comparison(title, [*_answer(answer, words)], runs)
    write_whole(out, text.encode(errors="replace"))


def _answer(answer: Comparison, words: tuple[str, str]) -> list[Html]:
    pill = element("span", answer.verdict, class_=f"pill {_PILLS.get(answer.verdict, '')}")
    sides = element(
        "ul",
        *(
            element(
                "li",
                element("span", class_=f"dot run-{color}", aria_hidden="true"),
                f" {side}: {typed}",
            )
            for color, (side, typed) in enumerate(zip(SIDES, words, strict=True))
        ),
    )
    cards = [
        ("b - a, mean", f"{answer.interval.mean:+.4g}"),
        ("95% at every look", ends(answer.interval)),
        ("pairs", str(len(answer.pairs))),
        ("training", hours(answer.seconds)),
    ]
    rows = [
        [
            f"seed {pair.seed}",
            f"{pair.a:.6g}",
            f"{pair.b:.6g}",
            "identical" if pair.identical else f"{pair.b - pair.a:+.4g}",
        ]
        for pair in answer.pairs
    ]
    direction = "larger" if answer.mode == "max" else "smaller"
    return [
        element("p", pill, " ", answer.reason, class_="state"),
        sides,
        element(
            "dl",
            *(element("div", element("dt", name), element("dd", cell)) for name, cell in cards),
            class_="cards",
        ),
        table(["", "a", "b", "b - a"], rows),
        element(
            "p",
            f"{direction.capitalize()} values are better. The interval contains the true mean "
            "difference after every pair at once with a probability of 95%, if differences are "
            "symmetric around it, as they are if a and b do not differ.",
            class_="note",
        ),
    ]


_PILLS = {"better": "done", "worse": "failed", "equivalent": "done", "identical": "done"}
