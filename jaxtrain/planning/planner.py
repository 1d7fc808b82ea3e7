"""Plans a config as typed, on other devices, and with changes that need less memory.

The step is compiled in a separate process, whose jax compiles for GPUs that are not present.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import config, terminal, versions
from jaxtrain.config import overrides
from jaxtrain.errors import InputError
from jaxtrain.planning import buffers, cards, fit, input_rate, plan, report
from jaxtrain.planning import efficiency as measured_efficiency
from jaxtrain.xla import platform, subprocess_worker
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed

_GPUS_PER_NODE = 8
_TIMEOUT_S = 1800.0

_UNKNOWN_HOST = input_rate.Host()
CPU = "cpu"
"""In a request, in place of a card: compile for virtual CPU devices of this machine."""

_FUNCTION = "jaxtrain.planning.compilation:run"


class NotCompiled(InputError):
    """The compiler failed, or took too long.

    Args:
        name: of the config.
        findings: from :func:`compile_step`, with ``failure``.
    """

    def __init__(self, name: str, findings: Mapping[str, Any]) -> None:
        self.timed_out = bool(findings.get("timed_out"))
        fix = ": plan on a faster or less busy machine" if self.timed_out else ""
        super().__init__(f"{name} could not be compiled: {findings['failure']}{fix}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request to compile a config's step.

    Attributes:
        config: a name or a path.
        overrides: as typed.
        gpu: short name of the card.
        gpus_per_node: GPUs in each node; a single node may have fewer.
    """

    config: str
    overrides: tuple[str, ...]
    gpu: str
    gpus_per_node: int


