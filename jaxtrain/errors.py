"""The errors that cross module borders."""


class InputError(Exception):
    """Wrong use or wrong input.

    The command line prints each message as one line, without a traceback, and exits with 2. A
    message names the thing, its value and the fix.

    Args:
        messages: one, or all that were found together.
    """

    def __init__(self, *messages: str) -> None:
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
