"""Names a process, a device, or a link that delays the others, and what it is slow at.

Each process measures its steps (:mod:`jaxtrain.training.step_times`). A slow device looks, from
outside of the step, like any other device that waits for it. So GPUs are measured between steps, by
themselves (:mod:`jaxtrain.training.device_rates`). Virtual devices share the cores of the host, and
are not measured. In a collective of all devices, all wait for a slow link, so pairs of three or
more hosts exchange data between steps, too (:mod:`jaxtrain.training.link_rates`). All of it is
gathered from all processes, which judge it alike.
"""

import contextlib
import itertools
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.data import worker_count
from jaxtrain.distributed import process_group
from jaxtrain.errors import first_line
from jaxtrain.sharding import batch_sharding, replicated
from jaxtrain.storage import lock
from jaxtrain.training import device_rates, link_rates, step_times
from jaxtrain.training.device_rates import MeasuredRates, Rates
from jaxtrain.training.link_rates import LinkRates
from jaxtrain.training.step_times import Seconds, StepTimes

# What is slow: a device or a link, and at what.
_Key = TypeVar("_Key", bound=tuple[Any, Any])

# Fraction of the time that measurements of the devices and links may take.
_BUDGET = 0.01


class _Row(NamedTuple):
    """What is gathered from each device; the same for all devices of a process but their rates.

    Attributes:
        seconds: of its process.
        cost_s: seconds that the process's measurements took; NaN without any.
        rates: of the device.
        exchange_s: seconds of the device's exchanges with other hosts, by round.
    """

    seconds: Seconds
    cost_s: float
    rates: Rates
    exchange_s: tuple[float, ...]

    def flat(self) -> list[float]:
        """Returns the numbers in a row."""
        return [*self.seconds, self.cost_s, *self.rates, *self.exchange_s]

    @classmethod
    def of(cls, flat: Sequence[float]) -> "_Row":
        """Returns the row that :meth:`flat` made."""
        rest = iter(flat)
        seconds = Seconds(*itertools.islice(rest, len(Seconds._fields)))
        return cls(seconds, next(rest), Rates(next(rest), next(rest)), tuple(rest))


class _Twice(Generic[_Key]):
    """Confirms what two measurements in a row find to be slow, once.

    Attributes:
        suspected: what the newest measurement found for the first time.
    """

    def __init__(self) -> None:
        self.suspected: set[_Key] = set()
        self._confirmed: set[_Key] = set()

    def confirmed(self, found: Collection[_Key]) -> list[_Key]:
        """Takes what a measurement found; returns what is confirmed now."""
        new = self.suspected.intersection(found)
        self._confirmed |= new
        self.suspected = set(found) - self._confirmed
        return sorted(new)


