"""``jaxtrain find-nan RUN``: finds where the NaN/Inf began that ended a run; changes nothing."""

import os
from pathlib import Path
from typing import Any

from jaxtrain import terminal
from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.cli import commands
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, bucket, cache, run_marker


def main(flags: commands.FindNan) -> int:
    """Runs the command."""
    path = _bad_step_of(flags.run)
    # They import jax, which takes seconds.
    import jax

    from jaxtrain.distributed import process_group
    from jaxtrain.training.diagnosis import bad_step
    from jaxtrain.xla import gpu_memory, options

    gpu_memory.reserve_memory(os.environ)
    process_group.connect({}, flags.simulate_devices)
    process_group.check_accelerator(os.environ)
    options.use_cache(os.environ, cache.root(None) / "compiled")
    opened = bad_step.Opened.at(path)
    meta, mesh = opened.meta, opened.setup.rule.mesh
    devices = "device" if mesh.size == 1 else "devices"
    terminal.say(meta["bad_step"])
    terminal.say(
        f"computing step {meta['step'] + 1} with checks on {mesh.size} {devices} "
        f"({jax.devices()[0].device_kind}); this takes a few times as long to compile as the step"
    )
    origin, ids = opened.examine()
    first = meta["examples_seen"]
    examples = [
        {"row": row, "position": first + row, "id": number}
        for row, number in zip(origin.rows, ids, strict=True)
    ]
    terminal.out(origin.text)
    if examples:
        terminal.out(_described(examples))
    if flags.json:
        content = {
            "run": str(flags.run),
            "step": meta["step"] + 1,
            "bad_step": meta["bad_step"],
            "origin": origin.text,
            "examples": examples,
        }
        atomic.write_json(flags.json, content)
    return 0


def _described(examples: list[dict[str, Any]]) -> str:
    lines = [
        f"example {example['row']} of the batch, number {example['position']} in the order of "
        f"the run, index {example['id']} in the data"
        for example in examples
    ]
    return "\n".join(["computed from these examples alone, each without the others:", *lines])


def _bad_step_of(run: Path) -> Path:
    """Returns the pointer of the bad step that a run has saved last; fetches it from a bucket.

    Raises:
        InputError: no such run, or it has saved none.
    """
    if bucket.is_bucket(str(run)):
        url = bucket.normalized(str(run), "RUN")
        with remote.reading(url, cache.root(None), terminal.say) as (stored, local):
            name = _newest(stored.store, url)
            if damage := stored.fetch(name, local):
                raise InputError(f"find-nan {url}: the saved step is damaged: {damage}")
            stored.forget(local)
        return local / name
    directory = atomic.expanded(run).absolute()
    if not directory.is_dir():
        raise InputError(f"find-nan {run}: no such folder; pass a run directory")
    if not (directory / run_marker.NAME).is_file():
        raise InputError(f"find-nan {run}: this folder is not a run; pass a run directory")
    return directory / _newest(CheckpointStore(Folder(directory)), str(run))


def _newest(store: CheckpointStore, location: str) -> str:
    saved: dict[str, str] = {}
    for aside in store.asides():
        if store.why_aside(aside).startswith(pointer.BAD_STEP):
            name = f"{pointer.ASIDE}/{aside}.json"
            try:
                saved[name] = store.read(name)[0].saved
            except pointer.Damaged as why:
                raise InputError(f"find-nan {location}: {name} cannot be used: {why}") from None
    if not saved:
        raise InputError(
            f"find-nan {location}: this run has saved no bad step; a run saves one when bad steps "
            "with NaN/Inf end it: with --optim.bad_updates off, the first one does"
        )
    return max(saved, key=lambda name: (saved[name], name))
