"""Checks the number, kind, and memory of the devices, and their driver."""

import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from packaging.version import Version

from jaxtrain import config, versions
from jaxtrain.bench import ceilings
from jaxtrain.config import invocation
from jaxtrain.doctor import packages
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import Subject
from jaxtrain.planning import cards
from jaxtrain.telemetry.formats import counted, size
from jaxtrain.telemetry.hardware import Driver, Gpu

LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA's major version -> the oldest driver on Linux. Source: NVIDIA, CUDA compatibility, minor
version compatibility, table 1 (docs.nvidia.com/deploy/cuda-compatibility)."""

_TAKEN = 2 * 2**30  # bytes of a GPU that a desktop or a monitor may hold
_MEASURED_S = 0.5  # for each of the three rates of a GPU
_SLOW = 0.9  # of the median rate of the GPUs: one below it is named
_ENOUGH = 0.95  # fraction of a card's memory: jax reports less than nvidia-smi


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "devices"."""
    find = packages.installed
    return {
        "driver": lambda: driver(subject.driver, packages.cuda_major(find)),
        "unused": lambda: unused(subject.driver, jax.default_backend(), subject.environment),
        "count": lambda: count(subject, jax.devices()),
        "kind": lambda: kind(subject, jax.local_devices()),
        "in use": lambda: in_use(_own(subject)),
        "libraries": lambda: packages.plugin(find),
    }


def driver(found: Driver, cuda: int | None) -> Iterator[Finding]:
    """Checks that the NVIDIA driver works and is new enough for jax's CUDA."""
    if found.failure:
        yield problem(
            f"the NVIDIA driver does not work: {found.failure}",
            "restart the host (after an update the kernel still runs the old driver), or reinstall "
            "the driver; in a container: docker run --gpus all",
        )
        return
    if found.version is None:
        yield ok("no NVIDIA driver: jax uses the CPU")
        return
    least = LEAST_DRIVER.get(cuda) if cuda is not None else None
    if least is not None and not Version(found.version) >= Version(least):
        older = f"; or jax's build for CUDA 12: {versions.install('cuda12')}" if cuda == 13 else ""
        yield problem(
            f"NVIDIA driver {found.version}: jax for CUDA {cuda} requires {least} or newer",
            f"install a driver {least} or newer on the host{older}",
        )
        return
    gpus = ", ".join(f"{n} x {name}" for name, n in _counted(g.name for g in found.gpus).items())
    needs = f", CUDA {cuda} requires {least} or newer" if least else ""
    yield ok(f"NVIDIA driver {found.version}{f' ({gpus})' if gpus else ''}{needs}")


