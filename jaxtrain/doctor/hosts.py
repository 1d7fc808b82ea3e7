"""Several processes: do they meet, do their clocks, versions and disks agree?"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jaxtrain import clusters, config, processes, rundir, versions
from jaxtrain.doctor import exchange
from jaxtrain.doctor.exchange import Peers, Silent
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.errors import InputError

ANSWER_S = 10.0
_REACH_S = 20.0
_ROUNDS = 3
WARN_SKEW_S, WORST_SKEW_S = 1.0, 30.0


def checks(subject: Subject, connect: bool) -> dict[str, Check]:
    """The group "processes"; the first of them connects.

    Args:
        subject: whose ``peers`` are found.
        connect: False where an earlier attempt has hung.
    """
    if not connect:
        return {}
    return {
        "coordinator": lambda: coordinator(subject),
        "clocks": lambda: clocks(subject.peers),
        "versions": lambda: same_versions(subject.peers, versions.versions()),
        "config": lambda: same_config(subject.peers, config.to_dict(subject.run)),
        "shared storage": lambda: shared_storage(subject),
    }


def coordinator(subject: Subject) -> Iterator[Finding]:
    """Whether the processes meet; connects this one to the others."""
    environment = subject.environment
    address = environment.get(clusters.ADDRESS, "")
    if address and environment.get(clusters.COUNT, "1") != "1":
        wrong = unreachable(address, first=environment.get(clusters.INDEX) == "0")
        if wrong is not None:
            yield wrong  # and this process goes on alone
            processes.connect({}, subject.simulate_devices)
            return
    processes.connect(environment, subject.simulate_devices)
    subject.peers = exchange.peers()
    if subject.peers.count == 1:
        yield ok("one process: there is nobody to meet")
        return
    subject.peers.meet("start", ANSWER_S)
    names = subject.peers.all_say("host", socket.gethostname(), ANSWER_S)
    hosts = len(set(names))
    yield ok(
        f"{subject.peers.count} processes on {hosts} host{'s' if hosts > 1 else ''} have met"
        + (f" at {address}" if address else "")
    )


def unreachable(address: str, *, first: bool, wait_s: float = _REACH_S) -> Finding | None:
    """What is wrong with the coordinator's address; None where somebody answers there.

    Args:
        address: host:port of process 0.
        first: whether this is process 0, which listens there itself.
        wait_s: for the others to start.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return problem(
            f"{clusters.ADDRESS} is {address!r}",
            "give the host and a free port of process 0, as node0:12345",
        )
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return problem(
            f"the coordinator's host {host} has no address here ({error.strerror})",
            f"give {clusters.ADDRESS} a name that this host's DNS or /etc/hosts knows, or an "
            "IP address of process 0",
        )
    if first:
        return None
    failure: OSError | None = None
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
            return None
        except OSError as error:
            failure = error
            time.sleep(0.2)
    return problem(
        f"nobody answers at the coordinator's {address} ({failure}) after {wait_s:.0f} s",
        "start process 0 at the same time, on the host of that name; open the port between the "
        "hosts (firewall, security group); the name must not resolve to 127.0.0.1 on process 0",
    )


