"""The processes of a run: how they find each other, and how they decide together."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import clusters, config, rollcall, same_run
from jaxtrain import mesh as meshes
from jaxtrain.errors import InputError, Unavailable

T = TypeVar("T")

_LAST_WORDS_S = 2.0

# After the roll call all are there: only the service itself has to start.
_CONNECT_S = 120


def connect(environment: Mapping[str, str], simulate_devices: int | None) -> None:
    """Joins this process to the others, if there are others; call it before any device is used.

    Who the others are, :mod:`jaxtrain.clusters` finds in the environment.

    Args:
        environment: ``os.environ``.
        simulate_devices: virtual CPU devices in all processes together; None uses what is there.

    Raises:
        InputError: variables are missing or wrong, two processes have the same number, or the
            devices do not divide.
        Unavailable: not all processes came in time.
    """
    cluster = clusters.find(environment)
    if simulate_devices is not None:
        _simulate(simulate_devices, 1 if cluster is None else cluster.count)
    if cluster is None:
        return
    clusters.check_address(cluster, environment)
    rollcall.hold(cluster, environment)
    if environment.get("JAX_PLATFORMS", "") == "cpu" or simulate_devices is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.count,
            cluster.index,
            local_device_ids=cluster.devices,
            initialization_timeout=_CONNECT_S,
        )
    except jax.errors.JaxRuntimeError as error:  # another program took the port just now
        raise Unavailable(
            f"jax's service did not start at {cluster.coordinator} ({error}): try again, or take "
            "another port"
        ) from error


def check_same_run(run: config.Run, flags: Mapping[str, Any]) -> None:
    """All processes must have the same config, code and packages; call it before any compilation.

    Args:
        run: the config.
        flags: of the command line, those that change what is computed.

    Raises:
        InputError: in all processes alike; names each difference, its values and processes.
        Unavailable: a process is gone.
    """
    if jax.process_count() == 1:
        return
    from jax._src import distributed  # jax has no public way to its coordination service

    store: Any = distributed.global_state.client
    own = same_run.facts(run, flags)
    same_run.check(own, jax.process_index(), jax.process_count(), store)


def check_accelerator(environment: Mapping[str, str]) -> None:
    """Refuses to run on the CPU where there is a GPU that jax cannot see.

    Raises:
        InputError: an NVIDIA driver is present, jax uses the CPU, and nobody asked for that.
    """
    asked_for_cpu = "cpu" in environment.get("JAX_PLATFORMS", "").split(",")
    if (
        asked_for_cpu
        or getattr(jax.config, "jax_platforms", None) == "cpu"
        or jax.default_backend() != "cpu"
    ):
        return
    if Path("/proc/driver/nvidia/version").exists():
        raise InputError(
            "this machine has an NVIDIA driver, but jax sees only the CPU: "
            "pip install -e '.[cuda12]', or set JAX_PLATFORMS=cpu to train on the CPU"
        )


def leave(error: Exception) -> None:
    """Ends this process at once over an error, if there are others; returns in a run of one.

    An ordinary exit waits for all processes, and those wait for this one in a collective. So it
    does not wait: they see the connection break, and end too.
    """
    if jax.process_count() == 1:
        return
    if isinstance(error, InputError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if jax.process_index() == 0:
        # The others lose their coordinator with it: first let them tell of an error of their own.
        time.sleep(_LAST_WORDS_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, InputError) else 1)


def process_zero_first(action: Callable[[], T], name: str) -> T:
    """Runs ``action`` in process 0, then in the others: they find its caches made."""
    if jax.process_count() == 1:
        return action()
    if jax.process_index() == 0:
        try:
            return action()
        finally:  # also where it fails: the others then meet the same error, and none waits
            multihost_utils.sync_global_devices(name)
    multihost_utils.sync_global_devices(name)
    return action()


def check_same(what: str, value: str, cure: str) -> None:
    """Every process must hold the same value.

    Raises:
        InputError: in all processes alike; names the values.
    """
    if jax.process_count() == 1:
        return
    values = gather(value)
    if len(set(values)) > 1:
        listing = ", ".join(f"process {number}: {one}" for number, one in enumerate(values))
        raise InputError(f"the processes see different {what} ({listing}): {cure}")


def gather(text: str) -> list[str]:
    """A short text (up to 128 bytes of it) of each process, known to all of them."""
    if jax.process_count() == 1:
        return [text]
    padded = np.frombuffer(text.encode().ljust(128, b"\0")[:128], np.uint8)
    return [
        bytes(row).rstrip(b"\0").decode(errors="ignore")
        for row in multihost_utils.process_allgather(padded)
    ]


class Agreement:
    """One number made of a small number that each process contributes, known to all of them.

    It is asked for beside one step and read after the next, so it costs no waiting: every process
    reads the same value at the same step, and all take the same decision.

    Args:
        mesh: over all devices.
        reduce: the contributions, float32 [devices], -> one number. The largest, unless told.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, reduce: Callable[[jax.Array], jax.Array] = jnp.max
    ) -> None:
        self._alone = jax.process_count() == 1
        self._sharding = meshes.batch_sharding(mesh)
        self._devices = mesh.size
        self._reduce = jax.jit(reduce, out_shardings=meshes.replicated(mesh))
        self._pending: jax.Array | None = None

    def exchange(self, value: float) -> float | None:
        """Contributes ``value``; returns what came of the contributions of the call before this.

        The first call returns None. In a run of one process ``value`` comes back at once.
        """
        if self._alone:
            return value
        agreed = None if self._pending is None else float(self._pending)
        local = np.full(len(self._sharding.addressable_devices), value, np.float32)
        contributions = jax.make_array_from_process_local_data(
            self._sharding, local, (self._devices,)
        )
        self._pending = self._reduce(contributions)
        return agreed


def _simulate(devices: int, processes: int) -> None:
    if devices < 1 or devices % processes:
        raise InputError(
            f"--simulate-devices {devices} cannot be divided among {processes} processes: "
            f"take {processes} or a multiple of it"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