def unused(found: Driver, backend: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that jax uses the GPUs of this host."""
    if not found.present or backend != "cpu":
        return
    number = (
        f"{len(found.gpus)} GPU{'s' if len(found.gpus) != 1 else ''} and " if found.gpus else ""
    )
    seen = f"this host has {number}an NVIDIA driver, but jax sees only the CPU"
    platforms, visible = environment.get("JAX_PLATFORMS", ""), environment.get(_VISIBLE)
    if "cpu" in platforms.split(","):
        yield warning(f"{seen}: JAX_PLATFORMS is {platforms!r}", "unset JAX_PLATFORMS to use them")
    elif visible is not None and visible.strip() in ("", "-1"):
        yield problem(f"{seen}: {_VISIBLE} is {visible!r}", f"unset {_VISIBLE}")
    else:
        yield problem(
            seen, f"{versions.install('cuda12')}, or set JAX_PLATFORMS=cpu to use the CPU"
        )


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def count(subject: Subject, devices: list[jax.Device]) -> Iterator[Finding]:
    """Checks for as many devices as the config requires, and for GPUs if it requires them."""
    run, card, settings = subject.run, subject.card, subject.run.mesh
    mesh = f"mesh.data {settings.data} x mesh.fsdp {settings.fsdp}"
    here, wanted = len(devices), settings.devices
    kinds = ", ".join(
        f"{n} x {name}" for name, n in _counted(d.device_kind for d in devices).items()
    )
    own = f"--mesh.data 1 --mesh.fsdp {here}, with a data.batch_size that {here} divides"
    on_cpu = devices[0].platform == "cpu"
    if card is not None and on_cpu and subject.simulate_devices is None:
        yield problem(
            f"{run.name} is for {wanted} x {card.name} ({mesh}), but jax sees no GPU, only {kinds}",
            "start it on a host with the GPUs; without any, "
            f"{_plan(run, card.name)} shows what it needs, and "
            f"--simulate-devices {wanted} tests the mesh",
        )
        return
    if not subject.met:
        yield ok(
            f"{kinds} in this process, which is not connected to the others: {run.name} requires "
            f"{wanted} in total ({mesh})"
        )
        return
    if here != wanted:
        apart = "" if subject.store.count == 1 else f" in {subject.store.count} processes"
        required = counted(wanted, "device")
        yield problem(
            f"{run.name} requires {required} ({mesh}), but jax sees {kinds}{apart}",
            f"start it on {required}, and on all hosts of the run; or set {own}; or test it with "
            f"--simulate-devices {wanted}",
        )
        return
    if card is not None and on_cpu:
        yield warning(
            f"{here} of {wanted} devices, simulated on the CPU: the GPUs are not checked",
            "run doctor on the GPUs, without --simulate-devices",
        )
        return
    yield ok(f"{kinds}, as {run.name} requires ({mesh})")


def kind(subject: Subject, devices: list[jax.Device]) -> Iterator[Finding]:
    """Checks that the GPUs are the card that the config is named after, or have its memory."""
    card = subject.card
    if devices[0].platform == "cpu":
        return
    kinds = _counted(device.device_kind for device in devices)
    if len(kinds) > 1:
        yield warning(
            f"several kinds of GPUs: {', '.join(f'{n} x {name}' for name, n in kinds.items())}",
            "every step waits for the slowest: select identical ones with CUDA_VISIBLE_DEVICES",
        )
    if card is None:
        return
    own = [gpu.memory for gpu in _own(subject) if gpu.name in kinds]
    memory = min(own, default=0)
    name = devices[0].device_kind
    if memory and memory < _ENOUGH * card.memory:
        yield problem(
            f"{name} has {size(memory)}, {subject.run.name} is for {card.name} with "
            f"{size(card.memory)}",
            _way_that_fits(subject.run, name),
        )
    elif name != card.name:
        yield warning(
            f"the GPUs are {name}, {subject.run.name} is for {card.name}",
            f"see what it needs there: {_plan(subject.run, name)}",
        )
    else:
        yield ok(f"{name} with {size(memory or card.memory)}")


def _way_that_fits(run: config.Run, name: str) -> str:
    found = f"find settings that fit: {_plan(run, name)} --fit"
    if any(card.name == name for card in cards.CARDS.values()):
        return found
    return f"{found} (plan does not know this GPU: add --gpu with one of {', '.join(cards.CARDS)})"


def _plan(run: config.Run, name: str) -> str:
    """Returns the command that plans a run for a card, given the card's name in jax."""
    known = [short for short, card in cards.CARDS.items() if card.name == name]
    # Without --gpu, plan takes the card from the config's name, or lists the cards it knows.
    typed = [*config.as_typed(run), *(("--gpu", known[0]) if known else ())]
    return f"{invocation.program()} plan {shlex.join(typed)}"


def _own(subject: Subject) -> list[Gpu]:
    """Returns the GPUs of this process: a host may have others, such as a display card."""
    return subject.driver.visible(subject.environment.get(_VISIBLE))


def in_use(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Checks that no other program holds GPU memory: XLA takes nine tenths of it at the start."""
    for gpu in gpus:
        if gpu.used > _TAKEN:
            yield problem(
                f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.memory)} are in use by another "
                f"program",
                "end it (nvidia-smi lists it), or exclude this GPU with CUDA_VISIBLE_DEVICES",
            )


def rates(
    subject: Subject,
    devices: list[jax.Device],
    host: str,
    measure: Callable[[jax.Device], ceilings.Ceilings] = lambda device: ceilings.measure(
        device, _MEASURED_S
    ),
) -> Iterator[Finding]:
    """Measures the matmul and copy rates of each GPU by itself, and names those that are slow.

    All processes must call it, also without GPUs.

    Args:
        subject: has the store that they share.
        devices: of this process.
        host: the name of this one.
        measure: returns the rates of a device.
    """
    own = [
        (
            f"GPU {device.local_hardware_id} of {host}",
            found.bf16_flops / 1e12,
            found.copy_bytes / 1e9,
        )
        for device in devices
        if device.platform != "cpu"
        for found in [measure(device)]
    ]
    texts = subject.store.gather("rates of the GPUs", json.dumps(own), 3 * ANSWER_S)
    every = [gpu for text in texts for gpu in json.loads(text)]
    if not every:
        return
    kinds = (("bf16 matmuls", "TFLOP/s", 1), ("copies", "GB/s", 2))
    slow = False
    for what, unit, place in kinds:
        median = statistics.median(gpu[place] for gpu in every)
        for gpu in every:
            if gpu[place] < _SLOW * median:
                slow = True
                yield warning(
                    f"{gpu[0]}: {what} at {gpu[place]:,.0f} {unit}, against {median:,.0f} in the "
                    f"median of {len(every)} GPUs (measured)",
                    "every step waits for it: check its temperature, power limit, and other "
                    "programs with nvidia-smi -q, or exclude it with CUDA_VISIBLE_DEVICES",
                )
    if not slow:
        measured = " and ".join(
            f"{what} at {_range([gpu[place] for gpu in every])} {unit}"
            for what, unit, place in kinds
        )
        yield ok(f"{counted(len(every), 'GPU')}, measured one by one: {measured}")


def _range(values: list[float]) -> str:
    low, high = (f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _counted(names: "Iterator[str]") -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found
