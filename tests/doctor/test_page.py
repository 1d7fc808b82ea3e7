"""Findings on a page of 100 columns."""

from jaxtrain.doctor import page
from jaxtrain.doctor.finding import Finding, ok, problem, warning


def test_marks_and_cures_stand_below_one_another() -> None:
    lines = page.finding(problem("word " * 40, "do this " * 20)).splitlines()
    assert lines[0].startswith("  PROBLEM  word")
    assert lines[1].startswith(" " * 11 + "word")
    assert lines[3].startswith(" " * 11 + "cure: do this")
    assert lines[4].startswith(" " * 17 + "this")
    assert max(map(len, lines)) <= 100
    assert page.finding(ok("fine")) == "  ok       fine"


def test_the_verdict_counts_problems_and_names_their_groups() -> None:
    def of(group: str) -> Finding:
        return Finding(level="problem", seen="seen", cure="cure", group=group)

    assert page.verdict([ok("fine")]) == "ready"
    assert page.verdict([ok("fine"), warning("a", "b")]) == "ready, with 1 warning"
    assert page.verdict([of("data")]) == "not ready: 1 problem (data)"
    several = [of("data"), of("system"), of("data"), warning("a", "b"), warning("a", "b")]
    assert page.verdict(several) == "not ready: 3 problems (data, system), 2 warnings"
