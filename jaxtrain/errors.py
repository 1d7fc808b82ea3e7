"""Defines the exceptions shared by all packages, the exit codes, and how messages show values."""

import os
import re
from typing import Literal, Self

DONE = 0  # the run is complete
WRONG_USE = 2  # wrong use or wrong input
HOPELESS = 4  # a gate or canary ended the run: trying again changes nothing
RUN_AGAIN = 75  # temporary failure: retry with --resume latest (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C (128 + SIGINT), or loop.max_hours or loop.max_total_hours

EXIT_CODES = {
    DONE: "done; `compare`: the change is better",
    1: "unexpected error, with a traceback; `prepare`, or `encode` or `decode` of a folder, could "
    "not process some inputs; `doctor` found problems; "
    "`checkpoints` found a damaged or unreadable checkpoint in `checkpoints/` or `best/`; `bench` "
    "could not measure anything",
    WRONG_USE: "incorrect usage or invalid input; one line per problem names it and the fix",
    3: "`plan`: the run does not fit",
    HOPELESS: "a gate of `loop.gates` is not met, or a canary found that the run cannot succeed; "
    "launchers do not restart it",
    **{
        20 + number: f"`compare`: {verdict}"
        for number, verdict in enumerate(
            (
                "the sides are equivalent (`--practical`)",
                "they are identical",
                "undecided",
                "the change is worse",
                "a side diverged",
            )
        )
    },
    RUN_AGAIN: "temporary failure; run the same command again, a run with `--resume latest`: "
    "SIGTERM, a closed terminal, a hang, a lost process of the run or of its input, a disk or "
    "bucket that is full or rejects results, a data disk or server that does not respond, another "
    "run in the same directory, or a device that computes wrong results",
    INTERRUPTED: "`loop.max_hours` or `loop.max_total_hours` is over, or Ctrl-C",
    134: "jax has ended the process, because another process of the run is gone or has not "
    "responded for a minute; launchers resume the run",
    141: "the output pipe is closed (`... | head`)",
}
"""What each exit code means; docs/reference/exit-codes.md is generated from it."""

Wish = Literal["SIGTERM", "SIGHUP", "SIGINT"]
CODES: dict[Wish, int] = {"SIGTERM": RUN_AGAIN, "SIGHUP": RUN_AGAIN, "SIGINT": INTERRUPTED}


# Characters that a terminal interprets instead of showing: control characters (C0 except tab and
# line feed, DEL, C1), Unicode's bidirectional marks, overrides, embeddings and isolates, and
# Unicode's line and paragraph separators. Surrogates represent bytes of a file name that are not
# UTF-8 and cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BYTE = range(0xDC80, 0xDD00)  # Python's surrogates for bytes of a file name that are not UTF-8


class Problem(str):
    """A message about wrong input, with the config fields that it concerns.

    Args:
        message: names the thing, its value and the fix.
        about: dotted field names; the first is the most likely cause.
    """

    about: tuple[str, ...]

    def __new__(cls, message: str, *about: str) -> Self:
        """Creates the text and stores ``about``."""
        problem = super().__new__(cls, message)
        problem.about = about
        return problem


def fields_of(message: str) -> tuple[str, ...]:
    """Returns the config fields that a message concerns; empty if unknown."""
    return message.about if isinstance(message, Problem) else ()


class InputError(Exception):
    """Wrong use or wrong input.

    The command line prints each message as one line, without a traceback, and exits with 2. A
    message names the thing, its value and the fix.

    Args:
        messages: one, or several that were found together.
        about: the config field that they concern, or several, the most likely cause first.
    """

    def __init__(self, *messages: str, about: str | tuple[str, ...] = ()) -> None:
        if about:
            fields = (about,) if isinstance(about, str) else about
            messages = tuple(Problem(message, *fields) for message in messages)
        super().__init__(*messages)
        self.messages = messages

    def __str__(self) -> str:
        return "; also: ".join(map(str, self.messages))


class BadSteps(InputError):
    """Bad steps have ended a run: its loss or gradient is NaN/Inf, or its gradient is too large."""


class RunAgain(Exception):
    """Temporary failure: a resource outside of jaxtrain, such as a disk, is full or unavailable.

    The same command with ``--resume latest`` may succeed later. The command line prints the message
    as one line, without a traceback, and exits with 75. In a run with several processes, all of
    them raise it at the same point.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its type if the message is empty."""
    line, _, _ = str(error).strip().partition("\n")  # no other character ends one: names have some
    return line.rstrip() or type(error).__name__


_LONGEST_PATH = 4096  # Linux has no longer ones; a list of files may


class BadExample(Exception):
    """An example that cannot be read.

    The pipeline records it in ``quarantine.jsonl`` and uses a substitute that the sampler
    determines.

    Args:
        path: the file that contains the example.
        reason: why it cannot be read.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error can be pickled
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        long = len(self.path) > _LONGEST_PATH
        return f"{self.path[:_LONGEST_PATH]}{'...' * long}: {self.reason}"


class Stopped(BaseException):
    """A stop signal arrived while there was nothing to save. Not an error: do not catch it.

    Attributes:
        code: exit code of the program.
    """

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish)
        self.code = CODES[wish]


def stop_inside(error: BaseException) -> BaseException | None:
    """Returns the stop signal or Ctrl-C that a library has wrapped in its own error, if any.

    Orbax wraps whatever interrupts its reading loop.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, Stopped | KeyboardInterrupt):
        inner = inner.__cause__ or inner.__context__
    return inner


def visible(text: str) -> str:
    """Escapes control characters in a text, such as ``\\x1b`` or ``\\u202e``.

    File names, messages from other hosts and generated text are untrusted. Everything that is
    printed or logged passes through here: by the functions below, the console and the event log.
    """
    return _CONTROL.sub(_escaped, text)


def one_line(text: str) -> str:
    """Escapes control characters, and line feeds as ``\\n``.

    A file name or a message from another host could otherwise add a forged line to the console or
    the log.
    """
    return visible(text).replace("\n", "\\n")


def shortest_folder(path: str) -> str:
    """Returns :func:`shortest_path` of a folder that no shell would look up: ``r1``, not ``./r1``.

    A name that begins with a dash would be a flag.
    """
    short = shortest_path(path)
    return short if short.startswith("./-") else short.removeprefix("./")


def shortest_path(path: str) -> str:
    """Returns a path as typed here: relative if it is below the current directory."""
    beside = os.path.relpath(path)
    if beside.startswith(".."):
        return os.path.abspath(path)
    return beside if "/" in beside else f"./{beside}"  # a bare name would be looked up on PATH


def short_repr(value: object, limit: int = 60) -> str:
    """Formats an untrusted value for a message: its ASCII repr, truncated.

    Args:
        value: any.
        limit: maximum number of characters.
    """
    try:
        # the repr of a numpy number includes its type
        text = str(value) if isinstance(value, int | float) else ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or a deep list
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code in _BYTE:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
