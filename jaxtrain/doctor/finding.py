"""Findings, and running the checks that yield them: no check can end the doctor."""

import dataclasses
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.formats import counted

Level = Literal["ok", "warning", "problem"]
Check = Callable[[], Iterable["Finding"]]

_WIDTH = 100  # of the printed lines
_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_INDENT = 11
_LONGEST = 300  # characters of another library's error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check.

    Attributes:
        cure: how to fix it; empty if all is well, or if ``seen`` is an error of jaxtrain that
            names the fix itself.
    """

    level: Level
    seen: str
    cure: str = ""
    group: str = ""
    check: str = ""

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


def problem(seen: str, cure: str = "") -> Finding:
    """Makes a finding about a run that would fail or lose something."""
    return Finding(level="problem", seen=seen, cure=cure)


def verdict(findings: Sequence[Finding]) -> str:
    """Summarizes all findings in one line, the last one on the console."""
    problems = [finding for finding in findings if finding.level == "problem"]
    warnings = sum(finding.level == "warning" for finding in findings)
    warned = counted(warnings, "warning")
    if not problems:
        return "ready" + (f", with {warned}" if warnings else "")
    groups = ", ".join(dict.fromkeys(finding.group for finding in problems))
    count = f"{counted(len(problems), 'problem')} ({groups})"
    return f"not ready: {count}" + (f", {warned}" if warnings else "")


def run_checks(group: str, checks: Mapping[str, Check], report: Callable[[Finding], None]) -> None:
    """Runs checks one after another; one that raises is a problem, and the next ones still run.

    Args:
        checks: name -> check.
    """
    for name, check in checks.items():
        for finding in _guarded(name, check):
            report(dataclasses.replace(finding, group=group, check=name))


def _guarded(name: str, check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except InputError as error:  # each of its messages names the fix
        yield from map(problem, map(str, error.messages))
    except RunAgain as error:
        yield problem(str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        yield problem(
            f"the check '{name}' itself failed: {type(error).__name__}: "
            f"{first_line(error)[:_LONGEST]} ({Path(last.filename).name}:{last.lineno})",
            "its result is unknown; if the error does not name the cause, please report a bug",
        )


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
