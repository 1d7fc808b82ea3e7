"""Finds the processes of a run in the environment variables that launchers and schedulers set.

jax reads SLURM's itself, but its failures do not help: it mistakes the variables of an allocation
for those of a task, waits minutes for the wrong host, and ends with a C++ stack trace. Here each
variable is checked before anything waits for another process.
"""

import dataclasses
import ipaddress
import re
import socket
import time
from collections.abc import Mapping

from jaxtrain.distributed.key_value import announced
from jaxtrain.errors import InputError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

# How long to wait for the others: machines boot, images are pulled. The variable overrides it.
PATIENCE, PATIENCE_S = "JAXTRAIN_CONNECT_S", 300.0

BIND = "JAX_COORDINATOR_BIND_ADDRESS"

# Ports that Linux does not assign by itself (its ephemeral ports end at 60999).
_FIRST_PORT, _PORTS = 61440, 4096
# A new pod's name appears in Kubernetes' DNS some time after the pod; other names exist already.
_NAME_APPEARS_S, _NAME_IS_THERE_S = 90.0, 3.0
_LOOK_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a run, from the point of view of one of them.

    Attributes:
        scheme: the launcher or the variables that describe them, for messages.
        coordinator: host:port of process 0.
        index: number of this process, from 0.
        hosts: number of machines that they run on; None if unknown.
        devices: indices of the local GPUs that this process uses; empty for all.
    """

    scheme: str
    coordinator: str
    source: str
    count: int
    index: int
    hosts: int | None
    devices: list[int]

    @property
    def host(self) -> str:
        """The coordinator's host."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self.coordinator.rpartition(":")[2])


