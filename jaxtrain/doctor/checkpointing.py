"""A real checkpoint at the output directory: written, verified, read back, compared, timed."""

import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import layout, manifest, saver
from jaxtrain.checkpoint.restore import named, restore
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S, shared_storage
from jaxtrain.doctor.subject import Subject, size
from jaxtrain.doctor.system import PREFIX, free_bytes
from jaxtrain.errors import InputError
from jaxtrain.training import save_policy
from jaxtrain.training.state import State

LARGEST = 256 * 2**20  # bytes of the trial, so that it ends in seconds


def checks(subject: Subject) -> dict[str, Check]:
    """The group "checkpoint"."""
    return {
        "shared storage": lambda: shared_storage(subject),
        "checkpoint": lambda: written_and_read(subject),
    }


def written_and_read(subject: Subject, largest: int = LARGEST) -> Iterator[Finding]:
    """Saves the config's state, or as many of its arrays as fit, and reads it back.

    Args:
        subject: the config.
        largest: bytes to write at most.
    """
    if subject.shared is False:
        yield warning(
            "no checkpoint was tried: the processes are not seen to share the output directory's "
            "storage",
            "mend that first",
        )
        return
    folder = _agreed_folder(subject)
    subject.scratch(folder)  # before it is there: this process may be ended at any time
    try:
        _make(folder)
        try:
            yield from _tried(subject, folder, largest)
        except saver.SaveFailed as error:
            yield problem(
                f"a checkpoint could not be written at {subject.base}: {error.why}",
                "free space there (quotas count too), or give another --output-dir",
            )
        subject.store.barrier("checkpoint read", ANSWER_S)
    finally:
        if subject.store.index == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _agreed_folder(subject: Subject) -> Path:
    """The same new name in all processes, beside what it is to stand for."""
    own = subject.base / f"{PREFIX}{secrets.token_hex(6)}"
    return Path(subject.store.gather("checkpoint folder", str(own), ANSWER_S)[0])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no checkpoint can be written at {folder.parent} ({error.strerror}): give another "
            "--output-dir"
        ) from error


def _tried(subject: Subject, folder: Path, largest: int) -> Iterator[Finding]:
    own = min(largest, free_bytes(folder) // 3)  # two are there at a time
    most = min(map(int, subject.store.gather("checkpoint size", str(own), ANSWER_S)))
    target, part = _part(subject.built.target, most)
    state = _random(target)
    meta = save_policy.describe(subject.run, "doctor").to_dict()
    checkpoints = saver.Checkpoints(folder / layout.CHECKPOINTS, 1, lambda line: None)
    with contextlib.closing(checkpoints):
        for step in range(2):  # the second one counts: the first also starts Orbax
            state = dataclasses.replace(state, step=jnp.full_like(state.step, step))
            began = time.perf_counter()
            checkpoints.save(state, meta | {"step": step})
            checkpoints.wait()
            write_s = time.perf_counter() - began
    subject.store.barrier("checkpoint written", ANSWER_S)
    newest = layout.latest_in(folder / layout.CHECKPOINTS)
    if newest is None or newest.name != "1":
        yield problem(f"a checkpoint written at {subject.base} is not there", _DO_NOT_TRUST)
        return
    _forget(newest)
    wrong = manifest.verify(newest)
    if wrong:
        yield problem(f"a checkpoint written at {subject.base} fails: {wrong}", _DO_NOT_TRUST)
        return
    began = time.perf_counter()
    restored = restore(newest, target)
    jax.block_until_ready(restored)
    read_s = time.perf_counter() - began
    different = _different(state, restored)
    if different:
        yield problem(
            f"a checkpoint read back from {subject.base} is not what was written: "
            f"{', '.join(different[:3])}",
            _DO_NOT_TRUST,
        )
        return
    yield ok(_said(subject, part, most, write_s, read_s))


_DO_NOT_TRUST = (
    "do not save there: check the disk and its mount (dmesg, smartctl), or give another "
    "--output-dir"
)


def _said(subject: Subject, part: int, most: int, write_s: float, read_s: float) -> str:
    whole, rate = subject.state_bytes, part / write_s
    seen = (
        f"{size(part)} written in {write_s:.2f} s ({_speed(rate)}), verified, read back in "
        f"{read_s:.2f} s ({_speed(part / read_s)}), and equal"
    )
    if part == whole:
        return f"{seen}: the config's whole state"
    return (
        f"{seen}; a part of the state, as {size(most)} are enough for a trial: all of its "
        f"{size(whole)} would take {whole / rate:.0f} s (predicted)"
    )


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _part(target: State, most: int) -> tuple[State, int]:
    """The state, or as many of its parameters as make no more than ``most`` bytes; and its size."""
    whole = _size(target)
    if whole <= most:
        return target, whole
    chosen, total = {}, 0
    for name, leaf in sorted(target.params.items(), key=lambda item: -_size(item[1])):
        if total + _size(leaf) <= most:
            chosen[name] = leaf
            total += _size(leaf)
    part = dataclasses.replace(target, params=chosen, extras={}, opt=())
    return part, _size(part)


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _random(target: State) -> State:
    """Arrays that no compression makes small, as a fresh optimizer's zeros would be."""
    rng = np.random.default_rng(0)  # the same in all processes

    def array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        kind = np.dtype(leaf.dtype)
        count = max(1, math.prod(leaf.shape))
        whole = (
            rng.random(count, np.float32).astype(kind)
            if jnp.issubdtype(kind, jnp.floating)
            else rng.integers(0, 2, count).astype(kind)
        )
        whole = whole.reshape(leaf.shape)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.asarray(whole[index])
        )

    return cast(State, jax.tree.map(array, target))


def _forget(folder: Path) -> None:
    """Has the kernel drop what it keeps of these files, so that reading them asks the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _different(written: State, restored: State) -> list[str]:
    """Names of arrays whose bytes on this process's devices are not the same."""
    here, there = named(written), named(restored)
    return [
        name
        for name, array in here.items()
        if any(
            not np.array_equal(np.asarray(one.data), np.asarray(other.data))
            for one, other in zip(
                array.addressable_shards, there[name].addressable_shards, strict=True
            )
        )
    ]
