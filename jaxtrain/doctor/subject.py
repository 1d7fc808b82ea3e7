"""What is examined: a config on this machine, with what several checks need to know of it."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxtrain import config
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.planning.cards import Card
from jaxtrain.sharding import make_mesh
from jaxtrain.telemetry.hardware import Driver
from jaxtrain.training import setup
from jaxtrain.training.setup import StepSetup


@dataclasses.dataclass
class Subject:
    """A config on this machine.

    Attributes:
        run: the config.
        card: that its name says; None if it says none.
        output: where a run would write; need not exist.
        simulate_devices: virtual CPU devices, of all processes; None uses what is there.
        driver: of this host, asked before jax took the GPUs.
        environment: ``os.environ``.
        temporary: a folder that whoever started this removes.
        scratch: takes each folder that is made elsewhere, to be removed should this process die.
        store: shared with the other processes; of this process alone where they have not met.
        processes: of the run, met or not; None if the environment does not tell.
        resumes: whether a run would find a checkpoint to go on from.
        shared: whether all processes see the output directory's storage; None if it is not known.
    """

    run: config.Run
    card: Card | None
    output: Path
    simulate_devices: int | None
    driver: Driver
    environment: Mapping[str, str]
    temporary: Path
    scratch: Callable[[Path], None]
    store: KeyValueStore
    processes: int | None = 1
    resumes: bool = False
    shared: bool | None = None

    @property
    def met(self) -> bool:
        """Whether all processes of the run are there; otherwise this one is examined alone."""
        return self.store.count == self.processes

    @functools.cached_property
    def base(self) -> Path:
        """The output directory, or what exists above it: it lies on the same file system."""
        folder = self.output
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder

    @functools.cached_property
    def fits_devices(self) -> bool:
        """Whether there are as many devices as the config wants."""
        return jax.device_count() == self.run.mesh.devices

    @functools.cached_property
    def built(self) -> StepSetup:
        """The run as it is built; on one device where the machine has another number of them."""
        if self.fits_devices:
            return setup.build_without_data(self.run, make_mesh(self.run.mesh))
        alone = config.Mesh(data=1, fsdp=1, shard="none")
        run = dataclasses.replace(self.run, mesh=alone)
        return setup.build_without_data(run, self.one_device)

    @property
    def one_device(self) -> jax.sharding.Mesh:
        """A mesh of this process's first device."""
        alone = config.Mesh(data=1, fsdp=1, shard="none")
        return make_mesh(alone, jax.local_devices()[:1])

    @functools.cached_property
    def state_bytes(self) -> int:
        """Of the whole state, over all devices: what a checkpoint holds."""
        return sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.built.target)
        )

    @property
    def rows(self) -> int:
        """Examples of a global batch that this process loads."""
        return max(1, self.run.data.batch_size // (self.processes or 1))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def counted(number: int, noun: str) -> str:
    """ "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people: binary, as nvidia-smi and ls -h count."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
