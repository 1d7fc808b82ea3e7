"""Findings: how they are printed, and that no check can end the doctor."""

from collections.abc import Iterator

from doctor.examined import with_exit_code

from jaxtrain.doctor.finding import Finding, ok, problem, run_checks, summarize, warning
from jaxtrain.errors import InputError


def test_a_failing_check_is_a_problem_and_the_next_check_still_runs() -> None:
    def broken() -> Iterator[Finding]:
        yield ok("before")
        raise ZeroDivisionError("nothing\nmore")

    def wrong() -> Iterator[Finding]:
        raise InputError("--data.path x: no such file: give another")
        yield

    found: list[Finding] = []
    checks = {"first": broken, "second": wrong, "third": lambda: [warning("seen", "cure")]}
    run_checks("some", checks, found.append)
    assert [(one.check, one.level) for one in found] == [
        ("first", "ok"),
        ("first", "problem"),
        ("second", "problem"),
        ("third", "warning"),
    ]
    assert {one.group for one in found} == {"some"}
    assert "the check 'first' itself failed: ZeroDivisionError: nothing (" in found[1].seen
    assert "more" not in found[1].seen
    assert found[1].cure
    assert found[2].seen == "--data.path x: no such file: give another"
    assert with_exit_code(found)[1] == 1


def test_levels_and_fixes_are_aligned_within_100_columns() -> None:
    lines = problem("word " * 40, "do this " * 20).as_text().splitlines()
    assert lines[0].startswith("  PROBLEM  word")
    assert lines[1].startswith(" " * 11 + "word")
    assert lines[3].startswith(" " * 11 + "fix: do this")
    assert lines[4].startswith(" " * 16 + "this")
    assert max(map(len, lines)) <= 100
    assert ok("fine").as_text() == "  ok       fine"


def test_the_verdict_counts_problems_and_names_their_groups() -> None:
    def of(group: str) -> Finding:
        return Finding(level="problem", seen="seen", cure="cure", group=group)

    assert summarize([ok("fine")]) == "ready"
    assert summarize([ok("fine"), warning("a", "b")]) == "ready, with 1 warning"
    assert summarize([of("data")]) == "not ready: 1 problem (data)"
    several = [of("data"), of("system"), of("data"), warning("a", "b"), warning("a", "b")]
    assert summarize(several) == "not ready: 3 problems (data, system), 2 warnings"