class SlowProcesses:
    """Gathers what each process does outside of steps, and prints which one is slow, and at what.

    Args:
        mesh: over all devices.
        say: prints a line.
        build: returns what measures the devices of this process; None if nothing does.
        clock: monotonic clock, seconds.
        throttled: for how many seconds a CPU limit has stopped this process so far.
        links: as ``build``, the links between hosts; the same in all processes.

    Attributes:
        times: receives the steps of this process.
    """

    def __init__(
        self,
        mesh: Mesh,
        say: Callable[[str], None],
        build: Callable[[Mesh], Callable[[], MeasuredRates] | None] = device_rates.of_gpus,
        clock: Callable[[], float] = time.monotonic,
        throttled: Callable[[], float] = worker_count.throttled_s,
        links: Callable[[Mesh, Sequence[str]], LinkRates | None] = link_rates.between_hosts,
    ) -> None:
        self.times = StepTimes(clock)
        self._throttled, self._throttled_s = throttled, throttled()
        self._on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._mesh, self._say, self._build, self._build_links = mesh, say, build, links
        self._measure: Callable[[], MeasuredRates] | None = None
        self._links: LinkRates | None = None
        self._named: set[tuple[int, str]] = set()
        # Devices: their index, and at what they are slow.
        self._slow_devices = _Twice[tuple[int, str]]()
        # Links: of one or two hosts, and of their devices with this index on their host.
        self._slow_links = _Twice[tuple[tuple[int, ...], int]]()
        # The same in all processes, which measure their devices at the same time.
        self._step_s = 0.0
        self._owed_s = 0.0  # seconds of steps until the measurements so far are paid for
        self._each_s = 0.0  # seconds of steps that pay for one of them
        self._pending: tuple[int, jax.Array] | None = None
        self._where = batch_sharding(mesh)
        self._devices = list(mesh.devices.flat)
        self._gather = jax.jit(lambda values: values, out_shardings=replicated(mesh))
        self._of_all = process_group.Exchange(mesh, largest=("failed",))
        self._hosts = process_group.gather("host of a process", socket.gethostname())
        machines = process_group.gather("machine of a process", lock.machine())
        self._machines = link_rates.machine_names(self._hosts, machines)

    def started(self) -> None:
        """Drops the steps so far, which include the start; prepares to measure devices and links.

        All processes must call it. Links are measured once, for errors: the first exchange connects
        the hosts.
        """
        self.times.forget()
        self._throttled_s = self._throttled()
        with self._reported():
            self._measure = self._build(self._mesh)
        machines = [self._machines[device.process_index] for device in self._devices]
        failure = ""
        try:
            self._links = self._build_links(self._mesh, machines)
        except Exception as error:  # a measurement must not end the run
            failure = first_line(error)
        if (failure or self._links is not None) and self._all_can_exchange(failure):
            self._exchanged()

    def stepped(self, input_s: float) -> None:
        """Ends a step, which waited ``input_s`` for its batch; judges what was gathered before it.

        The devices gather it between two steps, so it is there once the second one is complete.
        """
        self.times.stepped(input_s)
        if self._pending is None:
            return
        with self.times.inside("devices"):
            (steps, pending), self._pending = self._pending, None
            table = [_Row.of(row) for row in np.asarray(pending).tolist()]
        self._judge(steps, table)

    def logged(self) -> None:
        """Contributes this process's steps. All must call it after the same steps."""
        steps = len(self.times)
        medians = self.times.medians()
        if medians is None or (len(self._hosts) == 1 and self._measure is None):
            return
        before_s, self._throttled_s = self._throttled_s, self._throttled()
        limited_s = (self._throttled_s - before_s) / steps
        medians = medians._replace(limited=min(limited_s, medians.step))
        costs, rates = list[float](), dict[jax.Device, Rates]()
        rounds = 0 if self._links is None else len(self._links.rounds)
        exchange_s = dict[jax.Device, list[float]]()
        # The same in all processes: they all take part in the exchanges, or none does.
        suspects = self._slow_devices.suspected or self._slow_links.suspected
        # A suspicion is confirmed at once, but not if measurements keep finding other suspects.
        ahead_s = self._each_s if suspects else 0.0
        due = self._owed_s <= steps * self._step_s + ahead_s
        if self._measure is not None and due:
            with self._reported():
                found = self._measure()
                costs.append(found.cost_s)
                rates = dict(zip(self._mesh.local_devices, found.rates, strict=True))
        exchanged = self._exchanged() if self._links is not None and due else None
        if exchanged is not None:
            costs.append(exchanged.cost_s)
            exchange_s = dict(zip(self._mesh.local_devices, exchanged.seconds, strict=True))
        cost_s = sum(costs) if costs else math.nan
        missing, none = Rates(math.nan, math.nan), [math.nan] * rounds

        def row(index: Any) -> np.ndarray:
            device = self._devices[index[0].start or 0]
            links = tuple(exchange_s.get(device, none))
            own = _Row(medians, cost_s, rates.get(device, missing), links)
            return np.asarray([own.flat()], np.float32)

        shape = (len(self._devices), len(_Row(medians, cost_s, missing, tuple(none)).flat()))
        values = jax.make_array_from_callback(shape, self._where, row)
        self._pending = steps, self._gather(values)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Measures no devices any longer if the runtime cannot."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            self._measure = None
            self._say(f"slow devices will not be named: {first_line(error)}")

    def _exchanged(self) -> link_rates.LinkSeconds | None:
        """Exchanges data with other hosts; None, and never again, if a process cannot.

        A process that fails inside of an exchange leaves its partner waiting. So all first agree
        that each has the memory.
        """
        assert self._links is not None, "links are measured"
        found, failure = None, ""
        try:
            self._links.check_memory()
        except Exception as error:
            failure = first_line(error)
        if not self._all_can_exchange(failure):
            return None
        try:
            found = self._links()
        except Exception as error:
            failure = first_line(error)
        return found if self._all_can_exchange(failure) else None

    def _all_can_exchange(self, failure: str) -> bool:
        """Returns whether no process failed; otherwise prints why, and measures no more links."""
        if not self._of_all.now({"failed": float(bool(failure))})["failed"]:
            return True
        self._links = None
        self._slow_links.confirmed(())
        reasons = process_group.gather("failure to measure links", failure)
        process = next(process for process, reason in enumerate(reasons) if reason)
        self._say(
            "slow links between hosts will not be named: process "
            f"{process} on host {self._hosts[process]} cannot measure them ({reasons[process]})"
        )
        return False

    def _judge(self, steps: int, table: list[_Row]) -> None:
        processes = {
            device.process_index: row.seconds
            for device, row in zip(self._devices, table, strict=True)
        }
        self._judge_processes([processes[process] for process in range(len(processes))])
        self._step_s = max(row.seconds.step for row in table)
        self._owed_s -= steps * self._step_s
        costs = [row.cost_s for row in table if not math.isnan(row.cost_s)]
        if costs:
            self._each_s = max(costs) / _BUDGET
            self._owed_s = max(self._owed_s, 0.0) + self._each_s
            self._judge_devices([row.rates for row in table])
            self._judge_links([row.exchange_s for row in table])

    def _judge_processes(self, seconds: list[Seconds]) -> None:
        found = step_times.slowest(seconds, on_cpu=self._on_cpu) if len(seconds) > 1 else None
        if found is None or (found.process, found.kind) in self._named:
            return
        self._named.add((found.process, found.kind))
        self._say(step_times.described(found, self._hosts[found.process]))

    def _judge_devices(self, rates: list[Rates]) -> None:
        """Names the devices that are slow for the second time in a row."""
        found = {(one.device, one.kind): one for one in device_rates.slow_devices(rates)}
        for key in self._slow_devices.confirmed(found.keys()):
            device = self._devices[key[0]]
            host = self._hosts[device.process_index]
            self._say(device_rates.described(found[key], device, host))

    def _judge_links(self, exchange_s: Sequence[Sequence[float]]) -> None:
        """Names the hosts and links that are slow for the second time in a row."""
        if self._links is None:
            return
        found = self._links.slow(exchange_s)
        new = self._slow_links.confirmed(found.keys())
        for line in self._links.described({key: found[key] for key in new}):
            self._say(line)
