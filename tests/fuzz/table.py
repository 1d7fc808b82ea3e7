"""Formats the results of many cases as a table."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        kind: of the case.
        seed: of the case.
        fresh: whether it ran in a fresh process.
        outcome: for the table.
        problems: its forbidden acts.
        seconds: its duration.
        peak_bytes: peak resident memory.
    """

    kind: str
    seed: int
    fresh: bool
    outcome: str
    problems: tuple[str, ...]
    seconds: float
    peak_bytes: int


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table: a row for each kind, and one for all."""
    columns = (
        "kind cases fresh worked quarantined refused other forbidden mean_s longest_s peak_GiB"
    )
    head = f"| {columns.replace(' ', ' | ').replace('_', ' ')} |"
    kinds = sorted({one.kind for one in results})
    rows = [_row(kind, [one for one in results if one.kind == kind]) for kind in kinds]
    return "\n".join([head, "|---" * 11 + "|", *rows, _row("all", results)])


def summary(results: Sequence[Result], seconds: float) -> str:
    """Summarizes the results in one line."""
    failed = sum(bool(one.problems) for one in results)
    rate = len(results) / max(seconds, 1e-9)
    return (
        f"{len(results) - failed} passed, {failed} failed in {seconds:.0f} s ({rate:.2f} cases/s)"
    )


def _row(name: str, results: Sequence[Result]) -> str:
    count = {
        outcome: sum(one.outcome == outcome and not one.problems for one in results)
        for outcome in ("worked", "quarantined", "refused")
    }
    failed = sum(bool(one.problems) for one in results)
    seconds = [one.seconds for one in results] or [0.0]
    cells = [
        name,
        len(results),
        sum(one.fresh for one in results),
        *count.values(),
        len(results) - failed - sum(count.values()),
        failed,
        f"{sum(seconds) / len(seconds):.2f}",
        f"{max(seconds):.1f}",
        f"{max((one.peak_bytes for one in results), default=0) / 2**30:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"
