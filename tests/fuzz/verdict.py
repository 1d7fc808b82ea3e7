"""Decides which outcomes of a case are allowed."""

import re
from collections.abc import Collection

from fuzz.sandbox import MEMORY_BYTES, Ended

# These commands report bad input with exit code 1; all others refuse it with 2.
_REPORTING = ("prepare",)
_TRACES = (
    b"Traceback (most recent call last)",
    b"Exception in thread",
    b"Exception ignored in",
    b"Unhandled exception",
    b"panicked at",
    b"Fatal Python error",
    b"terminate called",
    b"Check failure stack trace",
    b"Segmentation fault",
    b"was never awaited",
    b"exception was never retrieved",
)
# C0 and C1 without line feed, tab and carriage return, and characters that change the direction.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONGEST_LINE = 2**14
BOUNDS = ("memory: ", "deadline: ")
"""How the problems of a case begin that took too much memory or time."""


def outcome(ended: Ended) -> str:
    """Returns the outcome for the table: a word, or a forbidden exit code."""
    if ended.code == 2:
        return "refused"
    if ended.code == 0:
        skipped = re.search(rb"skipped|dropped|damaged|omitted", b"".join(ended.output.values()))
        return "quarantined" if skipped else "worked"
    return f"exit {ended.code}"


def problems(
    ended: Ended,
    arguments: list[str],
    *,
    usual: Collection[str] = (),
    allowed: Collection[int] = (0, 2),
    memory_bytes: int = MEMORY_BYTES,
) -> list[str]:
    """Returns the forbidden acts of a case, one per line; empty if it passed."""
    found = [
        f"{event['what']}: {event['detail']}" for event in ended.events if not _usual(event, usual)
    ]
    found += [f"starts: {one}" for one in sorted(ended.started - set(usual)) if one]
    found += [f"leaves a process: {one}" for one in ended.left]
    found += [f"changes {name}" for name in ended.changed]
    if ended.peak_bytes > memory_bytes:
        return [*found, f"memory: above {memory_bytes / 2**30:.3g} GiB"]
    if ended.late:
        return [*found, "deadline: killed"]
    for stream, content in ended.output.items():
        found += [f"{stream}: {_trace(content, mark)}" for mark in _TRACES if mark in content][:1]
        text = content.decode(errors="surrogateescape")
        # Generated text is written unchanged if the output is not a terminal.
        plain = stream == "stdout" and arguments[:1] == ["generate"]
        if not plain and (control := _CONTROL.search(text)):
            found.append(f"{stream}: contains control character {control[0]!r}")
        if any(len(line) > _LONGEST_LINE for line in text.splitlines()) and not plain:
            found.append(f"{stream}: a line of more than {_LONGEST_LINE} characters")
    if ended.code == 2:
        lines = ended.output["stderr"].splitlines()
        errors = [line for line in lines if line.startswith(b"error: ")]
        if not errors or lines[-len(errors) :] != errors:
            found.append(
                f"exit 2 with {len(errors)} lines of error; expected at least one, at the end"
            )
    reports = ended.code == 1 and arguments[:1] and arguments[0] in _REPORTING
    if ended.code not in allowed and not reports:
        found.append(f"exit {ended.code}" if ended.code >= 0 else f"signal {-ended.code}")
    return found


def _usual(event: dict[str, str], usual: Collection[str]) -> bool:
    return event["what"] == "starts" and event["detail"] in usual


def _trace(content: bytes, mark: bytes) -> str:
    """Returns the mark, the innermost line of the package, and the error.

    The checkout may also be called jaxtrain; tests and environments in it are not the package.
    """
    text = content[content.index(mark) :].decode(errors="replace")
    ours = re.findall(r'File "[^"]*/(jaxtrain/(?!tests/|\.)[^"]+)", line (\d+)', text)
    where = f" at {ours[-1][0]}:{ours[-1][1]}" if ours else ""
    errors = re.findall(
        r"^(?:[\w.]+(?:Error|Exception|Warning|Bomb|Exit|Interrupt))\b.*", text, re.MULTILINE
    )
    last = f": {errors[-1][:200]}" if errors else ""
    return f"{mark.decode()}{where}{last}"
