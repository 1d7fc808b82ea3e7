"""The processes of a run: how they find each other, and how they decide together."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import mesh as meshes
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.peers import Peers
from jaxtrain.signals import INTERRUPTED, RUN_AGAIN, WRONG_USE, Stopped, StopSignals

T = TypeVar("T")

_MESSAGE_BYTES = 8192

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def connect(environment: Mapping[str, str], simulate_devices: int | None) -> None:
    """Joins this process to the others, if there are others; call it before any device is used.

    Either the three variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID are set, or the program runs as a task of SLURM, whose
    variables jax reads itself.

    Args:
        environment: ``os.environ``.
        simulate_devices: virtual CPU devices in all processes together; None uses what is there.

    Raises:
        InputError: only some variables are set, or the devices do not divide.
    """
    given = [name for name in (ADDRESS, COUNT, INDEX) if environment.get(name)]
    if given and len(given) < 3:
        missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in given]
        raise InputError(
            f"{' and '.join(given)} set, but not {' and '.join(missing)}: set all three for a run "
            "of several processes, or none for one process"
        )
    processes = _number(environment, COUNT if given else "SLURM_NTASKS", least=1)
    if simulate_devices is not None:
        _simulate(simulate_devices, processes)
    if processes == 1:
        return
    # jax would put a handler of its own over that of StopSignals.
    jax.config.update("jax_enable_preemption_service", False)
    if environment.get("JAX_PLATFORMS", "") == "cpu" or simulate_devices is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if given:
        index = _number(environment, INDEX, least=0)
        jax.distributed.initialize(
            environment[ADDRESS], processes, index, local_device_ids=_local_devices(environment)
        )
    else:
        try:
            jax.distributed.initialize(local_device_ids=_local_devices(environment))  # SLURM
        except ValueError as error:
            raise InputError(
                f"SLURM_NTASKS is {environment['SLURM_NTASKS']}, but this is no task that srun "
                f"started ({error}): start the command with srun, set {ADDRESS}, {COUNT} and "
                f"{INDEX}, or unset SLURM_NTASKS for one process"
            ) from error


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


def peers(signals: StopSignals) -> Peers:
    """What this process knows of the others; call it after :func:`connect`."""
    joined = _joined()  # jax.process_count() would wait for the devices of all
    return Peers(joined.process_id, joined.num_processes, joined.client, signals)


def leave(error: BaseException, peers: Peers) -> None:
    """Ends this process at once over an error, if there are others; returns in a run of one.

    An ordinary exit waits for all processes, and those wait for this one in a collective.
    """
    if jax.process_count() == 1:
        return
    if isinstance(error, Stopped):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, InputError | RunAgain):
        code = WRONG_USE if isinstance(error, InputError) else RUN_AGAIN
        print(f"error: {error}", file=sys.stderr)
    else:
        code = 1
        traceback.print_exception(error)
    end(code, peers)


def end(code: int, peers: Peers) -> NoReturn:
    """Ends this process without waiting for anything that still runs in it."""
    peers.leave(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


def wait_for_all(event: str, timeout_s: float) -> None:
    """Returns when all processes have come here; by the service and not by a collective, which may
    have a short limit of its own (30 s between CPUs).

    Args:
        event: unlike that of any other call.
        timeout_s: after it the runtime's own error is raised.
    """
    if jax.process_count() > 1:
        _joined().client.wait_at_barrier(f"jaxtrain/{event}", int(timeout_s * 1000))


def check_same(what: str, value: str, cure: str) -> None:
    """Every process must hold the same value.

    Raises:
        InputError: in all processes alike; names the values.
    """
    if jax.process_count() == 1:
        return
    padded = np.frombuffer(value.encode().ljust(128, b"\0")[:128], np.uint8)
    values = [
        bytes(row).rstrip(b"\0").decode() for row in multihost_utils.process_allgather(padded)
    ]
    if len(set(values)) > 1:
        listing = ", ".join(f"process {number}: {one}" for number, one in enumerate(values))
        raise InputError(f"the processes see different {what} ({listing}): {cure}")


def told_by_process_zero(decide: Callable[[], str]) -> str:
    """Runs ``decide`` in process 0; every process returns its text or raises its error."""
    if jax.process_count() == 1:
        return decide()
    message = b""
    if jax.process_index() == 0:
        try:
            message = b"=" + decide().encode()
        except (InputError, RunAgain) as error:
            message = (b"!" if isinstance(error, InputError) else b"?") + str(error).encode()
        if len(message) > _MESSAGE_BYTES:
            message = b"!" + f"too long to tell the other processes: {message[:200]!r}".encode()
    padded = np.frombuffer(message.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)
    text = told.tobytes().rstrip(b"\0").decode()
    if text.startswith("!"):
        raise InputError(text[1:])
    if text.startswith("?"):
        raise RunAgain(text[1:])
    return text[1:]


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
        local = np.full(len(self._sharding.addressable_devices), value, np.float32)
        contributions = jax.make_array_from_process_local_data(
            self._sharding, local, (self._devices,)
        )
        reduced: jax.Array = self._reduce(contributions)
        return reduced


def _joined() -> Any:
    """jax's own record of the processes; it has no public way to its coordination service."""
    from jax._src import distributed

    return distributed.global_state


def _local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The argument of ``jax.distributed.initialize`` with which a process uses all it should.

    Within a SLURM task jax takes one GPU for each process, also where only one runs on a node. An
    empty list leaves all to it. None lets jax choose: a list in JAX_LOCAL_DEVICE_IDS, or one GPU
    for each of several tasks of a node.
    """
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    # As "8(x2)", "1,2" or "4": tasks of each node, runs of equal nodes folded.
    tasks = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", "1")).split(",")
    several = any(count != "1" for count in tasks)
    return None if several and not environment.get(ADDRESS) else []


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int:
    text = environment.get(name, "1")
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{name} is {text!r}; it has to be a whole number, at least {least}")
    return int(text)


def _simulate(devices: int, processes: int) -> None:
    if devices < 1 or devices % processes:
        raise InputError(
            f"--simulate-devices {devices} cannot be divided among {processes} processes: "
            f"take {processes} or a multiple of it"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // processes)
