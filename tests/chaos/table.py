"""Formats the results of many runs as a table for ``benchmarks/LOG.md``."""

import statistics
from collections.abc import Iterable
from typing import Any

from chaos.faults import KINDS
from chaos.watch import PHASES

Result = dict[str, Any]


def table(results: list[Result]) -> str:
    """Returns Markdown: a summary, then a row for each kind, phase and process count.

    Args:
        results: lines of a results file.
    """
    rows = [
        *_rows(results, "kind", KINDS),
        *_rows(results, "phase", PHASES),
        *_rows(results, "processes", sorted({result["processes"] for result in results})),
    ]
    head = "| fault or run | faults | failed runs | median recovery, s | longest recovery, s |"
    return "\n".join([summary(results), "", head, "|---|---|---|---|---|", *rows])


def summary(results: list[Result]) -> str:
    """Summarizes the results in one sentence."""
    faults = sum(len(result["faults"]) for result in results)
    failed = sum(bool(result["problems"]) for result in results)
    manual = sum(needs_hand(result) for result in results)

    def total(key: str) -> float:
        return sum(result[key] for result in results)

    restarts, again = total("starts") - len(results), total("launches") - len(results)
    return (
        f"{faults} faults in {len(results)} runs: {total('lost')} examples lost, "
        f"{total('repeated')} repeated, {manual} manual steps, {failed} failed runs; "
        f"{restarts} restarts, {again} of them after a fault ended the launcher; "
        f"{total('lost_s'):.0f} s lost in {total('seconds'):.0f} s"
    )


def needs_hand(result: Result) -> bool:
    """Whether a run needed more than its launcher to reach its end."""
    return any("manual step" in problem or "stuck" in problem for problem in result["problems"])


def _rows(results: list[Result], key: str, values: Iterable[Any]) -> list[str]:
    rows = []
    for value in values:
        chosen = {
            number: [fault for fault in result["faults"] if (result | fault)[key] == value]
            for number, result in enumerate(results)
        }
        count = sum(map(len, chosen.values()))
        if not count:
            continue
        failed = sum(bool(chosen[n] and result["problems"]) for n, result in enumerate(results))
        times = [
            fault["recovered_s"]
            for faults in chosen.values()
            for fault in faults
            if fault["recovered_s"] is not None
        ]
        name = f"{value} process{'es' * (value > 1)}" if key == "processes" else f"{key}: {value}"
        median = f"{statistics.median(times):.1f}" if times else "-"
        longest = f"{max(times):.1f}" if times else "-"
        rows.append(f"| {name} | {count} | {failed} | {median} | {longest} |")
    return rows
