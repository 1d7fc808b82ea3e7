"""Findings as a person reads them, within 100 columns."""

import textwrap
from collections.abc import Sequence

from jaxtrain.doctor.finding import Finding

WIDTH = 100
_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_INDENT = 11


def finding(found: Finding) -> str:
    """Mark, what was seen, and below it the cure."""
    lines = [_wrapped(f"  {_MARKS[found.level]:<{_INDENT - 2}}", found.seen)]
    if found.cure:
        lines.append(_wrapped(" " * _INDENT + "cure: ", found.cure))
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    problems = [one for one in findings if one.level == "problem"]
    warnings = sum(one.level == "warning" for one in findings)
    warned = f"{warnings} warning{'s' if warnings != 1 else ''}"
    if not problems:
        return "ready" + (f", with {warned}" if warnings else "")
    where = ", ".join(dict.fromkeys(one.group for one in problems))
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} ({where})"
    return f"not ready: {count}" + (f", {warned}" if warnings else "")


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
