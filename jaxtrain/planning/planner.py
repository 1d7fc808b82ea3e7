"""Plans a config as typed, on other devices, and with changes that need less memory.

The step is compiled in a separate process, whose jax compiles for GPUs that are not present.
"""

import dataclasses
import html
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import config, terminal, versions
from jaxtrain.config import Mesh, field_values, invocation, overrides
from jaxtrain.config.mesh_fit import fit_mesh
from jaxtrain.cost import cards, efficiency, step_time
from jaxtrain.data import input_rate
from jaxtrain.data.contract import DataConfig, Estimate
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs import subprocess_worker
from jaxtrain.jobs.subprocess_worker import SubprocessWorker, WorkerFailed
from jaxtrain.planning import compilation, fit, prediction, shipped
from jaxtrain.storage import addresses
from jaxtrain.xla import platform

_GPUS_PER_NODE = 8
_TIMEOUT_S = 1800.0
_UNKNOWN_HOST = input_rate.Host()
_FUNCTION = "jaxtrain.planning.compilation:run"


class NotCompiled(InputError):
    """The compiler failed."""


class TimedOut(NotCompiled):
    """The compiler took too long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A prediction; ``str()`` returns the text that ``plan`` prints.

    Attributes:
        batch_size: global.
        accumulate: microbatches per step.
        arithmetic_s: seconds of a step's matmuls and convolutions at the card's matmul peak.
        bound: what bounds a step, input included.
    """

    config: str
    overrides: tuple[str, ...]
    precision: str
    batch_size: int
    accumulate: int
    mesh: Mesh
    card: cards.Card
    gpus_per_node: int
    nodes: int
    step: compilation.CompiledStep
    memory: prediction.Memory
    arithmetic_s: float
    time: step_time.StepTime
    bound: str
    input: input_rate.Input
    run: prediction.RunTime
    preparation: tuple[Estimate, ...]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.memory.spare >= 0

    def as_json(self) -> dict[str, Any]:
        """The content of ``plan --json``."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def __str__(self) -> str:
        """The page that ``jaxtrain plan`` prints, with arguments instead of flags."""
        from jaxtrain.planning import report

        blocks = ["\n".join(self.assumptions), report.text(self)]
        return invocation.with_arguments("\n\n".join(filter(None, blocks)))

    def _repr_html_(self) -> str:
        return f'<pre style="font-family: monospace">{html.escape(str(self))}</pre>'


def make_plan(
    step: compilation.CompiledStep,
    card: cards.Card,
    run: config.Run,
    *,
    gpus_per_node: int,
    price: float | None = None,
    host: input_rate.Host = _UNKNOWN_HOST,
    efficiency: float | None = None,
    overrides: Sequence[str] = (),
    preparation: Sequence[Estimate] = (),
    assumptions: Sequence[str] = (),
) -> Plan:
    """Predicts a run from its compiled step.

    Args:
        efficiency: measured on the card; None assumes a range.
    """
    devices = run.mesh.devices
    nodes = -(-devices // gpus_per_node)
    time = step_time.step_time(step.cost, card, run.precision, efficiency)
    loading = input_rate.predict(
        run, min(devices, gpus_per_node), nodes, host, (time.best, time.worst)
    )
    bounds = {"yes": "input", "maybe": f"{time.bound} or input"}
    bound = bounds.get(loading.waits, time.bound)
    return Plan(
        config=run.name,
        overrides=tuple(addresses.scrubbed(list(overrides))),
        precision=run.precision,
        batch_size=run.data.batch_size,
        accumulate=run.optim.accumulate,
        mesh=run.mesh,
        card=card,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        step=step,
        memory=prediction.memory(step, card, gpus_per_node),
        arithmetic_s=step_time.arithmetic(step.cost, card, run.precision),
        time=time,
        bound=bound,
        input=loading,
        run=prediction.run_time(
            run,
            step,
            time,
            loading,
            nodes=nodes,
            price=price,
            preparation_s=prediction.preparation_s(preparation, nodes * loading.cores),
        ),
        preparation=tuple(preparation),
        assumptions=tuple(assumptions),
    )


class Planner:
    """Plans a config for a card and a number of devices.

    Args:
        gpu: short name of a card; None uses the one in the config's name.
        devices: such as "2x8"; None uses the config's mesh, in nodes of eight.
        efficiency: a file that ``bench --efficiency`` wrote on the card; None assumes a range.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        gpu: str | None = None,
        devices: str | None = None,
        price: float | None = None,
        host: input_rate.Host = _UNKNOWN_HOST,
        efficiency: Path | None = None,
    ) -> None:
        self._host = host
        self.messages: list[str] = []
        self._name, self._arguments, self._price = name, tuple(arguments), price
        self._added: tuple[str, ...] = ()
        self._per_node = _GPUS_PER_NODE
        run = overrides.apply(config.named(name), [*arguments])
        if devices is None and run.mesh.auto:  # its batch may not fit the config's own devices
            nodes = -(-run.mesh.devices // _GPUS_PER_NODE)
            devices = f"{nodes}x{run.mesh.devices // nodes}"
        if devices is not None:
            nodes, self._per_node = parse_devices(devices)
            self._added = spread(run, nodes, self._per_node)
            self.messages.append(f"--gpus {devices}: {' '.join(self._added)}")
        self._run = config.load(name, self.settings)
        wanted = self._run.mesh.devices
        if wanted > self._per_node and wanted % self._per_node:
            of_a_node = math.gcd(wanted, self._per_node)
            raise InputError(
                f"{wanted} devices (mesh.data {self._run.mesh.data} x mesh.fsdp "
                f"{self._run.mesh.fsdp}) do not fill nodes of {self._per_node} GPUs: set them, "
                f"for example --gpus {wanted // of_a_node}x{of_a_node}"
            )
        short = gpu or cards.card_of_config(self._run.name)
        if short is None:
            short = cards.usual_card(self._run.name)
            self.messages.append(
                f"config {name} names no GPU: planning for {short} (choose another with --gpu)"
            )
        self._short, self._card = short, cards.card(short)
        self._efficiency = None if efficiency is None else self._measured(efficiency)
        self._preparation = self._missing()

    def _measured(self, path: Path) -> float:
        measured, now = efficiency.load(path), versions.versions()["jax"]
        if measured.device != self._card.name:
            raise InputError(
                f"{path} was measured on {measured.device}, but the plan is for "
                f"{self._card.name} (--gpu {self._short}): use a file measured on that GPU"
            )
        if measured.jax != now:
            self.messages.append(
                f"{path} was measured with jax {measured.jax}; this is jax {now}, whose programs "
                "may differ"
            )
        return measured.of_serial_bound

    @property
    def settings(self) -> tuple[str, ...]:
        """All overrides of the config that is planned."""
        return overrides.merged(self._arguments, self._added)

    def plan(self, changes: fit.Overrides = (), timeout_s: float = _TIMEOUT_S) -> Plan:
        """Compiles the config with changes and returns its plan."""
        self.check_compiler()
        settings = overrides.merged(self.settings, changes)
        return make_plan(
            compile_step(self._name, settings, self._short, self._per_node, timeout_s),
            self._card,
            config.load(self._name, settings),
            gpus_per_node=self._per_node,
            price=self._price,
            host=self._host,
            efficiency=self._efficiency,
            overrides=settings,
            preparation=self._preparation,
            assumptions=self.messages,
        )

    def check_compiler(self) -> None:
        """Checks that JAX's compiler for GPUs is installed."""
        if not platform.has_cuda_plugin():
            raise InputError(
                shipped.without_compiler(self._name, self._short, self.settings, self._price)
            )

    def _missing(self) -> tuple[Estimate, ...]:
        """Returns what the run makes of its data, as far as this machine sees them."""
        data: DataConfig = self._run.data
        try:
            missing = data.to_prepare(self._run.model, lambda line: None)
            return tuple(preparation.estimate for preparation in missing)
        except (InputError, RunAgain) as error:
            self.messages.append(f"preparing the data is not counted: {error}")
            return ()

    def search(
        self,
        first: Plan,
        budget_s: float,
        enough: int | None,
        say: Callable[[str], None] = terminal.out,
    ) -> tuple[list[fit.Tried], bool]:
        """Searches for variants (:func:`fit.search`)."""
        from jaxtrain.planning import report

        def attempt(changes: fit.Overrides, timeout_s: float) -> fit.Tried | None:
            pasted = overrides.merged(self._added, changes)
            label = " ".join(pasted) or "(unchanged)"
            try:
                plan = self.plan(changes, timeout_s) if changes else first
            except TimedOut:
                say(f"  {label}: skipped: no time was left to compile it")
                return None
            except InputError as error:
                say(f"  {label}: {error}")
                return None
            say(f"  {label}: {report.fit_sentence(plan)}")
            return fit.Tried(
                pasted,
                needed=plan.memory.needed,
                spare=plan.memory.spare,
                best=plan.time.best,
                fits=plan.fits,
            )

        return fit.search(self._run, attempt, budget_s, enough)


def predict(
    name: "str | config.Run",
    *,
    gpu: str | None,
    devices: str | None,
    price: float | None,
    changes: Mapping[str, Any],
    cores: int | None = None,
    rate_per_core: float | None = None,
    efficiency: Path | None = None,
) -> Plan:
    """Compiles the step for the GPUs and predicts the run; see :func:`jaxtrain.plan`."""
    arguments = [
        word
        for field, value in changes.items()
        for word in (f"--{field}", *field_values.as_arguments(field_values.plain(value)))
    ]
    if isinstance(name, config.Run):
        config_arguments = config.equivalent_arguments(name)
        if not config_arguments:
            raise InputError(
                f"the run {name.name!r} was not loaded from a config, and plan loads it again in "
                "another process: pass a config's name or path, and overrides"
            )
        name, arguments = config_arguments[1], [*config_arguments[2:], *arguments]
    host = input_rate.Host(cores=cores, per_core=rate_per_core)
    check_numbers(host, price)
    return Planner(name, arguments, gpu, devices, price, host, efficiency).plan()


def check_numbers(host: input_rate.Host, price: float | None) -> None:
    """Checks the numbers of a host and the price per GPU-hour."""
    if host.cores is not None and host.cores < 1:
        raise InputError(f"--cores {host.cores}: use at least 1")
    if host.per_core is not None and not 0 < host.per_core < math.inf:
        raise InputError(f"--rate-per-core {host.per_core:g}: use more than 0")
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price-per-gpu-hour {price:g}: use 0 or more")


def compile_step(
    name: str, settings: Sequence[str], gpu: str, gpus_per_node: int, timeout_s: float
) -> compilation.CompiledStep:
    """Compiles a config's step in a process of its own (:func:`compilation.compile_step`).

    Raises:
        NotCompiled: the compiler failed; a :class:`TimedOut` if it took too long.
    """
    with tempfile.TemporaryDirectory() as dump:
        request = {
            "config_name": name,
            "overrides": [*settings],
            "gpu": gpu,
            "gpus_per_node": gpus_per_node,
            "dump": dump,
        }
        variables = environment(os.environ, Path(dump))
        try:
            with SubprocessWorker(_FUNCTION, request, variables, grace_s=0.0) as worker:
                (message,) = worker.messages(timeout_s)
        except TimeoutError:
            raise TimedOut(
                f"{name} could not be compiled: timed out after {timeout_s:.0f} s: plan on a "
                "faster or less busy machine"
            ) from None
        except WorkerFailed as failed:
            lines = "".join(f"\n{line}" for line in failed.last_lines)
            why = failed.error or f"the compiler {failed.how}{lines}"
            raise NotCompiled(f"{name} could not be compiled: {why}") from failed
    return compilation.CompiledStep.from_json(message)


def environment(outside: Mapping[str, str], dump: Path) -> dict[str, str]:
    """Returns the worker's environment, which hides GPUs and requires none."""
    flags = f"{outside.get('XLA_FLAGS', '')} {compilation.dump_flags(dump)}"
    return subprocess_worker.environment(
        outside,
        without=("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES"),
        CUDA_VISIBLE_DEVICES="-1",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",  # the plugin would look for a driver
        XLA_FLAGS=flags.strip(),
    )


def spread(run: config.Run, nodes: int, gpus: int) -> fit.Overrides:
    """Returns overrides that put a run on other devices: see :mod:`jaxtrain.config.mesh_fit`."""
    changes = fit_mesh(run, nodes, gpus, f"--gpus {nodes}x{gpus}")
    return tuple(word for name, value in changes.items() for word in (f"--{name}", str(value)))


def parse_devices(text: str) -> tuple[int, int]:
    """Parses ``"2x8"`` as two nodes of eight GPUs, and ``"4"`` as one node of four."""
    nodes, _, gpus = text.rpartition("x")
    try:
        counts = int(nodes or 1), int(gpus)
    except ValueError:
        counts = (0, 0)
    if min(counts) < 1:
        raise InputError(
            f"--gpus {text}: use NODESxGPUS, such as 2x8, or the GPUs of one node, such as 4"
        )
    return counts
