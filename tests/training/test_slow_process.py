"""A process that delays the others is named, with what it is slow at."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from program import CHECKOUT, TINY_MLM, two_processes, write_corpus
from training.test_step_times import Clock

from jaxtrain import config
from jaxtrain.sharding import make_mesh
from jaxtrain.training import link_rates
from jaxtrain.training.device_rates import MeasuredRates, Rates
from jaxtrain.training.link_rates import ExchangeSizes, LinkRates
from jaxtrain.training.slow_process import SlowProcesses

USUAL, COST_S = Rates(700e12, 2.9e12), 0.5


class OneProcess:
    """A process with several devices, whose rates a test sets; a step takes 1 s.

    Attributes:
        said: what was printed.
        rates: that the next measurement finds; an error is raised.
        measured: the times at which the devices were measured.
    """

    def __init__(
        self, devices: int = 8, links: Callable[[], LinkRates | None] = lambda: None
    ) -> None:
        self.said: list[str] = []
        self.rates: list[Rates] | Exception = [USUAL] * devices
        self.measured: list[float] = []
        self._clock = Clock()
        settings = config.Mesh(data=1, fsdp=devices, shard="none")
        mesh = make_mesh(settings, jax.devices()[:devices])
        self._slow = SlowProcesses(
            mesh, self.said.append, lambda _: self._measure, self._clock, links=lambda *_: links()
        )
        self._slow.started()

    def _measure(self) -> MeasuredRates:
        self.measured.append(self._clock.now)
        if isinstance(self.rates, Exception):
            raise self.rates
        return MeasuredRates(self.rates, COST_S)

    def log(self, slow: dict[int, Rates] | None = None, steps: int = 10) -> list[str]:
        """Makes steps until one is logged, and one more; returns what was printed."""
        if slow is not None:
            self.rates = [slow.get(place, USUAL) for place in range(8)]
        before = len(self.said)
        for _ in range(steps):
            self._clock.now += 1.0
            self._slow.stepped(0.0)
        self._slow.logged()
        self._clock.now += 1.0
        self._slow.stepped(0.0)
        return self.said[before:]


def test_a_slow_device_is_named_after_a_second_measurement() -> None:
    run = OneProcess()
    slow = {3: USUAL._replace(flops=500e12)}
    assert run.log(slow) == []
    (said,) = run.log(slow)
    device = jax.devices()[3]
    assert said.startswith(f"device {device.id} (cpu) of process 0 on host ")
    assert "slows down the others (compute): it computes matmuls at 500 TFLOP/s, the " in said
    assert "others at 700 TFLOP/s (measured twice)" in said
    assert run.log(slow) == run.log(slow) == []  # named once
    both = slow | {6: USUAL._replace(copied=2.4e12)}
    run = OneProcess()
    assert run.log(both) == []
    assert [one.partition("others (")[2].partition(")")[0] for one in run.log(both)] == [
        "compute",
        "memory copies",
    ]


def test_a_device_that_was_slow_once_is_not_named() -> None:
    run = OneProcess()
    slow = [{place: USUAL._replace(flops=500e12)} for place in (3, 4)]
    for rates in (slow[0], {}, slow[0], slow[1], {}):
        assert run.log(rates, steps=60) == []
    # Within the spread of equal devices.
    for _ in range(3):
        assert run.log({3: Rates(620e12, 2.6e12)}, steps=60) == []


def test_devices_are_measured_for_a_hundredth_of_the_time() -> None:
    run = OneProcess()
    for _ in range(20):
        run.log()
    # A measurement takes half a second, and a step is logged every 11 s.
    assert run.measured == [10.0, 65.0, 120.0, 175.0]
    run.log({0: USUAL._replace(flops=1e12)}, steps=60)
    before = len(run.measured)
    run.log()  # a suspicion is confirmed at once
    run.log()
    assert len(run.measured) == before + 1
    assert len(run.said) == 1


def test_suspicions_that_change_cost_a_hundredth_of_the_time() -> None:
    """Such as on a network that others use, where each measurement finds another slow link."""
    run = OneProcess()
    for number in range(200):
        run.log({number % 8: USUAL._replace(flops=500e12)})
    assert COST_S * len(run.measured) <= 0.01 * 200 * 11 + 2 * COST_S
    assert run.said == []


def test_devices_that_cannot_be_measured_are_not_named() -> None:
    run = OneProcess()
    missing = Rates(float("nan"), float("nan"))
    slow = {1: missing, 2: missing, 3: Rates(1e12, 1e12)}
    assert run.log(slow) == []
    assert len(run.log(slow)) == 2  # compared with the others
    run = OneProcess(devices=1)
    assert run.log() == run.log(steps=60) == []
    run.rates = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert run.log(steps=60) == [
        "slow devices will not be named: RESOURCE_EXHAUSTED: Out of memory"
    ]
    assert run.log(steps=60) == []
    assert len(run.measured) == 3


class Links(LinkRates):
    """The links of three hosts with two devices each, whose speed a test sets.

    Attributes:
        seconds: of each device, in each round, that the next measurement finds.
        measured: how often they were measured.
        error: raised by the next measurement.
        full: raised by the next look at the memory.
    """

    error: Exception | None = None
    full: Exception | None = None

    def __init__(self) -> None:
        hosts = ["n1"] * 2 + ["n2"] * 2 + ["n3"] * 2
        super().__init__(jax.devices()[:6], hosts, ExchangeSizes(10**9, 1, 1, least_s=0.2))
        self.seconds: list[list[float]] = []
        self.measured = 0
        self.usual()

    def usual(self, *slow: tuple[int, float]) -> None:
        """Sets the seconds of all exchanges of some devices; the others take 0.1 s."""
        self.seconds = [[dict(slow).get(place, 0.1)] * 3 for place in range(6)]

    def check_memory(self) -> None:
        if self.full is not None:
            raise self.full

    def __call__(self) -> link_rates.LinkSeconds:
        self.measured += 1
        if self.error is not None:
            raise self.error
        return link_rates.LinkSeconds(self.seconds, COST_S)


def test_a_slow_link_is_named_after_a_second_measurement() -> None:
    links = Links()
    run = OneProcess(6, links=lambda: links)
    links.usual((4, 0.4), (5, 0.5))
    assert run.log() == []
    (said,) = run.log()
    assert said.startswith(
        "host n3 slows down the others (communication): it exchanges data with other hosts at "
        "4 GB/s, the others at 20 GB/s (measured twice): check the cable, the port, and the "
    )
    assert run.log(steps=120) == run.log() == []  # named once
    links.usual((1, 0.4))
    assert run.log(steps=120) == []
    (said,) = run.log()
    device = jax.devices()[1]
    assert said.startswith(
        f"device {device.id} (cpu) of process 0 on host n1 slows down the others (communication): "
        "it exchanges data with other hosts at 2.5 GB/s, the others at 10 GB/s (measured twice): "
    )


def test_a_slow_link_between_two_hosts_is_named() -> None:
    links = Links()
    run = OneProcess(6, links=lambda: links)
    for one in links.seconds[:4]:
        one[links.rounds.index([(0, 1)])] = 0.5
    assert run.log() == []
    (said,) = run.log()
    assert said.startswith(
        "the link between host n1 and host n2 slows down the others (communication): it carries "
        "data at 4 GB/s, the others at 20 GB/s (measured twice): "
    )
    links.usual()
    links.seconds[3][links.rounds.index([(1, 2)])] = 0.5
    run.log(steps=240)  # the confirmation is paid for, too
    (said,) = run.log()
    ends = [f"device {jax.devices()[place].id} (cpu) of process 0 on host" for place in (3, 5)]
    assert said.startswith(f"the link between {ends[0]} n2 and {ends[1]} n3 slows down the others")


def test_a_link_that_was_slow_once_is_not_named() -> None:
    links = Links()
    run = OneProcess(6, links=lambda: links)
    for slow in ([(4, 0.4)], [], [(4, 0.4)], [(2, 0.4)], [], [(2, 0.29)], [(2, 0.29)]):
        links.usual(*slow)
        assert run.log(steps=120) == []


def test_devices_and_links_are_measured_for_a_hundredth_of_the_time() -> None:
    links = Links()
    run = OneProcess(6, links=lambda: links)
    for _ in range(20):
        run.log()
    # Both take a second together, and a step is logged every 11 s.
    assert run.measured == [10.0, 120.0]
    assert links.measured == 1 + 2  # once at the start
    links.usual((4, 0.4))
    run.log(steps=60)
    run.log()  # a suspicion is confirmed at once
    run.log()
    assert links.measured == 1 + len(run.measured) == 1 + 4


@pytest.mark.parametrize("when", ["compiling", "allocating", "at once", "later"])
def test_a_run_whose_links_cannot_be_measured_continues(when: str) -> None:
    links = Links()
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    def build() -> LinkRates:
        if when == "compiling":
            raise error
        return links

    links.full = error if when == "allocating" else None
    links.error = error if when == "at once" else None
    run = OneProcess(6, build)
    if when == "later":
        links.usual((4, 0.4))
        assert run.log() == []
        links.full = error
        run.log()
    (said,) = run.said
    assert said.startswith("slow links between hosts will not be named: process 0 on host ")
    assert said.endswith(" cannot measure them (RESOURCE_EXHAUSTED: Out of memory)")
    links.full = links.error = None
    links.usual((4, 0.4), (5, 0.5))
    assert run.log(steps=120) == run.log() == []
    assert links.measured == {"at once": 1, "later": 2}.get(when, 0)
    before = len(run.measured)
    assert run.log() == run.log() == []
    assert len(run.measured) <= before + 1  # no suspicion remains
    run.rates = [USUAL] * 5 + [Rates(1e12, 1e12)]
    assert run.log(steps=120) == []
    assert len(run.log()) == 2  # devices are still measured


def test_virtual_devices_are_not_measured() -> None:
    said: list[str] = []
    mesh = make_mesh(config.Mesh(data=1, fsdp=8, shard="none"))
    slow = SlowProcesses(mesh, said.append)
    slow.started()
    for _ in range(10):
        slow.stepped(0.0)
    slow.logged()
    assert len(slow.times) == 0
    assert said == []


def _flags(directory: Path, steps: int, log_every: int) -> tuple[object, ...]:
    write_corpus(directory)
    mesh = ("--simulate-devices", 2, "--mesh.fsdp", 2, "--output-dir", "run")
    length = ("--loop.steps", steps, "--loop.log_every", log_every, "--checkpoint.every", steps)
    return (*TINY_MLM, *mesh, *length, "--data.path", "corpus")


def _said(directory: Path, **variables: dict[str, str]) -> str:
    """Returns what process 0 of a run of two processes prints."""
    with two_processes(directory, *_flags(directory, 20, 6), **variables) as started:
        outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return outputs[0]


# Process 1 sleeps between steps, or while it waits for its examples.
_SLEEPS = """
import sys, threading, time
def later():
    while "jaxtrain.training.session" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.5)
    from jaxtrain.data.pipeline import TrainingBatches
    from jaxtrain.training.progress import Progress
    owner, name = (Progress, "push") if KIND == "program" else (TrainingBatches, "__next__")
    real = getattr(owner, name)
    def sleeping(self, *arguments):
        time.sleep(0.5)
        if KIND == "input":
            self.wait_s += 0.5
        return real(self, *arguments)
    setattr(owner, name, sleeping)
threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["program", "input"])
def test_a_slow_process_is_named_within_two_logging_intervals(tmp_path: Path, kind: str) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(f"KIND = {kind!r}\n{_SLEEPS}")
    said = _said(tmp_path, second={"PYTHONPATH": f"{tmp_path / 'slow'}:{CHECKOUT}"})
    named = [line for line in said.splitlines() if "slows down the others" in line]
    assert len(named) == 1, said
    assert "process 1 on host " in named[0]
    assert f"({kind})" in named[0]
    assert "step 12/20" not in said[: said.index(named[0])], said  # logged: 1, 6, 12, 18, 20


# Takes the place of the measurement of GPUs.
_RATES = """
import sys, threading, time
def later():
    while "jaxtrain.training.session" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.5)
    from jaxtrain.training.device_rates import MeasuredRates, Rates
    from jaxtrain.training.slow_process import SlowProcesses
    real = SlowProcesses.__init__
    def measured(mesh):
        rates = [Rates(7e14, 1e12 if one.process_index else 3e12) for one in mesh.local_devices]
        return lambda: MeasuredRates(rates, 1e-4)
    SlowProcesses.__init__ = lambda self, mesh, say: real(self, mesh, say, measured)
threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.long
def test_a_slow_device_of_another_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates" / "sitecustomize.py").write_text(_RATES)
    said = _said(tmp_path, both={"PYTHONPATH": f"{tmp_path / 'rates'}:{CHECKOUT}"})
    (named,) = [line for line in said.splitlines() if "slows down the others" in line]
    assert re.match(r"device \d+ \(cpu\) of process 1 on host ", named)
    assert "(memory copies): it copies memory at 1e+03 GB/s, the others at 3e+03 GB/s (" in named
    assert "step 18/20" not in said[: said.index(named)], said  # measured at steps 6 and 12


# Takes the place of the measurement of links, which fails in process 1.
_LINKS = """
import sys, threading, time
def later():
    while "jaxtrain.training.session" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.5)
    import jax
    from jaxtrain.training import link_rates
    from jaxtrain.training.slow_process import SlowProcesses
    real = SlowProcesses.__init__
    class Links(link_rates.LinkRates):
        def check_memory(self):
            if jax.process_index():
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    def build(mesh, hosts):
        sizes = link_rates.ExchangeSizes(2**10, 1, 1)
        return Links(list(mesh.devices.flat), ["n1", "n2"], sizes)
    SlowProcesses.__init__ = lambda self, mesh, say: real(self, mesh, say, links=build)
threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.long
def test_links_that_one_process_cannot_measure_are_measured_by_none(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "sitecustomize.py").write_text(_LINKS)
    said = _said(tmp_path, both={"PYTHONPATH": f"{tmp_path / 'links'}:{CHECKOUT}"})
    (line,) = [line for line in said.splitlines() if "will not be named" in line]
    assert "process 1 on host " in line
    assert line.endswith(" cannot measure them (RESOURCE_EXHAUSTED: Out of memory)")
    assert "step 20/20" in said


@contextlib.contextmanager
def _cpu_limit(process: int) -> Iterator[Callable[[float], None]]:
    """Puts a process into a cgroup of its own; yields a function that sets its limit, in cores."""
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    groups = Path("/sys/fs/cgroup" if version_2 else "/sys/fs/cgroup/cpu")
    own = groups / f"jaxtrain-test-{process}"
    if version_2:
        (groups / "cgroup.subtree_control").write_text("+cpu")
    own.mkdir()

    def limit(cores: float) -> None:
        quota = f"{100_000 * cores:.0f}"
        if version_2:
            (own / "cpu.max").write_text(f"{quota} 100000")
        else:
            (own / "cpu.cfs_quota_us").write_text(quota)

    try:
        (own / "cgroup.procs").write_text(str(process))
        yield limit
    finally:
        for each in (own / "cgroup.procs").read_text().split():
            (groups / "cgroup.procs").write_text(each)
        own.rmdir()


@pytest.mark.long
def test_a_process_with_a_cpu_limit_is_named_within_two_logging_intervals(tmp_path: Path) -> None:
    flags = _flags(tmp_path, steps=2000, log_every=20)
    lines: list[str] = []
    logged = 0
    with two_processes(tmp_path, *flags) as (first, second), _cpu_limit(second.pid) as limit:
        assert first.stdout is not None
        for line in first.stdout:
            lines.append(line)
            if "slows down the others" in line or logged == 3:
                break
            if line.startswith("step 20/"):
                limit(0.05)  # also much less than a busy machine gives it
            # The limit holds from a moment within the first interval.
            logged += line.startswith("step ") and not line.startswith(("step 1/", "step 20/"))
    assert lines[-1].startswith("process 1 on host "), "".join(lines)
    assert "(CPU limit): it is stopped by its CPU limit for " in lines[-1]
    assert logged <= 2, "".join(lines)


@pytest.mark.long
def test_equal_processes_are_not_named(tmp_path: Path) -> None:
    said = _said(tmp_path)
    assert "step 20/20" in said
    assert "slows down" not in said
