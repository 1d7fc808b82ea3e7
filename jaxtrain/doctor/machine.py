"""Checks this machine: its devices and their driver, packages, workers, memory, and disk."""

import collections
import importlib.metadata
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
from packaging.requirements import Requirement
from packaging.version import Version

from jaxtrain import config, machine, versions
from jaxtrain.checkpoint import store
from jaxtrain.config import invocation, mesh_fit
from jaxtrain.cost import cards
from jaxtrain.data import worker_count
from jaxtrain.distributed import process_group
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.formats import counted, size
from jaxtrain.storage.disks import free_bytes
from jaxtrain.telemetry.hardware import Driver, Gpu

LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA's major version -> the oldest driver on Linux. Source: NVIDIA, CUDA compatibility, minor
version compatibility, table 1 (docs.nvidia.com/deploy/cuda-compatibility)."""

_TAKEN = 2 * 2**30  # bytes of a GPU that a desktop or a monitor may hold
_ENOUGH = 0.95  # fraction of a card's memory: jax reports less than nvidia-smi
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SHARED_MEMORY = Path("/dev/shm")
# Type of a file system -> why its files are lost.
_LOST = {
    "tmpfs": "memory, lost at the next restart",
    "overlayfs": "the container's own layer, lost with the container",
}


def device_checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "devices"."""
    return {
        "driver": lambda: driver(subject.driver, next(iter(plugins()), None)),
        "count": lambda: count(subject, jax.devices()),
        "kind": lambda: kind(subject, jax.local_devices()),
        "in use": lambda: in_use(_own_gpus(subject)),
        "packages": packages,
    }


_STAGED = 3  # checkpoints of a run in a bucket: the newest, in upload, being written


def system_checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "system"."""
    return {
        "workers": lambda: workers(subject),
        "shared memory": lambda: shared_memory(subject.run, subject.workers, subject.rows),
        # Files in a bucket survive without the folder where they are staged.
        "file system": lambda: () if subject.url else file_system(subject.base),
        "free disk": lambda: free_disk(
            subject.run, subject.base, subject.state_bytes, in_bucket=subject.url is not None
        ),
    }


def driver(installed: Driver, cuda: int | None) -> Iterator[Finding]:
    """Checks that the NVIDIA driver works and is new enough for jax's CUDA."""
    if installed.failure:
        yield problem(
            f"the NVIDIA driver does not work: {installed.failure}",
            "restart the host (after an update the kernel still runs the old driver), or reinstall "
            "the driver; in a container: docker run --gpus all",
        )
    elif installed.version is None:
        yield ok("no NVIDIA driver: jax uses the CPU")
    elif cuda is not None and Version(installed.version) < Version(LEAST_DRIVER[cuda]):
        minimum = f"{LEAST_DRIVER[cuda]} or newer"
        older = f"; or jax's build for CUDA 12: {versions.install('cuda12')}" if cuda == 13 else ""
        yield problem(
            f"NVIDIA driver {installed.version}: jax for CUDA {cuda} requires {minimum}",
            f"install a driver {minimum} on the host{older}",
        )
    else:
        gpus = f" ({_kinds(gpu.name for gpu in installed.gpus)})" if installed.gpus else ""
        yield ok(f"NVIDIA driver {installed.version}{gpus}")


def count(subject: Subject, devices: list[jax.Device]) -> Iterator[Finding]:
    """Checks, like a run, for as many devices as the config requires."""
    process_group.check_accelerator(subject.environment)
    subject.run, fitted = mesh_fit.fit_to_present_devices(subject.run)
    mesh = subject.run.mesh
    if message := mesh_fit.device_count_problem(mesh, devices):
        yield problem(message)
        return
    kinds = _kinds(device.device_kind for device in devices)
    required = f"as {subject.run.name} requires (mesh.data {mesh.data} x mesh.fsdp {mesh.fsdp})"
    yield ok(f"{kinds}, {required}" + (f"; {fitted}" if fitted else ""))


