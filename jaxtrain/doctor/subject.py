"""The config on this machine that the checks examine, and properties that several of them use."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxtrain import config
from jaxtrain.data import worker_count
from jaxtrain.distributed import process_group
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.planning.cards import Card
from jaxtrain.sharding import make_mesh
from jaxtrain.telemetry.hardware import Driver
from jaxtrain.training import step_setup
from jaxtrain.training.state import total_bytes
from jaxtrain.training.step_setup import StepSetup


@dataclasses.dataclass
class Subject:
    """A config on this machine.

    Attributes:
        run: the config.
        card: the card in the config's name; None if it has none.
        output: where a run would write; need not exist.
        url: of the bucket that it would be copied to; None without one. Each process then writes on
            a disk of its own.
        simulate_devices: number of virtual CPU devices in all processes; None for the real devices.
        driver: this host's driver, queried before jax took the GPUs.
        environment: ``os.environ``.
        temporary: a folder that the parent process removes.
        scratch: takes each folder made elsewhere, which is removed if this process dies.
        store: shared with the other processes; a store of one process if they are not connected.
        processes: number of processes of the run, connected or not; None if unknown.
        resumes: whether a run would resume from a checkpoint.
        shared: whether all processes see the output directory's storage; None if unknown.
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
    url: str | None = None

    @property
    def met(self) -> bool:
        """Whether all processes of the run are connected; otherwise this one runs alone."""
        return self.store.count == self.processes

    @functools.cached_property
    def base(self) -> Path:
        """The output directory, or its nearest existing parent, on the same file system."""
        folder = self.output
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder

    @functools.cached_property
    def fits_devices(self) -> bool:
        """Whether the number of devices is the config's."""
        return jax.device_count() == self.run.mesh.devices

    @functools.cached_property
    def built(self) -> StepSetup:
        """The built run; on one device if the machine's number of devices is not the config's."""
        if self.fits_devices:
            return step_setup.build_without_data(self.run, make_mesh(self.run.mesh))
        alone = config.Mesh(data=1, fsdp=1, shard="none")
        run = dataclasses.replace(self.run, mesh=alone)
        return step_setup.build_without_data(run, self.one_device)

    @property
    def one_device(self) -> jax.sharding.Mesh:
        """A mesh of only this process's first device."""
        alone = config.Mesh(data=1, fsdp=1, shard="none")
        return make_mesh(alone, jax.local_devices()[:1])

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes over all devices of the state in a checkpoint."""
        return total_bytes(self.built.saved)

    @property
    def devices(self) -> int:
        """Number of the config's devices that belong to this process."""
        return max(1, self.run.mesh.devices // (self.processes or 1))

    @property
    def gpus(self) -> int:
        """Number of the config's devices that belong to this process, if they are GPUs."""
        return 0 if jax.local_devices()[0].platform == "cpu" else self.devices

    @property
    def rows(self) -> int:
        """Number of examples of a global batch that this process loads."""
        return max(1, self.run.data.batch_size // (self.processes or 1))

    @property
    def workers(self) -> int:
        """Number of worker processes that the run would use on this host."""
        return worker_count.choose(
            self.run.data,
            self.run.model,
            rows=self.rows,
            devices=self.devices,
            on_cpu=jax.local_devices()[0].platform == "cpu",
            processes=process_group.processes_on_this_host(self.environment),
        ).number