def clocks(peers: Peers, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """How far the hosts' clocks are apart: each reads its own when all leave a barrier.

    Several times, of which the least difference counts: a process may be late out of the barrier.
    """
    if peers.count == 1:
        return
    apart = [float("inf")] * peers.count
    for number in range(_ROUNDS):
        peers.meet(f"clock/{number}", ANSWER_S)
        read = [float(t) for t in peers.all_say(f"clock/{number}", repr(clock()), ANSWER_S)]
        for process, t in enumerate(read):
            apart[process] = min(apart[process], t - read[0], key=abs)
    worst = max(range(peers.count), key=lambda process: abs(apart[process]))
    skew = abs(apart[worst])
    if skew <= WARN_SKEW_S:
        yield ok(f"clocks are at most {skew:.3f} s apart")
        return
    direction = "ahead of" if apart[worst] > 0 else "behind"
    seen = f"the clock of process {worst} is {skew:.1f} s {direction} that of process 0"
    cure = "set the clocks by NTP on every host: timedatectl set-ntp true, or chronyc makestep"
    yield (problem if skew > WORST_SKEW_S else warning)(seen, cure)


def same_versions(peers: Peers, own: Mapping[str, str]) -> Iterator[Finding]:
    """Whether all processes have the same packages."""
    if peers.count == 1:
        return
    said = [json.loads(text) for text in peers.all_say("versions", json.dumps(own), ANSWER_S)]
    different = differing(said)
    if different:
        yield problem(
            f"other packages on other processes: {'; '.join(different)}",
            "install the same versions on every host (pip install -c constraints), or start all "
            "from one image",
        )
    else:
        yield ok(f"the same versions everywhere (jax {own.get('jax')})")


def same_config(peers: Peers, own: Mapping[str, object]) -> Iterator[Finding]:
    """Whether all processes were given the same config."""
    if peers.count == 1:
        return
    told = json.dumps(own, sort_keys=True)
    said = [json.loads(text) for text in peers.all_say("config", told, ANSWER_S)]
    for process, other in enumerate(said):
        different = config.differences(said[0], other)
        if different:
            yield problem(
                f"process {process} has another config than process 0: {'; '.join(different[:3])}",
                "start every process with the same --config, overrides and files",
            )
            return
    yield ok("the same config everywhere")


def differing(said: list[dict[str, str]]) -> list[str]:
    """What differs from process 0's, as "jax 0.10.2 on process 0, 0.12.0 on process 1"."""
    found = []
    for name in sorted(set().union(*said)):
        values = [one.get(name, "not installed") for one in said]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            found.append(f"{name} {values[0]} on process 0, {values[other]} on process {other}")
    return found


def shared_storage(subject: Subject) -> Iterator[Finding]:
    """Whether all processes see one another's files at the output directory."""
    if subject.peers.count == 1:
        return
    subject.shared = False
    # The start-up check of a run, where there is one.
    check = getattr(rundir, "check_shared", None)
    if check is not None:
        check(subject.base)
    else:
        check_shared(subject.base, subject.peers)
    subject.shared = True
    yield ok(f"every process reads what the others write at {subject.base}")


def check_shared(directory: Path, peers: Peers) -> None:
    """Each process writes a file, and reads those of all.

    Raises:
        InputError: in every process, if one does not see another's file.
    """
    path = directory / f".jaxtrain-doctor-shared-{peers.index}-{secrets.token_hex(4)}"
    missing: list[str] = []
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(str(path))
            file.flush()
            os.fsync(file.fileno())
        paths = peers.all_say("shared/written", str(path), ANSWER_S)
        for process, other in enumerate(paths):
            try:
                seen = Path(other).read_text(encoding="utf-8")
            except OSError:
                seen = ""
            if seen != other:
                missing.append(f"process {peers.index} does not see the file of process {process}")
        said = peers.all_say("shared/seen", "; ".join(missing), ANSWER_S)
    finally:
        path.unlink(missing_ok=True)
    wrong = [one for one in said if one]
    if wrong:
        raise InputError(
            f"{directory} is not shared: {wrong[0]}: give --output-dir a place that every host "
            "mounts (NFS, Lustre, a network volume) under the same path"
        )


def others(peers: Peers, own: list[Finding]) -> Iterator[Finding]:
    """What the other processes found amiss, said by process 0; what all found is said once."""
    if peers.count == 1:
        return
    known = {(one.check, one.seen) for one in own}
    amiss = [one.as_dict() for one in own if one.level != "ok"]
    peers.say("findings", json.dumps({"host": socket.gethostname(), "amiss": amiss}))
    if peers.index:
        yield ok("process 0 says what all have found")
        return
    count = 0
    for process in range(1, peers.count):
        try:
            said = json.loads(peers.hear("findings", process, ANSWER_S))
        except Silent:
            yield problem(
                f"process {process} has not ended its own checks after {ANSWER_S:.0f} s",
                "see what it printed; start all processes at the same time",
            )
            continue
        for one in said["amiss"]:
            if (one["check"], one["seen"]) not in known:
                known.add((one["check"], one["seen"]))
                count += 1
                where = f"process {process} ({said['host']}), {one['group']}: {one['seen']}"
                yield Finding(level=one["level"], seen=where, cure=one["cure"])
    if not count:
        yield ok("the other processes have found nothing that this one has not")


def leave() -> None:
    """Ends the connection, so that the other processes do not take this one for dead."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
