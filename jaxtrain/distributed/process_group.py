"""The processes of a run: how they find each other, and how they decide together."""

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
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import exit_code
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.sharding import batch_sharding, replicated

T = TypeVar("T")

# Where one process works and the others have nothing to do; one that is gone ends them before.
_LONGEST_WAIT_S = 24 * 3600

# After the rendezvous all are there: only the service itself has to start.
_CONNECT_S = 120

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def connect(environment: Mapping[str, str], simulate_devices: int | None) -> None:
    """Joins this process to the others, if there are others; call it before any device is used.

    Who the others are, :mod:`jaxtrain.distributed.cluster_env` finds in the environment. They prove
    to each other that they know JAXTRAIN_RUN_TOKEN (:mod:`jaxtrain.distributed.rendezvous`). jax's
    own coordination service, which takes the port after that, checks nobody: any process that
    reaches it may read and change what the processes tell each other, or end them. It listens on
    loopback if all processes are on this machine.

    Args:
        environment: ``os.environ``.
        simulate_devices: virtual CPU devices in all processes together; None uses what is there.

    Raises:
        InputError: variables are missing or wrong, two processes have the same number, or the
            devices do not divide.
        RunAgain: not all processes came in time; or two have the same number in a run without a
            token, where one of them may be a stranger.
    """
    cluster = cluster_env.find(environment)
    if simulate_devices is not None:
        _simulate(simulate_devices, 1 if cluster is None else cluster.count)
    if cluster is None:
        return
    cluster_env.check_address(cluster, environment)
    rendezvous.join(cluster, environment)
    # jax would put a handler of its own over that of StopSignals.
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
                coordinator_bind_address=cluster_env.bind_address(cluster, environment),
            )
    except jax.errors.JaxRuntimeError as error:  # another program took the port just now
        raise RunAgain(
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
        RunAgain: a process is gone.
    """
    store = key_value.of_run()
    if store.count > 1:
        consistency.check(consistency.facts(run, flags), store)


def check_accelerator(environment: Mapping[str, str]) -> None:
    """Refuses to run on the CPU where there is a GPU that jax cannot see.

    Raises:
        InputError: an NVIDIA driver is present, jax uses the CPU, and nobody asked for that.
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
    """Whether this process will compute on the CPU, before jax has looked for devices."""
    return _asked_for_cpu(environment) or not _NVIDIA_DRIVER.exists()


def _asked_for_cpu(environment: Mapping[str, str]) -> bool:
    return "cpu" in environment.get("JAX_PLATFORMS", "").split(",")


def leave(error: BaseException, heartbeat: Heartbeat) -> None:
    """Ends this process at once over an error, if there are others; returns in a run of one.

    An ordinary exit waits for all processes, and those wait for this one in a collective.
    """
    if key_value.of_run().count == 1:
        return
    if isinstance(error, InputError | RunAgain):
        terminal.fail(error)
    elif exit_code(error) == 1:
        terminal.show_error(type(error), error, error.__traceback__)
    end(exit_code(error), heartbeat)


def end(code: int, heartbeat: Heartbeat) -> NoReturn:
    """Ends this process without waiting for anything that still runs in it."""
    heartbeat.leave(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def process_zero_first(action: Callable[[], T], name: str) -> T:
    """Runs ``action`` in process 0, then in the others: they find its caches made."""
    if key_value.of_run().index == 0:
        try:
            return action()
        finally:  # also where it fails: the others then meet the same error, and none waits
            wait_for_all(name, _LONGEST_WAIT_S)
    wait_for_all(name, _LONGEST_WAIT_S)
    return action()


def wait_for_all(event: str, timeout_s: float) -> None:
    """Returns when all processes have come here.

    Args:
        event: what they have done by then, for messages.
        timeout_s: longest wait.

    Raises:
        RunAgain: a process did not come in this time.
    """
    key_value.of_run().barrier(event, timeout_s)


def gather(what: str, text: str) -> list[str]:
    """A text of each process, known to all of them.

    Args:
        what: the text is, for messages.
        text: of this process.

    Raises:
        RunAgain: a process gave none.
    """
    return key_value.of_run().gather(what, text, _LONGEST_WAIT_S)


def check_same(what: str, value: str, cure: str) -> None:
    """Every process must hold the same value.

    Raises:
        InputError: in all processes alike; names the values.
    """
    values = gather(what, value)
    if len(set(values)) > 1:
        listing = ", ".join(f"process {process}: {own}" for process, own in enumerate(values))
        raise InputError(f"the processes see different {what} ({listing}): {cure}")


def told_by_process_zero(decide: Callable[[], str]) -> str:
    """Runs ``decide`` in process 0; every process returns its text or raises its error.

    The others wait for a day: it may read a whole checkpoint.

    Raises:
        RunAgain: in the others, after that.
    """
    return key_value.of_run().decide("decision", decide, _LONGEST_WAIT_S)


class Agreement:
    """The largest of a small number that each process contributes, known to all of them.

    It is asked for beside one step and read after the next, so it costs no waiting: every process
    reads the same value at the same step, and all take the same decision.

    Args:
        mesh: over all devices.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._alone = jax.process_count() == 1
        self._sharding = batch_sharding(mesh)
        self._devices = mesh.size
        self._reduce = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._pending: jax.Array | None = None

    def now(self, value: float) -> float:
        """Contributes ``value``, waits for all processes, and returns what came of it."""
        return value if self._alone else float(self._reduced(value))

    def exchange(self, value: float) -> float | None:
        """Contributes ``value``; returns what came of the contributions of the call before this.

        The first call returns None. In a run of one process ``value`` comes back at once.
        """
        if self._alone:
            return value
        agreed = None if self._pending is None else float(self._pending)
        self._pending = self._reduced(value)
        return agreed

    def _reduced(self, value: float) -> jax.Array:
        reduced: jax.Array = self._reduce(_from_each(self._sharding, self._devices, value))
        return reduced


class Exchange:
    """Several numbers at a time, in one collective: of each the mean or the largest.

    Read one call late, as :class:`Agreement` is, so that nobody waits for it.

    Args:
        mesh: over all devices.
        mean: names of those whose mean is taken, over the devices of the processes that say one.
        largest: names of the others.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, mean: Sequence[str], largest: Sequence[str]
    ) -> None:
        self._alone = jax.process_count() == 1
        self._sharding = batch_sharding(mesh)
        self._devices = mesh.size
        self._names = (*mean, *largest)
        split = len(mean)

        def reduce(said_DN: jax.Array) -> jax.Array:
            means, most = said_DN[:, :split], said_DN[:, split:]
            return jnp.concatenate([jnp.nanmean(means, axis=0), jnp.nanmax(most, axis=0)])

        self._reduce = jax.jit(reduce, out_shardings=replicated(mesh))
        self._pending: jax.Array | None = None

    def __call__(self, values: Mapping[str, float]) -> dict[str, float]:
        """Contributes what this process can say; returns what came of the call before this.

        Every process has to call it, also one that can say nothing. The first call returns {}. In a
        run of one process ``values`` comes back at once. A name that nobody had a value for is
        left out.
        """
        if self._alone:
            return dict(values)
        said = [values.get(name, math.nan) for name in self._names]
        agreed = [] if self._pending is None else np.asarray(self._pending).tolist()
        self._pending = self._reduce(_from_each(self._sharding, self._devices, said))
        pairs = zip(self._names, agreed, strict=False)  # none of the first call
        return {name: value for name, value in pairs if not math.isnan(value)}


def _from_each(
    sharding: jax.sharding.NamedSharding, devices: int, value: float | Sequence[float]
) -> jax.Array:
    """What each process says, once for each device: float32 [devices, ...]."""
    said = np.asarray(value, np.float32)
    local = np.broadcast_to(said, (len(sharding.addressable_devices), *said.shape))
    return jax.make_array_from_process_local_data(sharding, local, (devices, *said.shape))


def _simulate(devices: int, processes: int) -> None:
    if devices < 1 or devices % processes:
        raise InputError(
            f"--simulate-devices {devices} cannot be divided among {processes} processes: "
            f"take {processes} or a multiple of it"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
