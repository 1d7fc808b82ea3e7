"""What a check has found, and how checks are run: none of them can end the doctor."""

import dataclasses
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxtrain.errors import InputError, RunAgain

Level = Literal["ok", "warning", "problem"]
Check = Callable[[], Iterable["Finding"]]
Tell = Callable[["Finding"], None]

WIDTH = 100  # of the printed lines

_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_INDENT = 11
_LONGEST = 300  # characters of a foreign error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: a problem keeps the run from working, or from working for long.
        seen: what it is, in numbers.
        cure: what to do about it; empty where all is well, or where ``seen`` is an error of the
            program that names the cure itself.
        group: of checks.
        check: its name.
    """

    level: Level
    seen: str
    cure: str = ""
    group: str = ""
    check: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """For the console: the mark, what was seen, and the cure below it."""
        lines = [_wrapped(f"  {_MARKS[self.level]:<{_INDENT - 2}}", self.seen)]
        if self.cure:
            lines.append(_wrapped(" " * _INDENT + "cure: ", self.cure))
        return "\n".join(lines)


def ok(seen: str) -> Finding:
    """All is well."""
    return Finding(level="ok", seen=seen)


def warning(seen: str, cure: str) -> Finding:
    """The run works, but not as well as it could, or nobody knows."""
    return Finding(level="warning", seen=seen, cure=cure)


def problem(seen: str, cure: str) -> Finding:
    """The run would fail, or lose something."""
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


def run_checks(group: str, checks: Mapping[str, Check], tell: Tell) -> None:
    """Runs checks one after the other; one that raises is a problem, and the next one goes on.

    Args:
        group: that they belong to.
        checks: name -> check.
        tell: takes each finding as soon as it is there.
    """
    for name, check in checks.items():
        try:
            for found in check():
                tell(dataclasses.replace(found, group=group, check=name))
        except Exception as error:
            tell(dataclasses.replace(_of_error(name, error), group=group, check=name))


def first_line(error: BaseException) -> str:
    """An error in one line that is not too long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__


def _of_error(check: str, error: Exception) -> Finding:
    if isinstance(error, InputError | RunAgain):  # one line that names the cure itself
        return Finding(level="problem", seen=str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return problem(
        f"the check '{check}' itself failed: {first_line(error)} ({Path(last.filename).name}:"
        f"{last.lineno})",
        "nothing is known of what it looks at: see whether the words above name a cause, and "
        "report it if not",
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