def kind(subject: Subject, devices: list[jax.Device]) -> Iterator[Finding]:
    """Checks that the devices are the card that the config is named after, or have its memory."""
    card, run, name = subject.card, subject.run, devices[0].device_kind
    kinds = {device.device_kind for device in devices}
    if len(kinds) > 1:
        yield warning(
            f"several kinds of GPUs: {_kinds(device.device_kind for device in devices)}",
            f"every step waits for the slowest: select identical ones with {_VISIBLE}",
        )
    if card is None:
        return
    if devices[0].platform == "cpu":
        yield (problem if subject.simulate_devices is None else warning)(
            f"{run.name} is for {card.name}, but jax uses the CPU: no GPU is checked",
            f"run doctor on the GPUs; without any, {plan_command(run, card.name)} shows what it "
            "needs",
        )
        return
    memory = min((gpu.memory for gpu in _own_gpus(subject) if gpu.name in kinds), default=0)
    small = bool(memory) and memory < _ENOUGH * card.memory
    seen = f"{name} with {size(memory or card.memory)}"
    if small or name != card.name:
        yield (problem if small else warning)(
            f"{seen}, and {run.name} is for {card.name} with {size(card.memory)}",
            f"find settings that fit: {plan_command(run, name)} --fit",
        )
    else:
        yield ok(seen)


def plan_command(run: config.Run, name: str) -> str:
    """Returns the command that plans a run for a card, given the card's name in jax.

    Without --gpu, plan takes the card from the config's name, or lists the cards it knows.
    """
    known = [short for short, card in cards.CARDS.items() if card.name == name]
    card = {"--gpu": known[0]} if known else {}
    return invocation.again(invocation.program(), "plan", config.equivalent_arguments(run), card)


def _own_gpus(subject: Subject) -> list[Gpu]:
    """Returns the GPUs of this process: a host may have others, such as a display card."""
    return subject.driver.visible(subject.environment.get(_VISIBLE))


