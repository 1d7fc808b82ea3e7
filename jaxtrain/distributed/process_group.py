"""Connects the processes of a run, and lets them agree on values and decisions."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config, terminal, versions
from jaxtrain.distributed import cluster_env, consistency, key_value, rendezvous
from jaxtrain.distributed.heartbeat import SILENCE_S, Heartbeat
from jaxtrain.distributed.signals import exit_code
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.sharding import batch_sharding, replicated

T = TypeVar("T")

# For waits while one process works. If that process is gone, its lost heartbeat ends them sooner.
_LONGEST_WAIT_S = 24 * 3600

# All processes are there after the rendezvous: only the service itself must start.
_CONNECT_S = 120

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def connect(environment: Mapping[str, str], simulate_devices: int | None) -> None:
    """Connects this process to the others, if there are any; call it before any device is used.

    :mod:`jaxtrain.distributed.cluster_env` finds the others in the environment, and
    :mod:`jaxtrain.distributed.rendezvous` checks that all are present. Neither it nor jax's own
    coordination service, which takes the port after that, authenticates anything: any process that
    reaches it can read and change the messages, or end the run. It listens on loopback if all
    processes are on this machine.

    Args:
        simulate_devices: number of virtual CPU devices in all processes together; None for the
            real devices.

    Raises:
        InputError: variables are missing or wrong, two processes have the same number, or the
            processes do not divide the devices.
        RunAgain: not all processes arrived in time.
    """
    cluster = cluster_env.find(environment)
    if simulate_devices is not None:
        _simulate(simulate_devices, 1 if cluster is None else cluster.count)
    # A program that trains several times, or that has called jax.distributed itself, is connected.
    if cluster is None or key_value.of_run().client is not None:
        return
    cluster_env.check_address(cluster, environment)
    rendezvous.join(cluster, environment)
    # Its signal handler would replace the one of StopSignals.
    jax.config.update("jax_enable_preemption_service", False)
    if environment.get("JAX_PLATFORMS", "") == "cpu" or simulate_devices is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        with key_value.announced(lambda: f"jax's service at {cluster.coordinator}"):
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.count,
                cluster.index,
                local_device_ids=cluster.devices,
                initialization_timeout=_CONNECT_S,
                heartbeat_timeout_seconds=SILENCE_S,
                coordinator_bind_address=cluster_env.bind_address(cluster, environment),
            )
    except jax.errors.JaxRuntimeError as error:  # another program took the port just now
        raise RunAgain(
            f"jax's service did not start at {cluster.coordinator} ({error}): try again, or use "
            "another port"
        ) from error


def processes_on_this_host(environment: Mapping[str, str]) -> int:
    """Returns how many processes of the run are on this host: 1 if that is unknown."""
    cluster = cluster_env.find(environment)
    if cluster is None:
        return 1
    if cluster_env.is_local(cluster):
        return cluster.count
    return 1 if cluster.hosts is None else -(-cluster.count // cluster.hosts)


def check_same_program(run: config.Run, flags: Mapping[str, Any]) -> None:
    """Checks that config, code, and packages are the same in all processes, before compilation.

    Raises:
        InputError: in all processes alike; names each difference, its values and processes.
        RunAgain: a process is gone.
    """
    store = key_value.of_run()
    if store.count > 1:
        consistency.check(consistency.facts(run, flags), store)


def check_accelerator(environment: Mapping[str, str]) -> None:
    """Refuses to run on the CPU of a machine with a GPU that jax cannot see.

    Raises:
        InputError: an NVIDIA driver is present and jax uses the CPU without being asked to.
    """
    if (
        _asked_for_cpu(environment)
        or getattr(jax.config, "jax_platforms", None) == "cpu"
        or jax.default_backend() != "cpu"
    ):
        return
    if _NVIDIA_DRIVER.exists():
        raise InputError(
            "this machine has an NVIDIA driver, but jax sees only the CPU: "
            f"{versions.install('cuda12')}, or set JAX_PLATFORMS=cpu to train on the CPU"
        )


def will_use_cpu(environment: Mapping[str, str]) -> bool:
    """Predicts whether this process will use the CPU, before jax has looked for devices."""
    return _asked_for_cpu(environment) or not _NVIDIA_DRIVER.exists()


def _asked_for_cpu(environment: Mapping[str, str]) -> bool:
    return "cpu" in environment.get("JAX_PLATFORMS", "").split(",")


def leave(error: BaseException, heartbeat: Heartbeat) -> None:
    """Ends this process at once after an error; returns in a run of one process.

    An ordinary exit would wait for the other processes, which wait for this one in a collective.
    """
    if key_value.of_run().count == 1:
        return
    if isinstance(error, InputError | RunAgain):
        terminal.fail(error)
    elif exit_code(error) == 1:
        terminal.show_error(type(error), error, error.__traceback__)
    end(exit_code(error), heartbeat)


def end(code: int, heartbeat: Heartbeat) -> NoReturn:
    """Ends this process without waiting for its threads."""
    heartbeat.leave(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def process_zero_first(action: Callable[[], T], name: str) -> T:
    """Runs ``action`` in process 0, then in the others, which find its caches complete."""
    if key_value.of_run().index == 0:
        try:
            return action()
        finally:  # even if it fails: the others must not wait, and will get the same error
            wait_for_all(name)
    wait_for_all(name)
    return action()


def wait_for_all(event: str, timeout_s: float = _LONGEST_WAIT_S) -> None:
    """Waits until all processes have called this.

    Raises:
        RunAgain: a process did not call it in this time.
    """
    key_value.of_run().barrier(event, timeout_s)


def gather(topic: str, text: str, timeout_s: float = _LONGEST_WAIT_S) -> list[str]:
    """Returns the texts of all processes, in process order.

    Raises:
        RunAgain: a process gave none.
    """
    return key_value.of_run().gather(topic, text, timeout_s)


def check_same(topic: str, value: str, cure: str) -> None:
    """Checks that every process has the same value."""
    values = gather(topic, value)
    if len(set(values)) > 1:
        listing = ", ".join(f"process {process}: {value}" for process, value in enumerate(values))
        raise InputError(f"the processes see different {topic} ({listing}): {cure}")


def process_zero_decides(decide: Callable[[], str]) -> str:
    """Runs ``decide`` in process 0; every process returns its text or raises its error.

    The others wait for up to a day, since it may read an entire checkpoint.

    Raises:
        RunAgain: in the others, after that time.
    """
    return key_value.of_run().decide("decision", decide, _LONGEST_WAIT_S)


class Exchange:
    """Reduces named numbers over all processes, to their means or maxima.

    Args:
        mean: names reduced to their mean over the devices of the processes that have a value.
        largest: names reduced to their maximum.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, *, mean: Sequence[str] = (), largest: Sequence[str] = ()
    ) -> None:
        self._alone = jax.process_count() == 1
        self._sharding = batch_sharding(mesh)
        self._devices = mesh.size
        self._names = (*mean, *largest)
        split = len(mean)

        def reduce(values_DN: jax.Array) -> jax.Array:
            means, largest = values_DN[:, :split], values_DN[:, split:]
            return jnp.concatenate([jnp.nanmean(means, axis=0), jnp.nanmax(largest, axis=0)])

        self._reduce = jax.jit(reduce, out_shardings=replicated(mesh))
        self._pending: jax.Array | None = None

    def now(self, values: Mapping[str, float]) -> dict[str, float]:
        """Contributes this process's values, waits for all processes, and returns the results.

        Names without a value in any process are omitted.
        """
        return dict(values) if self._alone else self._named(self._reduced(values))

    def delayed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Contributes this process's values; returns the results of the previous call.

        The reduction starts during one step and is read after the next, so no process waits: every
        process reads the same values at the same step, and all take the same decision. Every
        process must call this, even without any values. The first call returns {}. In a run of one
        process, ``values`` is returned at once.
        """
        if self._alone:
            return dict(values)
        previous, self._pending = self._pending, self._reduced(values)
        return {} if previous is None else self._named(previous)

    def _reduced(self, values: Mapping[str, float]) -> jax.Array:
        row = np.asarray([values.get(name, math.nan) for name in self._names], np.float32)
        local = np.broadcast_to(row, (len(self._sharding.addressable_devices), *row.shape))
        values_DN = jax.make_array_from_process_local_data(
            self._sharding, local, (self._devices, *row.shape)
        )
        reduced: jax.Array = self._reduce(values_DN)
        return reduced

    def _named(self, reduced: jax.Array) -> dict[str, float]:
        pairs = zip(self._names, np.asarray(reduced).tolist(), strict=True)
        return {name: value for name, value in pairs if not math.isnan(value)}


def _simulate(devices: int, processes: int) -> None:
    if devices < 1 or devices % processes:
        raise InputError(
            f"--simulate-devices {devices} cannot be divided among {processes} processes: "
            f"use {processes} or a multiple of it"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
