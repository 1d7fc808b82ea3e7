"""``jaxtrain report``: writes an HTML page about runs."""

from pathlib import Path

from jaxtrain import terminal
from jaxtrain.checkpoint import remote
from jaxtrain.cli import commands
from jaxtrain.reporting import page, run_files
from jaxtrain.storage import atomic, bucket, cache


def main(flags: commands.Report) -> int:
    """Runs the command."""
    directories, beside = [], len(flags.runs) == 1
    for run in flags.runs:
        location = run
        if stored := bucket.is_bucket(str(location)):
            root = cache.root(None)
            location = remote.run_to_read(str(location), root, terminal.warn)
        directory = location.absolute()
        run_files.check(directory, location)
        directories.append(directory.resolve())
        beside = beside and not stored
    out = flags.out
    if out is None:
        out = directories[0] / page.NAME if beside else Path(page.NAME)
    atomic.check_writable("--out", out)
    page.write(directories, out)
    terminal.out(f"report: {out}")
    return 0
