"""``jaxtrain plan``: what a config needs on GPUs, found out without them."""

import argparse
import json
from pathlib import Path

from jaxtrain import config, config_files, files
from jaxtrain.errors import InputError
from jaxtrain.planning import cards, fit, plan, report
from jaxtrain.planning.request import Request, compile_step

_GPUS_PER_NODE = 8
_DEFAULT_CARD = "h100"
_TIMEOUT_S = 600.0
_WAYS = 3


def main(arguments: list[str]) -> int:
    """Runs the command; 0 if the run fits, 1 if it does not.

    Raises:
        InputError: wrong use.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    try:
        flags, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see jaxtrain plan --help") from None
    if not flags.config:
        names = ", ".join(config_files.names())
        raise InputError(f"--config is missing; the configs are: {names}")
    files.check_parent("--json", flags.json)
    planner = Planner(flags.config, overrides, flags.gpu, flags.devices, flags.price_per_gpu_hour)
    for line in planner.said:
        print(line, flush=True)
    found = planner.compiled(())
    print(f"\n{report.text(found)}", flush=True)
    fits = found["memory"]["spare"] >= 0
    if flags.fit or not (fits or found["compiled"]["estimate"]):
        print(f"\ncompiling other ways, for at most {flags.fit_seconds:g} s ...", flush=True)
        tried = planner.search(found, flags.fit_seconds)
        found["fit"] = [fit.key(one) for one in tried]
        ways = [one for one in tried if one.fits]
        shown = tried if flags.fit else ways[:_WAYS]
        if shown:
            title = "by predicted time" if flags.fit else "the cheapest ways to make it fit"
            print(f"{title}, each compiled:\n{report.ranking(shown)}")
        if not ways:
            print(
                "no way was found in that time: more devices (--devices), another card (--gpu), "
                "a smaller model, or a longer search (--fit-seconds)"
            )
        elif planner.added:
            print(f"  together with {' '.join(planner.added)}")
    if flags.json:
        files.write_whole(flags.json, json.dumps(found, indent=1).encode() + b"\n")
        print(f"\nwritten to {flags.json}")
    return 0 if fits else 1


class Planner:
    """Plans a config on some card and devices.

    Args:
        name: of the config.
        overrides: as typed.
        gpu: short name of a card; None takes the one in the config's name.
        devices: as "2x8"; None takes the config's mesh, in nodes of eight.
        price: of a GPU for an hour.

    Attributes:
        added: overrides that put the run on those devices.
        said: what was assumed.

    Raises:
        InputError: the config, the card or the devices are wrong.
    """

    def __init__(
        self,
        name: str,
        overrides: list[str],
        gpu: str | None,
        devices: str | None,
        price: float | None,
    ) -> None:
        self.said: list[str] = []
        self.added: tuple[str, ...] = ()
        self._name, self._overrides, self._price = name, tuple(overrides), price
        self._run = config.load(name, overrides)
        self._per_node = _GPUS_PER_NODE
        if devices is not None:
            nodes, self._per_node = fit.parse_devices(devices)
            self.added = fit.spread(self._run, nodes, self._per_node)
            self._run = config.load(name, [*overrides, *self.added])
            self.said.append(f"--devices {devices}: {' '.join(self.added)}")
        of_run = self._run.mesh.devices
        if of_run > self._per_node and of_run % self._per_node:
            raise InputError(
                f"{of_run} devices (mesh.data {self._run.mesh.data} x mesh.fsdp "
                f"{self._run.mesh.fsdp}) are no whole nodes of {self._per_node} GPUs: say what the "
                f"nodes are, as --devices {of_run // 2}x2"
            )
        short = gpu or cards.card_of_config(self._run.name)
        if short is None:
            short = _DEFAULT_CARD
            self.said.append(f"{name} names no card: planned for {short} (--gpu)")
        self._short, self._card = short, cards.card(short)

    def compiled(self, changes: fit.Overrides, timeout_s: float = _TIMEOUT_S) -> plan.Plan:
        """Compiles, and draws the conclusions.

        Raises:
            InputError: the step could not be compiled.
        """
        overrides = (*self._overrides, *self.added, *changes)
        request = Request(
            config=self._name, overrides=overrides, gpu=self._short, gpus_per_node=self._per_node
        )
        findings = compile_step(request, timeout_s)
        if "failure" in findings:
            raise InputError(f"{self._name} could not be compiled: {findings['failure']}")
        run = config.load(self._name, overrides)
        return plan.make(
            findings,
            self._card,
            name=run.name,
            devices=run.mesh.devices,
            gpus_per_node=self._per_node,
            precision=run.precision,
            price=self._price,
        )

    def search(self, first: plan.Plan, budget_s: float) -> list[fit.Tried]:
        """Other ways to run the same, with ``first`` as the config is; see :func:`fit.search`."""

        def attempt(changes: fit.Overrides, timeout_s: float) -> fit.Tried | None:
            try:
                found = first if not changes else self.compiled(changes, timeout_s)
            except InputError as error:
                print(f"  {' '.join(changes)}: {error}", flush=True)
                return None
            one = fit.Tried(
                changes,
                needed=found["memory"]["needed"],
                spare=found["memory"]["spare"],
                best=found["time"]["best"],
            )
            print(f"  {' '.join(changes) or '(as it is)'}: {report.verdict(found)}", flush=True)
            return one

        return fit.search(self._run, attempt, budget_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtrain plan",
        usage="jaxtrain plan --config NAME [flags] [--section.field value ...]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME", help="a shipped config, or a path to a .py file")
    add("--gpu", metavar="CARD", help=f"{', '.join(cards.CARDS)}; else the config's name says")
    add("--devices", metavar="2x8", help="nodes x GPUs; else the config's mesh, in nodes of eight")
    add("--fit", action="store_true", help="compile other ways to run the same, and rank them")
    add("--fit-seconds", metavar="S", type=float, default=300.0, help="for all of them (300)")
    add("--price-per-gpu-hour", metavar="P", type=float, help="in any currency")
    add("--json", metavar="FILE", type=Path, help="write the whole plan there too")
    return parser
