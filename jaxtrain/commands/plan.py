"""``jaxtrain plan``: what a config needs on GPUs, found out without them."""

import argparse
import dataclasses
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

from jaxtrain import config, files, overrides, terminal
from jaxtrain.commands import command_line
from jaxtrain.errors import InputError
from jaxtrain.planning import cards, fit, plan, report
from jaxtrain.planning.request import Request, compile_step

DOES_NOT_FIT = 3

_GPUS_PER_NODE = 8
_TIMEOUT_S = 1800.0
_LONGEST_SEARCH_S = 7 * 24 * 3600.0
_WAYS = 3


def main(arguments: list[str]) -> int:
    """Runs the command; 0 if the run fits, 3 if it does not.

    Raises:
        InputError: wrong use.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    flags, typed = command_line.parse(parser, arguments)
    _check_numbers(flags)
    files.check_writable("--json", flags.json)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return _plan(flags, typed)
    finally:
        signal.signal(signal.SIGTERM, before)


def _plan(flags: argparse.Namespace, typed: list[str]) -> int:
    planner = Planner(flags.config, typed, flags.gpu, flags.devices, flags.price_per_gpu_hour)
    for line in planner.said:
        terminal.out(line)
    terminal.out("compiling the step (half a minute) ...")
    found = planner.compiled(())
    terminal.out(f"\n{report.text(found)}")
    _write(found, flags.json)
    fits = report.fits(found)
    if flags.fit or fits is False:
        _search(planner, found, flags)
        _write(found, flags.json)
    if flags.json:
        terminal.out(f"\nwritten to {flags.json}")
    return DOES_NOT_FIT if fits is False else 0


class Planner:
    """Plans a config on some card and devices.

    Args:
        name: of the config.
        typed: overrides.
        gpu: short name of a card; None takes the one in the config's name.
        devices: as "2x8"; None takes the config's mesh, in nodes of eight.
        price: of a GPU for an hour.

    Attributes:
        said: what was assumed.

    Raises:
        InputError: the config, the card or the devices are wrong.
    """

    def __init__(
        self,
        name: str,
        typed: list[str],
        gpu: str | None,
        devices: str | None,
        price: float | None,
    ) -> None:
        self.said: list[str] = []
        self._name, self._typed, self._price = name, tuple(typed), price
        self._added: tuple[str, ...] = ()
        self._per_node = _GPUS_PER_NODE
        if devices is not None:
            nodes, self._per_node = fit.parse_devices(devices)
            elsewhere = overrides.apply(config.named(name), typed)
            self._added = fit.spread(elsewhere, nodes, self._per_node)
            self.said.append(f"--devices {devices}: {' '.join(self._added)}")
        self._run = config.load(name, self._all(()))
        of_run = self._run.mesh.devices
        if of_run > self._per_node and of_run % self._per_node:
            of_a_node = math.gcd(of_run, self._per_node)
            raise InputError(
                f"{of_run} devices (mesh.data {self._run.mesh.data} x mesh.fsdp "
                f"{self._run.mesh.fsdp}) are no whole nodes of {self._per_node} GPUs: say what the "
                f"nodes are, as --devices {of_run // of_a_node}x{of_a_node}"
            )
        short = gpu or cards.card_of_config(self._run.name)
        if short is None:
            short = cards.usual_card(self._run.name)
            self.said.append(f"{name} names no card: planned for {short} (--gpu)")
        self._short, self._card = short, cards.card(short)

    def compiled(self, changes: fit.Overrides, timeout_s: float = _TIMEOUT_S) -> plan.Plan:
        """Compiles the config with some changes, and draws the conclusions.

        Raises:
            InputError: the step could not be compiled.
        """
        settings = self._all(changes)
        request = Request(
            config=self._name, overrides=settings, gpu=self._short, gpus_per_node=self._per_node
        )
        findings = compile_step(request, timeout_s)
        if "failure" in findings:
            raise InputError(f"{self._name} could not be compiled: {findings['failure']}")
        return plan.make(
            findings,
            self._card,
            config.load(self._name, settings),
            overrides=settings,
            gpus_per_node=self._per_node,
            price=self._price,
        )

    def search(
        self, first: plan.Plan, budget_s: float, enough: int | None
    ) -> tuple[list[fit.Tried], bool]:
        """Other ways to run the same, with ``first`` as the config is; see :func:`fit.search`."""

        def attempt(changes: fit.Overrides, timeout_s: float) -> fit.Tried | None:
            pasted = overrides.merged(self._added, changes)
            label = " ".join(pasted) or "(as it is)"
            try:
                found = first if not changes else self.compiled(changes, timeout_s)
            except InputError as error:
                terminal.out(f"  {label}: {error}")
                return None
            terminal.out(f"  {label}: {report.verdict(found)}")
            memory, time = found["memory"], found["time"]
            best = found["arithmetic_s"] if time is None else time["best"]
            return fit.Tried(pasted, needed=memory["needed"], spare=memory["spare"], best=best)

        return fit.search(self._run, attempt, budget_s, enough)

    def _all(self, changes: fit.Overrides) -> tuple[str, ...]:
        return overrides.merged(self._typed, self._added, changes)


def _search(planner: Planner, found: plan.Plan, flags: argparse.Namespace) -> None:
    """Prints the ranking, and adds it to the plan."""
    what = "other ways" if flags.fit else f"until {_WAYS} other ways fit"
    terminal.out(f"\ncompiling {what}, for at most {flags.fit_seconds:g} s ...")
    tried, whole = planner.search(found, flags.fit_seconds, None if flags.fit else _WAYS)
    found["fit"] = {
        "tried": [dataclasses.asdict(one) | {"fits": one.fits} for one in tried],
        "complete": whole,
    }
    ways = [one for one in tried if one.fits]
    shown = tried if flags.fit else ways[:_WAYS]
    if not whole and (flags.fit or len(ways) < _WAYS):
        terminal.out(f"stopped after {flags.fit_seconds:g} s with ways untried (--fit-seconds)")
    if shown:
        title = "by predicted time" if flags.fit else "the cheapest ways to make it fit"
        if found["compiled"]["estimate"]:
            title += ", of arithmetic alone (estimate)"
        terminal.out(f"{title}, each compiled; the same global batch:\n{report.ranking(shown)}")
    if not ways:
        extra = "install '.[cuda12]' to know; or " if found["compiled"]["estimate"] else ""
        terminal.out(
            f"none of them fits: {extra}more devices (--devices 2x8), a card with more memory "
            "(--gpu), a smaller global batch or a smaller model"
        )


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        files.write_whole(path, json.dumps(found, indent=1).encode() + b"\n")


def _leave(number: int, _: Any) -> None:
    """Leaves through the finally clauses, which end the compiling process."""
    sys.exit(128 + number)


def _check_numbers(flags: argparse.Namespace) -> None:
    if not 0 < flags.fit_seconds <= _LONGEST_SEARCH_S:
        raise InputError(f"--fit-seconds {flags.fit_seconds:g}: set it between 0 and a week's")
    price = flags.price_per_gpu_hour
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-gpu-hour {price:g}: set a price of zero or more")


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain plan --config NAME [flags] [--section.field value ...]"
    parser = command_line.parser("plan", usage, __doc__)
    add = parser.add_argument
    add("--gpu", metavar="CARD", help=f"{', '.join(cards.CARDS)}; else the config's name says")
    add("--devices", metavar="2x8", help="nodes x GPUs; else the config's mesh, in nodes of eight")
    add("--fit", action="store_true", help="compile other ways to run the same, and rank them")
    add(
        "--fit-seconds",
        metavar="S",
        type=float,
        default=300.0,
        help="for all of them (300); each takes about 30",
    )
    add("--price-per-gpu-hour", metavar="P", type=float, help="in any currency")
    return parser
