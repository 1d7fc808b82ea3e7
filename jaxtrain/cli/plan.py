"""Predicts the memory, communication, time, and cost of a config on GPUs, without GPUs."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxtrain import terminal, versions
from jaxtrain.cli import command_line
from jaxtrain.errors import InputError
from jaxtrain.planning import cards, input_measurement, input_rate, plan, report
from jaxtrain.planning.planner import Planner
from jaxtrain.storage import atomic
from jaxtrain.xla import platform
from jaxtrain.xla.subprocess_worker import exit_on_sigterm

DOES_NOT_FIT = 3

_LONGEST_SEARCH_S = 7 * 24 * 3600.0
_SHOWN = 3  # alternatives that fit


def main(arguments: list[str]) -> int:
    """Runs the command; returns 0 if the run fits, 3 if it does not.

    Raises:
        InputError: wrong use.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    flags, typed = command_line.parse(parser, arguments)
    _check_numbers(flags)
    atomic.check_writable("--json", flags.json)
    with exit_on_sigterm():
        return _plan(flags, typed)


def _plan(flags: argparse.Namespace, typed: list[str]) -> int:
    measured = None
    if flags.measure_input is not None:
        terminal.out("measuring how fast this machine loads the data ...")
        measured = input_measurement.measure(flags.config, typed, flags.measure_input or None)
    planned = Planner(
        flags.config,
        typed,
        flags.gpu,
        flags.gpus,
        flags.price_per_gpu_hour,
        host=input_rate.Host(cores=flags.cores, source=flags.source, measured=measured),
        efficiency=flags.efficiency,
    )
    for line in planned.said:
        terminal.out(line)
    if platform.has_cuda_plugin():
        terminal.out("compiling the step (about half a minute) ...")
    else:
        terminal.out(
            "without jax's compiler for GPUs, this is an estimate: whether the run fits, its time, "
            "and its cost stay unknown. To install it (no GPU required), press Ctrl-C and run "
            f"{versions.install('cuda12')}"
        )
        terminal.out("compiling the step for a CPU (up to several minutes) ...")
    found = planned.compiled(())
    terminal.out(f"\n{report.text(found)}")
    _write(found, flags.json)
    fits = report.fits(found)
    if flags.fit or fits is False:
        _search(planned, found, flags)
        _write(found, flags.json)
    if flags.json:
        terminal.out(f"\nwritten to {flags.json}")
    return DOES_NOT_FIT if fits is False else 0


def _search(planner: Planner, found: plan.Plan, flags: argparse.Namespace) -> None:
    """Prints the ranking, and adds it to the plan."""
    what = "alternatives" if flags.fit else f"alternatives until {_SHOWN} fit"
    terminal.out(f"\ncompiling {what}, for at most {flags.fit_seconds:g} s ...")
    tried, complete = planner.search(found, flags.fit_seconds, None if flags.fit else _SHOWN)
    found["fit"] = {
        "tried": [dataclasses.asdict(one) | {"fits": one.fits} for one in tried],
        "complete": complete,
    }
    ways = [one for one in tried if one.fits]
    shown = tried if flags.fit else ways[:_SHOWN]
    if not complete and (flags.fit or len(ways) < _SHOWN):
        terminal.out(
            f"stopped after {flags.fit_seconds:g} s; raise --fit-seconds to try more alternatives"
        )
    if shown:
        title = (
            "by predicted time"
            if flags.fit
            else "the fastest alternatives that fit, of those tried"
        )
        if found["compiled"]["estimate"]:
            title += " (estimate from FLOPs alone)"
        terminal.out(f"{title}, each compiled; the same global batch:\n{report.ranking(shown)}")
    if not ways and any(one.fits is None for one in tried):
        terminal.out(
            "whether one of them fits is unknown without JAX's GPU compiler: "
            f"{versions.install('cuda12')}"
        )
    elif not ways:
        terminal.out(
            "none of them fits: use more GPUs (--gpus 2x8), a GPU with more memory (--gpu), "
            "a smaller global batch, or a smaller model"
        )


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        atomic.write_whole(path, json.dumps(found, indent=1).encode() + b"\n")


def _check_numbers(flags: argparse.Namespace) -> None:
    if not 0 < flags.fit_seconds <= _LONGEST_SEARCH_S:
        raise InputError(
            f"--fit-seconds {flags.fit_seconds:g}: use more than 0, and at most a week"
        )
    if flags.cores is not None and flags.cores < 1:
        raise InputError(f"--cores {flags.cores}: use at least 1")
    price = flags.price_per_gpu_hour
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-gpu-hour {price:g}: use 0 or more")


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain plan --config NAME [flags] [--section.field VALUE ...]"
    parser = command_line.parser("plan", usage, __doc__)
    add = parser.add_argument
    add("--gpu", metavar="GPU", help=f"{', '.join(cards.CARDS)} (default: from the config's name)")
    add(
        "--gpus",
        metavar="2x8",
        help="nodes x GPUs per node (default: the config's mesh in nodes of 8)",
    )
    add(
        "--fit",
        action="store_true",
        help="compile alternatives with the same global batch and rank them",
    )
    add(
        "--fit-seconds",
        metavar="S",
        type=float,
        default=300.0,
        help="time limit of --fit in seconds; an alternative takes about 30 (default: 300)",
    )
    add(
        "--cores",
        metavar="N",
        type=int,
        help="CPU cores (vCPUs) of each node, which load the data (default: "
        f"{input_rate.CORES_PER_GPU} per GPU)",
    )
    add(
        "--source",
        choices=("videos", "clips"),
        help="clips for the output of prepare clips, videos for all others (default: that of "
        "data.path if it is on this machine, else videos)",
    )
    add(
        "--measure-input",
        metavar="DATA",
        nargs="?",
        const="",
        help="measure on this machine how fast a core loads DATA (default: data.path), instead of "
        "using recorded rates",
    )
    add(
        "--efficiency",
        metavar="FILE",
        type=Path,
        help="predict times with the fraction of the peaks that bench --efficiency FILE measured "
        "on the same kind of GPU",
    )
    add(
        "--price-per-gpu-hour", metavar="P", type=float, help="price in any currency; adds the cost"
    )
    command_line.add_ignored(parser)
    return parser
