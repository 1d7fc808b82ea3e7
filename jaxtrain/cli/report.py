"""Writes an HTML page about one run, or about several side by side; the page works offline.

RUN is a run directory, such as output/latest, or s3://BUCKET/PATH. A run writes
its own page when it ends; this command writes it at any time. For several runs,
the page marks the differences.
"""

import argparse
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.checkpoint import remote
from jaxtrain.cli import command_line
from jaxtrain.data import cache
from jaxtrain.reporting import page, run_files
from jaxtrain.storage import atomic, bucket


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a RUN is not a run directory.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    directories, beside = [], len(flags.runs) == 1
    for one in flags.runs:
        given = one
        if stored := bucket.is_bucket(str(given)):
            root = cache.root(None)
            given = remote.run_to_read(str(given), root, terminal.warn)
        directory = given.absolute()
        run_files.check(directory, given)
        directories.append(directory.resolve())
        beside = beside and not stored
    out = flags.out
    if out is None:
        out = directories[0] / page.NAME if beside else Path(page.NAME)
    atomic.check_writable("--out", out)
    page.write(directories, out)
    terminal.out(f"report: {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain report RUN [RUN2 ...] [--out FILE]"
    parser = command_line.bare_parser("report", usage, __doc__)
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="+",
        type=command_line.named_file,
        help="a run directory; others are compared with the first",
    )
    add(
        "--out",
        metavar="FILE",
        type=command_line.named_file,
        help=f"the page to write (default: {page.NAME} in RUN; for several runs or a bucket, "
        f"in the current directory)",
    )
    return parser