def find(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the processes of this run, or None if this is the only one.

    Tries in this order: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and JAX_PROCESS_ID (or
    JOB_COMPLETION_INDEX of a Kubernetes job instead of the last); a task that SLURM's srun started;
    WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT, which clouds and ssh.sh set on each node.
    JAX_COORDINATOR_ADDRESS alone overrides the address of every other scheme, and
    JAX_NUM_PROCESSES=1 means one process, whatever else is set. WORLD_SIZE=1 is ignored. Processes
    of mpirun and mpiexec are refused, because each would train alone.

    Args:
        environment: ``os.environ``. Empty variables count as unset.

    Raises:
        InputError: variables are missing or contradict one another, SLURM allocated several tasks
            and this process is not one of them, or MPI started several processes.
    """
    variables = {name: value for name, value in environment.items() if value}
    explicit = _explicit(variables)
    if explicit is not None:
        return explicit if explicit.count > 1 else None
    _refuse_mpi(variables, "OMPI_COMM_WORLD_SIZE")
    cluster = _slurm(variables)
    if cluster is None:
        _refuse_mpi(variables, "PMI_SIZE")
        cluster = _world(variables)
    if cluster is not None:
        return cluster if cluster.count > 1 else None
    if ADDRESS in variables:
        raise InputError(
            f"{ADDRESS} is set, but not {COUNT} and {INDEX}: set all three for a run of several "
            "processes, or none for one process"
        )
    return None


def patience(environment: Mapping[str, str]) -> float:
    """Returns how long to wait for the other processes, in seconds."""
    text = environment.get(PATIENCE) or str(PATIENCE_S)
    if not text.replace(".", "", 1).isdecimal():
        raise InputError(f"{PATIENCE} is {text!r}; it must be a number of seconds, such as 300")
    return float(text)


def is_local(cluster: Cluster) -> bool:
    """Returns whether all processes run on this machine, so no other host must reach process 0.

    A name that merely resolves to loopback here (Debian's 127.0.1.1) does not prove it.
    """
    if cluster.host == "localhost":
        return True
    try:
        return _only_here(cluster.host)
    except ValueError:  # a name
        return cluster.hosts == 1 and is_loopback(cluster.host)


def bind_address(cluster: Cluster, environment: Mapping[str, str]) -> str:
    """Returns HOST:PORT where process 0 listens, and then jax's coordination service.

    JAX_COORDINATOR_BIND_ADDRESS if it is set; loopback if all processes are on this machine; else
    all addresses of this host.
    """
    if environment.get(BIND):
        return environment[BIND]
    if not is_local(cluster):
        return f"[::]:{cluster.port}"
    try:
        resolved = socket.getaddrinfo(cluster.host, cluster.port, type=socket.SOCK_STREAM)
    except OSError:
        resolved = []
    hosts = [
        str(address[4][0]) for address in sorted(resolved, key=lambda address: address[0])
    ]  # IPv4 first
    host = hosts[0] if hosts else "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{cluster.port}" if ":" in host else f"{host}:{cluster.port}"


def check_address(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Checks that the coordinator has an address, and one that other hosts can reach.

    Raises:
        InputError: its name does not resolve here, or resolves to this machine itself although
            the run has several hosts.
    """
    wait_s = _NAME_APPEARS_S if "KUBERNETES_SERVICE_HOST" in environment else _NAME_IS_THERE_S
    deadline = time.monotonic() + min(wait_s, patience(environment))
    with announced(lambda: f"an address of the coordinator's host {cluster.host!r}"):
        while True:
            try:
                resolved = socket.getaddrinfo(cluster.host, cluster.port, type=socket.SOCK_STREAM)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"the coordinator's host {cluster.host!r} (from {cluster.source}) has no "
                        f"address on {socket.gethostname()} ({error.strerror}): set {ADDRESS} to "
                        "host:port of process 0, with a name or an IP that every host can resolve"
                    ) from None
                time.sleep(_LOOK_EVERY_S)
    addresses = sorted({str(address_info[4][0]).partition("%")[0] for address_info in resolved})
    if (cluster.hosts or 1) > 1 and all(_only_here(address) for address in addresses):
        raise InputError(
            f"the coordinator {cluster.coordinator} (from {cluster.source}) is "
            f"{' and '.join(addresses)} on {socket.gethostname()}, which is this machine itself, "
            f"but the {cluster.count} processes run on {cluster.hosts} hosts: set {ADDRESS} to "
            "host:port of process 0 with its network address, or fix /etc/hosts"
        )


def is_loopback(host: str) -> bool:
    """Returns whether a name or address refers only to the machine that resolves it."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(_only_here(str(address_info[4][0]).partition("%")[0]) for address_info in resolved)


def _only_here(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or parsed.is_unspecified


def _explicit(variables: Mapping[str, str]) -> Cluster | None:
    if COUNT not in variables and INDEX not in variables:
        return None
    count = _number(variables, COUNT, 1, None) if COUNT in variables else None
    if count == 1:
        return _alone()
    index, scheme, hosts = INDEX, f"{ADDRESS}, {COUNT}, and {INDEX}", None
    if INDEX not in variables and "JOB_COMPLETION_INDEX" in variables:
        index, scheme, hosts = "JOB_COMPLETION_INDEX", "a Kubernetes job", count
    needed = (ADDRESS, COUNT, index)
    missing = [name for name in needed if name not in variables]
    if missing or count is None:
        is_set = [name for name in needed if name in variables]
        raise InputError(
            f"{' and '.join(is_set)} {'is' if len(is_set) == 1 else 'are'} set, but not "
            f"{' and '.join(missing)}: set all three for a run of several processes, or none for "
            "one process"
        )
    return Cluster(
        scheme=scheme,
        coordinator=_address(variables, ADDRESS),
        source=ADDRESS,
        count=count,
        index=_number(variables, index, 0, count, of=COUNT),
        hosts=hosts,
        devices=_devices(variables, 0, 1),
    )


def _refuse_mpi(variables: Mapping[str, str], size: str) -> None:
    if _number(variables, size, 1, None, default=1) > 1:
        raise InputError(
            f"{size} is {variables[size]}, but MPI's processes are not detected: use a launcher in "
            f"launch/, or set {ADDRESS}, {COUNT}, and {INDEX} for each process"
        )


def _slurm(variables: Mapping[str, str]) -> Cluster | None:
    if "SLURM_STEP_NUM_TASKS" not in variables:
        # A batch script and a shell in an allocation have the job's variables; a task also has its
        # step's. A job may have no number of tasks, but always has a number of nodes.
        for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
            if "SLURM_JOB_ID" in variables and _number(variables, name, 1, None, default=1) > 1:
                raise InputError(
                    f"{name} is {variables[name]}, but srun did not start this process: start the "
                    f"command with srun, or set {COUNT}=1 to train with this one process"
                )
        return None
    count = _number(variables, "SLURM_STEP_NUM_TASKS", 1, None)
    # Within a step, mpiexec may have started this process, which is not one of SLURM's tasks.
    if "MPI_LOCALNRANKS" in variables and variables.get("PMI_SIZE") != str(count):
        _refuse_mpi(variables, "PMI_SIZE")
    if count == 1:
        return _alone()
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    _need(variables, "srun", "SLURM_STEP_NUM_TASKS", needed)
    # All processes derive the same port from the job's number. Each step and each start of a
    # requeued job takes another one: the last may still be in use.
    number = (
        _number(variables, "SLURM_JOB_ID", 0, None)
        + 97 * _number(variables, "SLURM_STEP_ID", 0, None, default=0)
        + 389 * _number(variables, "SLURM_RESTART_COUNT", 0, None, default=0)
    )
    first = _first_host(variables["SLURM_STEP_NODELIST"])
    coordinator, source = f"{first}:{_FIRST_PORT + number % _PORTS}", "SLURM_STEP_NODELIST"
    if ADDRESS in variables:
        coordinator, source = _address(variables, ADDRESS), ADDRESS
    index = _number(variables, "SLURM_PROCID", 0, count, of="SLURM_STEP_NUM_TASKS")
    hosts = _number(variables, "SLURM_STEP_NUM_NODES", 1, None, default=1)
    local = _tasks_of_node(variables, _number(variables, "SLURM_NODEID", 0, None, default=0))
    return Cluster(
        scheme="SLURM",
        coordinator=coordinator,
        source=source,
        count=count,
        index=index,
        hosts=hosts,
        devices=_devices(variables, _number(variables, "SLURM_LOCALID", 0, None), local),
    )


def _world(variables: Mapping[str, str]) -> Cluster | None:
    if variables.get("WORLD_SIZE", "1") == "1":
        return None  # a notebook's pod may set it to 1 without a distributed run
    count = _number(variables, "WORLD_SIZE", 1, None, cure="unset it to train with one process")
    names = ("RANK",) if ADDRESS in variables else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    _need(variables, "the platform", "WORLD_SIZE", names)
    if ADDRESS in variables:
        coordinator, source = _address(variables, ADDRESS), ADDRESS
    else:
        port = _number(variables, "MASTER_PORT", 1, 65536)
        host = variables["MASTER_ADDR"]
        coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        source = "MASTER_ADDR and MASTER_PORT"
    local = _number(variables, "LOCAL_WORLD_SIZE", 1, None, default=1)
    return Cluster(
        scheme="WORLD_SIZE and RANK",
        coordinator=coordinator,
        source=source,
        count=count,
        index=_number(variables, "RANK", 0, count, of="WORLD_SIZE"),
        hosts=-(-count // local),
        devices=_devices(variables, _number(variables, "LOCAL_RANK", 0, None, default=0), local),
    )


def _alone() -> Cluster:
    return Cluster(scheme="", coordinator="", source="", count=1, index=0, hosts=1, devices=[])


def _need(variables: Mapping[str, str], who: str, because: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        raise InputError(
            f"{because} is {variables[because]}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start every process with {who}, "
            f"which sets all of them, or unset {because} to train with one process"
        )


def _number(
    variables: Mapping[str, str],
    name: str,
    minimum: int,
    below: int | None,
    *,
    of: str = "",
    default: int | None = None,
    cure: str = "",
) -> int:
    """Parses a variable as a number from ``minimum`` to ``below - 1``; ``of`` set that limit."""
    text = variables.get(name, "1" if default is None else str(default))
    invalid = not (text.isascii() and text.isdecimal()) or int(text) < minimum
    if invalid or (below is not None and int(text) >= below):
        requirement = f"an integer, at least {minimum}"
        if below is not None:
            requirement = f"an integer from {minimum} to {below - 1}"
        if of:
            requirement += f", because {of} is {variables[of]}"
        raise InputError(
            f"{name} is {text!r}; it must be {requirement}" + (f": {cure}" if cure else "")
        )
    return int(text)


def _address(variables: Mapping[str, str], name: str) -> str:
    host, colon, port = variables[name].rpartition(":")
    # An IPv6 address needs brackets: its last group could be taken for the port.
    plain = host.startswith("[") or ":" not in host
    if not (colon and host and plain and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(
            f"{name} is {variables[name]!r}; it must be HOST:PORT of process 0, such as node1:12345"
        )
    return variables[name]


def _first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: node001 of "node[001-003,7],gpu1"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _tasks_of_node(variables: Mapping[str, str], node: int) -> int:
    """Returns how many tasks a node has; SLURM folds equal counts, as in "2(x3),1"."""
    counts: list[int] = []
    for run in variables.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def _devices(variables: Mapping[str, str], local_index: int, local_count: int) -> list[int]:
    """Returns a process's GPUs: empty for all of its node, or its part if it shares the node."""
    device_ids = variables.get("JAX_LOCAL_DEVICE_IDS")
    if device_ids is not None:
        if not re.fullmatch(r"\d+(,\d+)*", device_ids):
            raise InputError(
                f"JAX_LOCAL_DEVICE_IDS is {device_ids!r}; it must list GPU indices, such as 0,1,2,3"
            )
        return [int(device) for device in device_ids.split(",")]
    if local_count == 1 or "SLURM_GPUS_PER_TASK" in variables:
        return []  # the task sees only its own GPUs, numbered from 0
    visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        return [local_index]
    share = len(visible) // local_count
    return list(range(local_index * share, (local_index + 1) * share))