class Planner:
    """Plans a config for a card and a number of devices.

    Args:
        name: the config's name or path.
        typed: overrides.
        gpu: short name of a card; None uses the one in the config's name.
        devices: such as "2x8"; None uses the config's mesh, in nodes of eight.
        price: per GPU-hour.
        say: receives a line for each candidate.
        host: what is known about the hosts that load the data.
        efficiency: a file that ``bench --efficiency`` wrote on the card; None assumes a range.

    Attributes:
        said: assumptions, to be printed.

    Raises:
        InputError: the config, the card, the devices or the efficiency file is invalid.
    """

    def __init__(
        self,
        name: str,
        typed: list[str],
        gpu: str | None,
        devices: str | None,
        price: float | None,
        say: Callable[[str], None] = terminal.out,
        host: input_rate.Host = _UNKNOWN_HOST,
        efficiency: Path | None = None,
    ) -> None:
        self._say, self._host = say, host
        self.said: list[str] = []
        self._name, self._typed, self._price = name, tuple(typed), price
        self._added: tuple[str, ...] = ()
        self._per_node = _GPUS_PER_NODE
        run = overrides.apply(config.named(name), typed)
        if devices is None and run.mesh.auto:  # its batch may not fit the config's own devices
            nodes = -(-run.mesh.devices // _GPUS_PER_NODE)
            devices = f"{nodes}x{run.mesh.devices // nodes}"
        if devices is not None:
            nodes, self._per_node = fit.parse_devices(devices)
            self._added = fit.spread(run, nodes, self._per_node)
            self.said.append(f"--gpus {devices}: {' '.join(self._added)}")
        if host.source == "clips" and getattr(run.data, "convert_on", "") is None:
            # A run sees this in the folder that `prepare clips` wrote.
            self._added = overrides.merged(self._added, ("--data.convert_on", "device"))
        self._run = config.load(name, self._all(()))
        of_run = self._run.mesh.devices
        if of_run > self._per_node and of_run % self._per_node:
            of_a_node = math.gcd(of_run, self._per_node)
            raise InputError(
                f"{of_run} devices (mesh.data {self._run.mesh.data} x mesh.fsdp "
                f"{self._run.mesh.fsdp}) do not fill nodes of {self._per_node} GPUs: set them, "
                f"for example --gpus {of_run // of_a_node}x{of_a_node}"
            )
        short = gpu or cards.card_of_config(self._run.name)
        if short is None:
            short = cards.usual_card(self._run.name)
            self.said.append(
                f"config {name} names no GPU: planning for {short} (choose another with --gpu)"
            )
        self._short, self._card = short, cards.card(short)
        self._efficiency = None if efficiency is None else self._measured(efficiency)

    def _measured(self, path: Path) -> float:
        measured, now = measured_efficiency.load(path), versions.versions()["jax"]
        if measured.device != self._card.name:
            raise InputError(
                f"{path} was measured on {measured.device}, but the plan is for "
                f"{self._card.name} (--gpu {self._short}): use a file measured on that GPU"
            )
        if measured.jax != now:
            self.said.append(
                f"{path} was measured with jax {measured.jax}; this is jax {now}, whose programs "
                "may differ"
            )
        return measured.efficiency

    @property
    def settings(self) -> tuple[str, ...]:
        """All overrides of the config that is planned."""
        return self._all(())

    def compiled(self, changes: fit.Overrides, timeout_s: float = _TIMEOUT_S) -> plan.Plan:
        """Compiles the config with changes and returns its plan.

        Args:
            changes: overrides.
            timeout_s: time limit.

        Raises:
            InputError: the step could not be compiled.
        """
        settings = self._all(changes)
        request = PlanRequest(
            config=self._name,
            overrides=settings,
            gpu=self._short,
            gpus_per_node=self._per_node,
        )
        findings = compile_step(request, timeout_s)
        if "failure" in findings:
            raise NotCompiled(self._name, findings)
        return plan.make_plan(
            findings,
            self._card,
            config.load(self._name, settings),
            overrides=settings,
            gpus_per_node=self._per_node,
            price=self._price,
            host=self._host,
            efficiency=self._efficiency,
        )

    def search(
        self, first: plan.Plan, budget_s: float, enough: int | None
    ) -> tuple[list[fit.Tried], bool]:
        """Searches for variants (:func:`fit.search`); ``first`` is the plan without changes."""

        def attempt(changes: fit.Overrides, timeout_s: float) -> fit.Tried | None:
            pasted = overrides.merged(self._added, changes)
            label = " ".join(pasted) or "(unchanged)"
            try:
                found = first if not changes else self.compiled(changes, timeout_s)
            except NotCompiled as error:
                why = "skipped: no time was left to compile it" if error.timed_out else error
                self._say(f"  {label}: {why}")
                return None
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


def compile_step(request: PlanRequest, timeout_s: float) -> dict[str, Any]:
    """Compiles the step in a worker; returns ``{"failure": ...}`` if that fails.

    ``timed_out`` is true beside ``failure`` if only the time was too short. The other findings are
    described in :func:`jaxtrain.planning.compilation.compile_step`.

    Raises:
        InputError: the config cannot be built.
    """
    with tempfile.TemporaryDirectory() as dump:
        estimate = request.gpu == CPU or not platform.has_cuda_plugin()
        asked = dataclasses.asdict(request) | {"dump": dump, "estimate": estimate}
        variables = environment(os.environ, Path(dump))
        try:
            with SubprocessWorker(_FUNCTION, asked, variables, grace_s=0.0) as worker:
                (findings,) = worker.messages(timeout_s)
        except TimeoutError:
            return {"failure": f"timed out after {timeout_s:.0f} s", "timed_out": True}
        except WorkerFailed as failed:
            lines = "".join(f"\n{line}" for line in failed.last_lines)
            return {"failure": failed.error or f"the compiler {failed.how}{lines}"}
        return findings


def environment(outside: Mapping[str, str], dump: Path) -> dict[str, str]:
    """Returns the worker's environment, which hides GPUs and requires none."""
    return subprocess_worker.environment(
        outside,
        without=("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"),
        CUDA_VISIBLE_DEVICES="-1",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",  # the plugin would look for a driver
        XLA_FLAGS=f"{outside.get('XLA_FLAGS', '')} {buffers.flags(dump)}".strip(),
    )
