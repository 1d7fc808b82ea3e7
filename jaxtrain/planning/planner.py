"""Plans of one config: as typed, on other devices, and with changes that need less memory."""

import math
from collections.abc import Callable

from jaxtrain import config, terminal
from jaxtrain.config import overrides
from jaxtrain.errors import InputError
from jaxtrain.planning import cards, fit, plan, report
from jaxtrain.planning.request import PlanRequest, compile_step

_GPUS_PER_NODE = 8
_TIMEOUT_S = 1800.0


class Planner:
    """Plans a config on some card and devices.

    Args:
        name: of the config.
        typed: overrides.
        gpu: short name of a card; None takes the one in the config's name.
        devices: as "2x8"; None takes the config's mesh, in nodes of eight.
        price: of a GPU for an hour.
        say: takes a line for each candidate.

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
        say: Callable[[str], None] = terminal.out,
    ) -> None:
        self._say = say
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
        request = PlanRequest(
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
                self._say(f"  {label}: {error}")
                return None
            self._say(f"  {label}: {report.verdict(found)}")
            memory, time = found["memory"], found["time"]
            best = found["arithmetic_s"] if time is None else time["best"]
            return fit.Tried(
                pasted,
                needed=memory["needed"],
                spare=memory["spare"],
                best=best,
                exact=report.fits(found) is not None,
            )

        return fit.search(self._run, attempt, budget_s, enough)

    def _all(self, changes: fit.Overrides) -> tuple[str, ...]:
        return overrides.merged(self._typed, self._added, changes)
