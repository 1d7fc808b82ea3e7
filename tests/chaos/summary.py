"""Summarizes the results of many runs."""

from typing import Any

Result = dict[str, Any]


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
