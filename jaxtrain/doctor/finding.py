"""Findings, and running the checks that yield them: no check can end the doctor."""

import dataclasses
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxtrain.errors import InputError, RunAgain

Level = Literal["ok", "warning", "problem"]
Check = Callable[[], Iterable["Finding"]]
Report = Callable[["Finding"], None]

WIDTH = 100  # of the printed lines

_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_INDENT = 11
_LONGEST = 300  # characters of another library's error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check.

    Attributes:
        level: "problem" if the run would fail, at once or later.
        seen: the observation, with numbers.
        cure: how to fix it; empty if all is well, or if ``seen`` is an error of jaxtrain that
            names the fix itself.
        group: the check's group.
        check: the check's name.
    """

    level: Level
    seen: str
    cure: str = ""
    group: str = ""
    check: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Converts it for JSON."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Formats it for the console: the level, the observation, and the fix below it."""
        lines = [_wrapped(f"  {_MARKS[self.level]:<{_INDENT - 2}}", self.seen)]
        if self.cure:
            lines.append(_wrapped(" " * _INDENT + "fix: ", self.cure))
        return "\n".join(lines)


def ok(seen: str) -> Finding:
    """Makes a finding that needs no action."""
    return Finding(level="ok", seen=seen)


def warning(seen: str, cure: str) -> Finding:
    """Makes a finding about a run that works, but not as well as it could, or may not."""
    return Finding(level="warning", seen=seen, cure=cure)


def problem(seen: str, cure: str) -> Finding:
    """Makes a finding about a run that would fail or lose something."""
    return Finding(level="problem", seen=seen, cure=cure)


def verdict(findings: Sequence[Finding]) -> str:
    """Summarizes all findings in one line, the last one on the console."""
    problems = [one for one in findings if one.level == "problem"]
    warnings = sum(one.level == "warning" for one in findings)
    warned = f"{warnings} warning{'s' if warnings != 1 else ''}"
    if not problems:
        return "ready" + (f", with {warned}" if warnings else "")
    where = ", ".join(dict.fromkeys(one.group for one in problems))
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} ({where})"
    return f"not ready: {count}" + (f", {warned}" if warnings else "")


def run_checks(group: str, make: Callable[[], Mapping[str, Check]], report: Report) -> None:
    """Runs checks one after another; one that raises is a problem, and the next ones still run.

    Args:
        group: name of the group that they belong to.
        make: returns the checks by name.
        report: takes each finding as soon as there is one.
    """
    name = "start"
    try:
        checks = make()
    except Exception as error:
        report(dataclasses.replace(_of_error(name, error), group=group, check=name))
        return
    for name, check in checks.items():
        try:
            for found in check():
                report(dataclasses.replace(found, group=group, check=name))
        except Exception as error:
            report(dataclasses.replace(_of_error(name, error), group=group, check=name))


def first_line(error: BaseException) -> str:
    """Shortens an error to its first line, with the type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__


def _of_error(check: str, error: Exception) -> Finding:
    if isinstance(error, InputError | RunAgain):  # its one line names the fix
        return Finding(level="problem", seen=str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return problem(
        f"the check '{check}' itself failed: {first_line(error)} ({Path(last.filename).name}:"
        f"{last.lineno})",
        "its result is unknown; if the error does not name the cause, please report a bug",
    )


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
