"""No check can end the doctor."""

from collections.abc import Iterator

from examined import judged

from jaxtrain.doctor.finding import Finding, ok, run_checks, warning
from jaxtrain.errors import InputError


def test_a_check_that_breaks_is_a_problem_that_names_it_and_the_next_goes_on() -> None:
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
    assert judged(found)[1] == 1
