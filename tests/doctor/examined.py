"""Helpers of the doctor's tests: a tiny run, real faults, and the exit code."""

import contextlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from program import TINY_MLM

from jaxtrain import config
from jaxtrain.cli import command_line
from jaxtrain.cost import cards
from jaxtrain.doctor import examination
from jaxtrain.doctor.finding import Finding
from jaxtrain.doctor.subject import Subject
from jaxtrain.telemetry.hardware import Driver


def tiny(*overrides: str) -> config.Run:
    """Returns the tiny masked language model's config, with changes."""
    return config.load("demo_mlm", [*TINY_MLM[2:], *overrides])


def subject(place: Path, run: config.Run | None = None, **changes: Any) -> Subject:
    """Returns a run of one process on this machine; ``place`` is its output directory."""
    settings: dict[str, Any] = {
        "run": run or tiny("--mesh.fsdp", "8"),
        "card": None,
        "output": place,
        "simulate_devices": None,
        "driver": Driver(),
        "environment": {},
        "scratch": lambda folder: None,
    }
    short = cards.card_of_config(settings["run"].name)
    settings["card"] = None if short is None else cards.card(short)
    return Subject(**settings | changes)


def with_exit_code(findings: Iterable[Finding]) -> tuple[list[Finding], int]:
    """Returns findings, and doctor's exit code for them."""
    found = list(findings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "examine", lambda request: iter(found))
        code = command_line.run("doctor", ["--config", "demo"])
    return found, code


def only_problem(findings: Iterable[Finding]) -> Finding:
    """Returns the only problem; asserts that there is exactly one and that doctor exits with 1."""
    found, code = with_exit_code(findings)
    problems = [one for one in found if one.level == "problem"]
    assert len(problems) == 1, found
    assert code == 1
    return problems[0]


def only_warning(findings: Iterable[Finding]) -> Finding:
    """Returns the only warning; asserts that the rest is fine and that doctor exits with 0."""
    found, code = with_exit_code(findings)
    warnings = [one for one in found if one.level != "ok"]
    assert [one.level for one in warnings] == ["warning"], found
    assert code == 0
    return warnings[0]


def all_ok(findings: Iterable[Finding]) -> str:
    """Returns all observations; asserts that all of them are fine."""
    found, code = with_exit_code(findings)
    assert found
    assert {one.level for one in found} == {"ok"}, found
    assert code == 0
    return "\n".join(one.seen for one in found)


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """Mounts a file system in memory of a size such as "2m" at a new folder.

    If this user may not mount, a process in its own namespaces does, and the folder links to its
    view.
    """
    folder.mkdir()
    wanted = ",".join([f"size={size}", *options])
    mount = ["mount", "-t", "tmpfs", "-o", wanted, "tmpfs", str(folder)]
    if not subprocess.run(mount, capture_output=True, check=False).returncode:
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    hidden = folder.rename(folder.with_name(f"{folder.name} of its own"))
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    command += ['"$@" && echo mounted && exec cat', "sh", *mount[:-1], str(hidden)]
    holder = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"this user cannot mount: {holder.communicate()[1]}")
        folder.symlink_to(f"/proc/{holder.pid}/root{hidden}")
        yield folder
    finally:
        holder.kill()
        holder.communicate()
