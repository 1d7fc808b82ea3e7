"""Errors and stops that cross module borders, exit codes, and how a message shows a value."""

import re
from typing import Literal, Self

DONE = 0  # the run reached its end
WRONG_USE = 2  # wrong use or wrong input
RUN_AGAIN = 75  # preempted or hung: the same command with --resume latest goes on (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C (128 + SIGINT)

EXIT_CODES = {
    DONE: "done",
    1: "unexpected error, with its traceback; `doctor` found problems; `checkpoints` found a damaged "
    "or unreadable checkpoint in `checkpoints/` or `best/`; `bench` could not measure anything",
    WRONG_USE: "wrong use or wrong input; each problem is one line that names it and the fix",
    3: "`plan`: the run does not fit",
    RUN_AGAIN: "temporary failure, run the same command again: SIGTERM, a hang, a lost process, or a "
    "disk that rejects checkpoints",
    INTERRUPTED: "Ctrl-C",
    141: "the output pipe is closed (`... | head`)",
}
"""What each exit code means; docs/reference/exit-codes.md is generated from it."""

Wish = Literal["SIGTERM", "SIGINT"]
CODES: dict[Wish, int] = {"SIGTERM": RUN_AGAIN, "SIGINT": INTERRUPTED}


# What a terminal obeys instead of showing it: control characters (C0 except tab and line feed, DEL,
# C1), the marks that change the order of what surrounds them (Unicode's bidirectional marks,
# overrides, embeddings and isolates), and Unicode's own ends of lines and paragraphs. Surrogates
# stand for bytes of a file name that are not UTF-8, and cannot be encoded.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BYTE = range(0xDC80, 0xDD00)  # what Python makes of a byte of a file name that is not UTF-8


class Problem(str):
    """A message about wrong input that knows which fields of a config it is about.

    Args:
        message: names the thing, its value and the fix.
        about: dotted names; the first is the one to blame.
    """

    about: tuple[str, ...]

    def __new__(cls, message: str, *about: str) -> Self:
        """A text that remembers ``about``."""
        problem = super().__new__(cls, message)
        problem.about = about
        return problem


def fields_of(message: str) -> tuple[str, ...]:
    """The fields that a message is about; none where it does not say."""
    return message.about if isinstance(message, Problem) else ()


class InputError(Exception):
    """Wrong use or wrong input.

    The command line prints each message as one line, without a traceback, and exits with 2. A
    message names the thing, its value and the fix.

    Args:
        messages: one, or all that were found together.
        about: the field of a config that they are about, or several, the one to blame first.
    """

    def __init__(self, *messages: str, about: str | tuple[str, ...] = ()) -> None:
        if about:
            fields = (about,) if isinstance(about, str) else about
            messages = tuple(Problem(message, *fields) for message in messages)
        super().__init__(*messages)
        self.messages = messages

    def __str__(self) -> str:
        return "; also: ".join(map(str, self.messages))


class RunAgain(Exception):
    """The run cannot go on now, but the same command with ``--resume latest`` may: something
    outside of this program is full, or not there.

    The command line prints the message as one line, without a traceback, and exits with 75. In a
    run of several processes all of them raise it at the same point.
    """


def first_line(error: BaseException) -> str:
    """What an error of a library says first; its type, if it says nothing."""
    words = str(error).strip()
    return words.splitlines()[0] if words else type(error).__name__


class BadExample(Exception):
    """One example that cannot be read.

    The pipeline records it in ``quarantine.jsonl`` and takes the substitute that the order
    determines.

    Args:
        path: the file that holds the example.
        reason: what is wrong with it, in words.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives pickling
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Stopped(BaseException):
    """A stop signal came while there was nothing to save. No error: nothing should catch it.

    Attributes:
        code: exit code of the program.
    """

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish)
        self.code = CODES[wish]


def stop_inside(error: BaseException) -> BaseException | None:
    """The stop signal or Ctrl-C that a library has wrapped into an error of its own, if it was one.

    Orbax does so: it reads in a loop that turns into an error whatever interrupts it.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, Stopped | KeyboardInterrupt):
        inner = inner.__cause__ or inner.__context__
    return inner


def visible(text: str) -> str:
    """The text with what a terminal would obey written out, such as ``\\x1b`` or ``\\u202e``.

    File names, messages of other hosts and the text of models come from strangers. Everything that
    is printed or logged goes through here, by the functions below, the console and the event log.
    """
    return _OBEYED.sub(_written_out, text)


def one_line(text: str) -> str:
    """The same with line feeds written out as ``\\n``, too.

    For what is one line, whatever a file name or another host's message in it contains: with a line
    feed a file name could add a line of its own to the console or the log.
    """
    return visible(text).replace("\n", "\\n")


def shown(value: object, limit: int = 60) -> str:
    """A value from a stranger's file for a message: as Python writes it, in ASCII, and cut.

    Args:
        value: any.
        limit: characters that are kept of it.
    """
    try:
        # numpy's own way to write a number names its type
        text = str(value) if isinstance(value, int | float) else ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or a deep list
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code in _BYTE:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
