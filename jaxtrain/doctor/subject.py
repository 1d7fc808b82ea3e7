"""The config on this machine that the checks examine, and properties that several of them use."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxtrain import config
from jaxtrain.cost.cards import Card
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.sharding import make_mesh
from jaxtrain.telemetry.hardware import Driver
from jaxtrain.training import setup, step_setup
from jaxtrain.training.state_size import total_bytes
from jaxtrain.training.step_setup import StepSetup

_ONE_DEVICE = config.Mesh(data=1, fsdp=1, shard="none")

PREFIX = ".jaxtrain-doctor-"
"""Prefix of the folders and objects that doctor makes where a run would write, and removes."""


@dataclasses.dataclass
class Subject:
    """A config on this machine.

    Attributes:
        card: the card in the config's name; None if it has none.
        output: where a run would write; need not exist.
        simulate_devices: number of virtual CPU devices in all processes; None for the real devices.
        scratch: takes each folder that is removed if this process dies, before it is made.
        shared: whether all processes see the output directory's storage; None if unknown.
        url: of the bucket that ``output`` would be copied to; None without one. Each process then
            writes on a disk of its own.
    """

    run: config.Run
    card: Card | None
    output: Path
    simulate_devices: int | None
    driver: Driver
    environment: Mapping[str, str]
    scratch: Callable[[Path], None]
    store: KeyValueStore = dataclasses.field(default_factory=KeyValueStore)
    connected: bool = False
    resumes: bool = False
    shared: bool | None = None
    url: str | None = None

    @functools.cached_property
    def base(self) -> Path:
        """The output directory, or its nearest existing parent, on the same file system."""
        folder = self.output
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder

    @property
    def one_device(self) -> jax.sharding.Mesh:
        """A mesh of only this process's first device."""
        return make_mesh(_ONE_DEVICE, jax.local_devices()[:1])

    @functools.cached_property
    def built(self) -> StepSetup:
        """The built run; on one device if the machine's number of devices is not the config's."""
        if jax.device_count() == self.run.mesh.devices:
            return step_setup.build_without_data(self.run, make_mesh(self.run.mesh))
        run = dataclasses.replace(self.run, mesh=_ONE_DEVICE)
        return step_setup.build_without_data(run, self.one_device)

    @property
    def rows(self) -> int:
        """Number of examples of a global batch that this process loads."""
        return max(1, self.run.data.batch_size // self.store.count)

    @functools.cached_property
    def workers(self) -> int:
        """Number of worker processes that the run would use on this host."""
        return setup.workers_here(self.run, self.built.rule.mesh).number

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes over all devices of the state in a checkpoint."""
        return total_bytes(self.built.saved)
