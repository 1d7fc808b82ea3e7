"""Where a run's lines go: a terminal, or whatever takes its standard output."""

import errno
import os
import sys


def plain(text: str) -> None:
    """Prints a line; whoever read the output may have gone, for the log has every line."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # a reader or a terminal that is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        # Else into a file on a full disk: nothing is left to say it with.
