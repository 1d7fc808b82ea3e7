"""What a check has found, and how checks are run: none of them can end the doctor."""

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxtrain.errors import InputError, RunAgain

Level = Literal["ok", "warning", "problem"]
Check = Callable[[], Iterable["Finding"]]
Tell = Callable[["Finding"], None]

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


def ok(seen: str) -> Finding:
    """All is well."""
    return Finding(level="ok", seen=seen)


def warning(seen: str, cure: str) -> Finding:
    """The run works, but not as well as it could, or nobody knows."""
    return Finding(level="warning", seen=seen, cure=cure)


def problem(seen: str, cure: str) -> Finding:
    """The run would fail, or lose something."""
    return Finding(level="problem", seen=seen, cure=cure)


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
