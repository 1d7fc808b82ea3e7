"""Checks that the processes connect, and compares their clocks, configs, code, and storage."""

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.distributed import cluster_env, consistency, key_value, process_group
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor.finding import Check, Finding, ok, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.formats import counted
from jaxtrain.training import run_directory

ANSWER_S = 10.0
# For a name to resolve, and again for the other processes.
_MEET_S = 25.0
_ROUNDS = 3
_SKEW_S = 1.0


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "processes"; the first one connects."""
    return {
        "coordinator": lambda: coordinator(subject),
        "clocks": lambda: clocks(subject.store),
        "same run": lambda: same(subject.store, consistency.facts(subject.run, {})),
    }


def coordinator(subject: Subject) -> Iterator[Finding]:
    """Connects this process to the others, like a run."""
    environment = subject.environment
    wait_s = min(_MEET_S, cluster_env.patience(environment))
    impatient = {**environment, cluster_env.PATIENCE: str(wait_s)}
    process_group.connect(impatient, subject.simulate_devices)
    cluster = cluster_env.find(environment)
    if cluster is None:
        subject.connected = True
        yield ok("single process: nothing to synchronize")
        return
    store = key_value.of_run()
    hosts = len(set(store.gather("host", socket.gethostname(), ANSWER_S)))
    subject.store, subject.connected = store, True
    yield ok(
        f"{cluster.count} processes on {counted(hosts, 'host')} have connected at "
        f"{cluster.coordinator} ({cluster.scheme})"
    )


def clocks(store: KeyValueStore, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compares the hosts' clocks: each process reads its own when all leave a barrier.

    Repeats this and takes the smallest difference, since a process may leave the barrier late.
    """
    if store.count == 1:
        return
    skews = [float("inf")] * store.count
    for _ in range(_ROUNDS):
        store.barrier("clock", ANSWER_S)
        read = [float(t) for t in store.gather("clock", repr(clock()), ANSWER_S)]
        skews = [min(before, t - read[0], key=abs) for before, t in zip(skews, read, strict=True)]
    skew = max(skews, key=abs)
    if abs(skew) <= _SKEW_S:
        yield ok(f"clocks are at most {abs(skew):.3f} s apart")
        return
    direction = "ahead of" if skew > 0 else "behind"
    yield warning(
        f"the clock of process {skews.index(skew)} is {abs(skew):.1f} s {direction} that of "
        "process 0",
        "synchronize the clocks with NTP on every host: timedatectl set-ntp true, or chronyc "
        "makestep",
    )


def same(store: KeyValueStore, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks, like a run, that all processes have the same config, code, and packages."""
    if store.count > 1:
        consistency.check(facts, store)
        yield ok("the same config, code, and packages in all processes")


def shared_storage(subject: Subject) -> Iterator[Finding]:
    """Checks, like a run, that all processes see one another's files at the output directory."""
    store = subject.store
    if subject.url is not None or store.count == 1:
        return
    subject.shared = False
    # Process 0's, like the run directory. The timeout covers processes still busy with their data.
    base = Path(store.gather("output directory", str(subject.base), 6 * ANSWER_S)[0])
    run_directory.check_shared(base)
    subject.shared = True
    yield ok(f"every process reads what the others write at {base}")


def of_other_processes(store: KeyValueStore, findings: list[Finding]) -> Iterator[Finding]:
    """Has process 0 report the other processes' warnings and problems, each only once."""
    if store.count == 1:
        return
    amiss = [dataclasses.asdict(finding) for finding in findings if finding.level != "ok"]
    text = json.dumps({"host": socket.gethostname(), "amiss": amiss})
    texts = store.gather("findings", text, ANSWER_S)
    if store.index:
        yield ok("process 0 reports the findings of all processes")
        return
    known = {(finding.check, finding.seen) for finding in findings}
    reported = len(known)
    for process, theirs in enumerate(map(json.loads, texts)):
        for finding in (Finding(**fields) for fields in theirs["amiss"]):
            if (finding.check, finding.seen) not in known:
                known.add((finding.check, finding.seen))
                seen = f"process {process} ({theirs['host']}), {finding.group}: {finding.seen}"
                yield Finding(level=finding.level, seen=seen, cure=finding.cure)
    if len(known) == reported:
        yield ok("the other processes have no further warnings or problems")


def leave() -> None:
    """Closes the connection, so that the other processes do not consider this one dead."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
