"""Checks that the processes connect, and compares their clocks, configs, code, and storage."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jaxtrain.distributed import cluster_env, consistency, key_value, process_group
from jaxtrain.distributed.key_value import KeyValueStore, NoAnswer
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training import run_directory

ANSWER_S = 10.0
# For a name to resolve, and again for the other processes.
_MEET_S = 25.0
_ROUNDS = 3
WARN_SKEW_S, WORST_SKEW_S = 1.0, 30.0


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "processes"; the first one connects.

    Args:
        subject: its ``store`` and ``processes`` are set.
    """
    return {
        "coordinator": lambda: coordinator(subject),
        "clocks": lambda: clocks(subject.store),
        "same run": lambda: same(subject.store, consistency.facts(subject.run, {})),
    }


def coordinator(subject: Subject) -> Iterator[Finding]:
    """Connects this process to the others, and checks that they all connect."""
    environment, subject.processes = subject.environment, None
    try:
        cluster = cluster_env.find(environment)
        subject.processes = 1 if cluster is None else cluster.count
        wait_s = min(_MEET_S, cluster_env.patience(environment))
        impatient = {**environment, cluster_env.PATIENCE: str(wait_s)}
        process_group.connect(impatient, subject.simulate_devices)
    except (InputError, RunAgain) as error:  # its one line names the fix
        yield Finding(level="problem", seen=str(error))
        process_group.connect({}, subject.simulate_devices)  # this process continues alone
        return
    if cluster is None:
        yield ok("single process: nothing to synchronize")
        return
    subject.store = key_value.of_run()
    subject.store.barrier("start", ANSWER_S)
    names = subject.store.gather("host", socket.gethostname(), ANSWER_S)
    hosts = len(set(names))
    yield ok(
        f"{cluster.count} processes on {hosts} host{'s' if hosts > 1 else ''} have connected at "
        f"{cluster.coordinator} ({cluster.scheme})"
    )


def clocks(store: KeyValueStore, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Compares the hosts' clocks: each process reads its own when all leave a barrier.

    Repeats this and takes the smallest difference, since a process may leave the barrier late.
    """
    if store.count == 1:
        return
    apart = [float("inf")] * store.count
    for _ in range(_ROUNDS):
        store.barrier("clock", ANSWER_S)
        read = [float(t) for t in store.gather("clock", repr(clock()), ANSWER_S)]
        for process, t in enumerate(read):
            apart[process] = min(apart[process], t - read[0], key=abs)
    worst = max(range(store.count), key=lambda process: abs(apart[process]))
    skew = abs(apart[worst])
    if skew <= WARN_SKEW_S:
        yield ok(f"clocks are at most {skew:.3f} s apart")
        return
    direction = "ahead of" if apart[worst] > 0 else "behind"
    seen = f"the clock of process {worst} is {skew:.1f} s {direction} that of process 0"
    cure = (
        "synchronize the clocks with NTP on every host: timedatectl set-ntp true, or chronyc "
        "makestep"
    )
    yield (problem if skew > WORST_SKEW_S else warning)(seen, cure)


def same(store: KeyValueStore, own: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Checks that all processes have the same config, code, and packages.

    Args:
        store: the run's key-value store.
        own: the result of :func:`jaxtrain.distributed.consistency.facts` in this process.
    """
    if store.count == 1:
        return
    every = [json.loads(text) for text in store.gather("facts", json.dumps(own), ANSWER_S)]
    different = consistency.compare(every)
    if different:  # its one line names the fix
        yield Finding(level="problem", seen=different)
    else:
        yield ok("the same config, code, and packages in all processes")


def shared_storage(subject: Subject) -> Iterator[Finding]:
    """Checks that all processes see one another's files at the output directory."""
    if subject.url is not None:
        return
    store = subject.store
    if store.count == 1:
        return
    subject.shared = False
    # Process 0's, like the run directory. The timeout covers processes still busy with their data.
    base = Path(store.gather("output directory", str(subject.base), 6 * ANSWER_S)[0])
    run_directory.check_shared(base)
    subject.shared = True
    yield ok(f"every process reads what the others write at {base}")


def others(store: KeyValueStore, own: list[Finding]) -> Iterator[Finding]:
    """Has process 0 report the other processes' warnings and problems, each only once."""
    if store.count == 1:
        return
    known = {(one.check, one.seen) for one in own}
    amiss = [one.as_dict() for one in own if one.level != "ok"]
    store.publish("findings", json.dumps({"host": socket.gethostname(), "amiss": amiss}))
    if store.index:
        yield ok("process 0 reports the findings of all processes")
        return
    count = 0
    for process in range(1, store.count):
        try:
            theirs = json.loads(store.wait_for("findings", process, ANSWER_S))
        except NoAnswer:
            yield problem(
                f"process {process} did not finish its checks within {ANSWER_S:.0f} s",
                "see what it printed; start all processes at the same time",
            )
            continue
        for one in theirs["amiss"]:
            if (one["check"], one["seen"]) not in known:
                known.add((one["check"], one["seen"]))
                count += 1
                where = f"process {process} ({theirs['host']}), {one['group']}: {one['seen']}"
                yield Finding(level=one["level"], seen=where, cure=one["cure"])
    if not count:
        yield ok("the other processes have no further warnings or problems")


def leave() -> None:
    """Closes the connection, so that the other processes do not consider this one dead."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