def in_use(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Checks that no other program holds GPU memory: XLA takes nine tenths of it at the start."""
    for gpu in gpus:
        if gpu.used > _TAKEN:
            yield problem(
                f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.memory)} are in use by another "
                "program",
                f"end it (nvidia-smi lists it), or exclude this GPU with {_VISIBLE}",
            )


Find = Callable[[str], importlib.metadata.Distribution | None]


def installed(name: str) -> importlib.metadata.Distribution | None:
    """Finds a package of this environment, without importing it."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugins(find: Find = installed) -> dict[int, importlib.metadata.Distribution]:
    """Returns jax's installed plugins by their major CUDA version."""
    packages_by_cuda = {cuda: find(f"jax-cuda{cuda}-plugin") for cuda in LEAST_DRIVER}
    return {cuda: package for cuda, package in packages_by_cuda.items() if package is not None}


def packages(find: Find = installed) -> Iterator[Finding]:
    """Checks that jaxlib and NVIDIA's libraries are those that jax's CUDA plugin requires.

    Another package, such as torch, may have replaced them.
    """
    present = plugins(find)
    if not present:
        yield ok("jax has no CUDA plugin installed: it uses only the CPU")
        return
    names = [f"jax-cuda{cuda}-plugin" for cuda in present]
    if len(names) > 1:
        yield problem(
            f"{' and '.join(names)} are both installed: each provides the platform 'cuda'",
            "remove the one that does not fit the driver, for example: "
            f"{versions.pip('uninstall', names[0])}",
        )
        return
    ((cuda, plugin),) = present.items()
    name, fix = f"{names[0]} {plugin.version}", f"jax[cuda{cuda}]=={plugin.version}"
    required = [Requirement(line) for line in plugin.requires or ()]
    required = [package for package in required if package.name.startswith("nvidia-")]
    if not any(find(package.name) for package in required):
        yield ok(f"{name} without NVIDIA's wheels: it uses CUDA, cuDNN, and NCCL of this system")
        return
    required.append(Requirement(f"jaxlib=={plugin.version}"))  # jax refuses another one
    versions_of = {
        package.name: getattr(find(package.name), "version", "missing") for package in required
    }
    unmet = [
        f"{package.name}{package.specifier} ({versions_of[package.name]})"
        for package in required
        if versions_of[package.name] == "missing"
        or not package.specifier.contains(versions_of[package.name], prereleases=True)
    ]
    if unmet:
        seen = f"{name} requires other packages than those installed: {', '.join(unmet)}"
        yield problem(seen, versions.pip("install", fix))
        return
    listed = [
        f"{package} {version}"
        for package, version in versions_of.items()
        if any(name_part in package for name_part in ("runtime", "cudnn", "nccl"))
    ]
    yield ok(f"{', '.join(listed)}: as {name} requires")


def workers(subject: Subject) -> Iterator[Finding]:
    """Checks, like a run, that this host has the memory for the workers."""
    if message := machine.too_many(subject.workers):
        yield problem(message)
    else:
        yield ok(f"this host has memory for {counted(subject.workers, 'worker')}")


def shared_memory(
    run: config.Run, number: int, rows: int, folder: Path = _SHARED_MEMORY
) -> Iterator[Finding]:
    """Checks that the batches that workers prefetch fit into the host's shared memory."""
    batch = worker_count.shared_batch_bytes(run.data, run.model, rows)
    if not number or not batch:
        reason = "are small" if number else "are loaded without workers"
        yield ok(f"batches {reason}: they do not use shared memory")
        return
    devices = run.mesh.devices * rows // run.data.batch_size
    need = batch * worker_count.most_batches(
        rows, number, run.data.prefetch, devices, run.data.block
    )
    free = free_bytes(folder)
    seen = (
        f"{folder} has {size(free)} free; {counted(number, 'worker')}, data.prefetch "
        f"{run.data.prefetch} and batches of {size(batch)} need up to {size(need)}"
    )
    if need <= free:
        yield ok(seen)
        return
    yield problem(
        seen,
        f"docker run --shm-size={math.ceil(need / 2**30) + 1}g (the default is 64 MB; in a pod: an "
        "emptyDir of medium Memory), or lower --data.workers or --data.prefetch",
    )


def file_system(folder: Path) -> Iterator[Finding]:
    """Checks that files of a folder survive the end of the machine or container."""
    command = ["stat", "--file-system", "--format=%T", "--", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    name = result.stdout.strip() or "an unknown file system"
    seen = f"the output directory is on {name}"
    if name in _LOST:
        yield warning(
            f"{seen}: {_LOST[name]}",
            "set --output-dir to a disk; in a container, to a volume (docker run -v /data:/data)",
        )
    else:
        yield ok(seen)


def free_disk(
    run: config.Run, folder: Path, state_bytes: int, *, in_bucket: bool = False
) -> Iterator[Finding]:
    """Checks that all checkpoints that are kept fit, plus the one being written.

    Args:
        in_bucket: whether a bucket keeps them.
    """
    if in_bucket:
        need, free = _STAGED * state_bytes, free_bytes(folder)
        seen = f"{size(free)} free at {folder}; {_STAGED} checkpoints need {size(need)}"
        if need <= free:
            yield ok(seen)
        else:
            yield problem(
                seen, f"free {size(need - free)} there, or set $JAXTRAIN_CACHE to another folder"
            )
        return
    settings = run.checkpoint
    best = settings.best_metric is not None
    kept = store.most_kept(settings.keep, replays=run.loop.replay_every is not None)
    milestones = (run.loop.steps or 0) // settings.milestones if settings.milestones else 0
    number = kept + milestones + best + 1
    need, free = number * state_bytes, free_bytes(folder)
    seen = (
        f"{size(free)} free at {folder}; {number} checkpoints of {size(state_bytes)} need "
        f"{size(need)} ({kept} kept{f' + {milestones} milestones' if milestones else ''}"
        f"{' + the best' if best else ''} + 1 being written)"
    )
    if need <= free:
        yield ok(seen)
    else:
        cure = f"free {size(need - free)} there, lower --checkpoint.keep, or set another"
        yield problem(seen, f"{cure} --output-dir")


def _kinds(names: Iterable[str]) -> str:
    """Formats "8 x NVIDIA H100, 1 x NVIDIA T400"."""
    return ", ".join(f"{number} x {name}" for name, number in collections.Counter(names).items())
