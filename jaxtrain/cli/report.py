"""``jaxtrain report``: writes an HTML page about runs."""

from pathlib import Path

from jaxtrain import terminal
from jaxtrain.checkpoint import remote
from jaxtrain.cli import commands
from jaxtrain.reporting import page, run_files
from jaxtrain.storage import atomic, bucket, cache, lease


def main(flags: commands.Report) -> int:
    """Runs the command."""
    directories, holders, beside = [], list[str | None](), len(flags.runs) == 1
    for run in flags.runs:
        location = run
        holder = None
        if stored := bucket.is_bucket(str(location)):
            url, root = bucket.normalized(str(location), "RUN"), cache.root(None)
            location = remote.run_to_read(url, root, terminal.warn)
            holder = lease.holder(bucket.Bucket(url))
            # The lease of a run that was killed on another machine looks like that of a live one.
            holder = f"unless it was killed: {holder} holds the lease" if holder else ""
        directory = location.absolute()
        run_files.check(directory, location)
        directories.append(directory.resolve())
        holders.append(holder)
        beside = beside and not stored
    out = flags.out
    if out is None:
        out = directories[0] / page.NAME if beside else Path(page.NAME)
    atomic.check_writable("--out", out)
    page.write(directories, out, holders=holders)
    terminal.out(f"report: {out}")
    return 0
