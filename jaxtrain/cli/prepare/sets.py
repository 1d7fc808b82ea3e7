"""``jaxtrain prepare sets``: lists the sets of pieces that runs have made in the cache."""

import shutil
import time

from jaxtrain import terminal
from jaxtrain.cli import commands
from jaxtrain.data.video import sets
from jaxtrain.errors import InputError
from jaxtrain.formats import counted
from jaxtrain.storage import addresses, cache

_DAY_S = 86_400


def main(flags: commands.PrepareSets) -> int:
    """Runs the command and returns its exit code."""
    if (url := cache.url(flags.cache_dir)) is not None:
        raise InputError(
            f"the cache is {addresses.public(url)}, where no run marks its use of a set"
        )
    root = cache.path_of(flags.cache_dir)
    kept = deleted = 0
    for cached in sets.cached(root):
        idle_days = (time.time() - cached.used_s) / _DAY_S
        size = sum(tar.stat().st_size for tar in cached.folder.glob("*.tar"))
        deletes = flags.prune is not None and idle_days >= flags.prune
        if deletes:
            try:
                shutil.rmtree(cached.folder)
            except OSError as error:
                raise InputError(f"{cached.folder} cannot be deleted: {error.strerror}") from error
        action = "deleted" if deletes else f"used {idle_days:.0f} days ago"
        state = "incomplete" if cached.videos is None else f"{cached.videos:,} videos"
        terminal.out(f"{cached.folder}: {state}, {size / 2**30:.2f} GiB, {action}")
        terminal.out(f"  of {cached.source}")
        kept, deleted = kept + (not deletes), deleted + deletes
    more = f", {deleted:,} deleted" if flags.prune is not None else ""
    terminal.out(f"{counted(kept, 'set')} in {sets.folder_in(root)}{more}")
    return 0
