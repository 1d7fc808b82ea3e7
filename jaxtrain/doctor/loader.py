"""The data: does it open, what in it is broken, and is the loader fast enough for the step?"""

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxtrain.config import invocation
from jaxtrain.data import pipeline, sampler
from jaxtrain.data.quarantine import Quarantine, too_many
from jaxtrain.data.source import Source, Sources
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import Subject, cores, counted
from jaxtrain.errors import BadExample
from jaxtrain.interop import weights
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.hardware import peak_bf16_flops
from jaxtrain.training import preflight

_TRIAL_S = 3.0
_LONGEST_S = 20.0
_BATCH_S = 0.3  # time that one worker should take for a batch of the trial
_TRIED = 4  # examples that are made to find that time
_NAMED = 5  # broken files

# Shares of the card's peak between which a step runs; assumed. A small model is bound by memory and
# not by arithmetic, and only a compiler knows how much it moves.
_LEAST_MFU, _MOST_MFU = 0.1, 0.5


@dataclasses.dataclass(frozen=True)
class Rate:
    """What a loader gives.

    Attributes:
        examples_per_second: measured; None where hardly anything came in time.
        workers: that gave it; 0 is the main process.
        one: examples/s that one core makes alone, measured.
    """

    examples_per_second: float | None
    workers: int
    one: float


@dataclasses.dataclass(frozen=True)
class NeededRate:
    """What the step takes, examples/s of one process, predicted.

    Attributes:
        least: by a step that makes little of the card.
        most: by one that makes much of it.
        how: it was predicted.
    """

    least: float
    most: float
    how: str


def checks(subject: Subject) -> dict[str, Check]:
    """The group "data"."""
    opened: list[Sources] = []
    return {
        "inputs": lambda: inputs(subject),
        "open": lambda: opening(subject, opened),
        "broken files": lambda: broken(subject, opened),
        "same data": lambda: same(opened, subject.store),
        "loader": lambda: trial(subject, opened),
    }


def inputs(subject: Subject) -> Iterator[Finding]:
    """Whether the files that a run begins with are there, and are what the config asks for."""
    run = subject.run
    missing = list(preflight.unreadable(run, resumes=subject.resumes, data=False))
    if run.data.path is not None:
        missing += run.data.problems(run.model) if hasattr(run.data, "problems") else []
    for line in missing:  # each names its cure
        yield Finding(level="problem", seen=line)
    if missing:
        return
    if run.model.init_from is not None and not subject.resumes:
        source = expanded(run.model.init_from)
        _, notes = weights.params_for(source, run.model, subject.built.definition.params)
        yield ok("; ".join([f"model.init_from {source} fits the model", *notes]))
    if hasattr(run.model, "frozen") and (read := run.model.frozen()):
        yield ok(f"{len(read)} arrays of weights that losses take are there")


def opening(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Whether the data opens as a run would open it; it makes the same caches."""
    data = subject.run.data
    if data.path is None and not data.demo:
        yield warning(
            f"{subject.run.name} has no data of its own: neither data nor loader were looked at",
            "name it with --data.path, as for the run",
        )
        return
    if hasattr(data, "problems") and data.problems(subject.run.model):
        return  # inputs() has named them
    opened.append(data.open(subject.run.model, seed=subject.run.seed, say=lambda line: None))
    yield ok(opened[0].summary)


def broken(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Files that cannot be used, found while opening."""
    for sources in opened:
        if not sources.bad:
            continue
        count, named = len(sources.bad), _named(list(sources.bad))
        complaint = too_many(count, sources.files, subject.run.data.max_bad_share)
        if complaint:
            yield problem(
                f"{complaint}: {named}", "mend or remove them, or raise --data.max_bad_share"
            )
        else:
            share = (
                f"{count} of {sources.files} input files are broken ({count / sources.files:.1%})"
            )
            yield warning(
                f"{share}: {named}", "mend or remove them; the run replaces them by others"
            )


def same(opened: list[Sources], store: KeyValueStore) -> Iterator[Finding]:
    """Whether all processes see the same examples."""
    if store.count == 1:
        return
    own = opened[0].train.fingerprint if opened else "none"
    said = store.gather("fingerprint", own, 3 * ANSWER_S)
    other = next((process for process, one in enumerate(said) if one != said[0]), None)
    if other is not None:
        yield problem(
            f"process {other} sees other data ({said[other][:12]}) than process 0 ({said[0][:12]})",
            "give every process the same files, as on storage that all of them mount",
        )
    elif opened:
        yield ok("the same data everywhere")


def trial(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """A short run of the real pipeline with the config's workers, against what the step takes."""
    for sources in opened:
        data = subject.run.data
        quarantine = Quarantine.open(subject.temporary, subject.store.index)
        found = measured(
            sources.train,
            subject.one_device,
            subject.run.model.batch_spec,
            rows=subject.rows,
            workers=data.workers,
            prefetch=data.prefetch,
            seed=subject.run.seed,
            quarantine=quarantine,
        )
        step = wanted(subject, jax.local_devices()[0])
        yield from judged(found, step, cores(), sources.faster)
        worse = [bad for bad in _recorded(quarantine.path) if bad.path not in _paths(sources)]
        if worse:
            yield warning(
                f"the trial met {len(worse)} more broken files: {_named(worse)}",
                "mend or remove them; the run replaces them by others",
            )


def measured(
    source: Source,
    mesh: jax.sharding.Mesh,
    spec: Callable[[int], pipeline.Spec],
    *,
    rows: int,
    workers: int,
    prefetch: int,
    seed: int,
    quarantine: Quarantine,
    seconds: float = _TRIAL_S,
    longest_s: float = _LONGEST_S,
) -> Rate:
    """Examples/s of the pipeline once its workers have started.

    Batches are smaller than the config's where those take a worker long: the trial is short.

    Args:
        source: the training split.
        mesh: of one device.
        spec: the model's ``batch_spec``.
        rows: of a batch of the config, that this process loads.
        workers: as in the config.
        prefetch: likewise.
        seed: of the order.
        quarantine: where broken examples are recorded.
        seconds: to measure, at least.
        longest_s: the workers' start included; what has come until then counts.
    """
    one = _alone(source, seed, quarantine)
    batch = max(1, min(rows, round(one * _BATCH_S)))
    batches = pipeline.TrainingBatches(
        source,
        mesh,
        spec(batch),
        start=0,
        seed=seed,
        workers=workers,
        prefetch=prefetch,
        quarantine=quarantine,
    )
    # What was made while the last worker was still starting says nothing of the rate.
    early, more = batches.ahead, 2 * max(1, workers)
    try:
        times = _Arrivals(batches).collect(early, more, seconds, longest_s)
    finally:
        batches.close()
    if len(times) < 2:
        return Rate(None, workers, one)
    first = min(early, len(times) // 2)
    rate = (len(times) - 1 - first) * batch / (times[-1] - times[first])
    return Rate(rate, workers, one)


class _Arrivals(threading.Thread):
    """Takes batches as they come, and keeps the time of each: whoever asks need not wait."""

    def __init__(self, batches: pipeline.TrainingBatches) -> None:
        super().__init__(name="trial", daemon=True)
        self._batches = batches
        self._times: list[float] = []
        self._error: BaseException | None = None
        self._news = threading.Condition()
        self.start()

    def run(self) -> None:
        """Until the batches are closed, or one fails."""
        while self._error is None:
            try:
                next(self._batches)
            except BaseException as error:
                self._error = error
            with self._news:
                if self._error is None:
                    self._times.append(time.monotonic())
                self._news.notify()

    def collect(self, early: int, more: int, seconds: float, longest_s: float) -> list[float]:
        """When batches came, s.

        Args:
            early: batches that do not count.
            more: that are to come after them, at least.
            seconds: that those are to take, at least.
            longest_s: whatever has come then is given.

        Raises:
            BaseException: of the pipeline.
        """
        until = time.monotonic() + longest_s
        with self._news:
            while self._error is None and (left_s := until - time.monotonic()) > 0:
                times = self._times
                if len(times) > early + more and times[-1] - times[early] >= seconds:
                    break
                self._news.wait(left_s)
            if self._error is not None:
                raise self._error
            return list(self._times)


def _alone(source: Source, seed: int, quarantine: Quarantine) -> float:
    """Examples/s of this process alone, the first one left out: it opens files."""
    rows = sampler.TrainingRows(
        source, sampler.of(source, seed), 0, 1, 0, 1, _TRIED + 1, quarantine
    )
    rows[0]
    began = time.perf_counter()
    for row in range(1, _TRIED + 1):
        rows[row]
    return _TRIED / max(1e-9, time.perf_counter() - began)


def wanted(subject: Subject, device: jax.Device) -> NeededRate | None:
    """What the step takes, from the model's formula and the card's peak; None on a CPU.

    Nothing is compiled: memory traffic, which bounds many steps, is not known here.
    """
    run, card = subject.run, subject.card
    if card is not None:
        peak, name = card.bf16_flops, card.name
    else:
        found = peak_bf16_flops(device.device_kind)
        if found is None:
            return None
        peak, name = found, device.device_kind
    peak *= 1.0 if run.precision == "bfloat16" else 0.5  # TF32 [D]
    flops = run.model.flops_per_example()
    rate = run.mesh.devices * peak / flops / (subject.processes or 1)
    how = (
        f"predicted: {flops / 1e12:.3g} TFLOP an example on {run.mesh.devices} x {name} at "
        f"{_LEAST_MFU:.0%} to {_MOST_MFU:.0%} of their peak; "
        f"{invocation.program()} plan narrows it"
    )
    return NeededRate(_LEAST_MFU * rate, _MOST_MFU * rate, how)


def judged(found: Rate, step: NeededRate | None, cores: int, faster: str = "") -> Iterator[Finding]:
    """The loader's rate against the step's.

    Args:
        found: the loader's.
        step: what it takes; None where that is not known.
        cores: of this host.
        faster: what makes this data cheaper to read; empty where nothing is known.
    """
    rate, workers = found.examples_per_second, counted(found.workers, "worker")
    gives = f"the loader gives {_number(rate or 0)} examples/s with {workers} (measured)"
    if rate is None:
        rate = found.one * max(1, min(found.workers, cores))
        gives = (
            f"hardly a batch came in {_LONGEST_S:.0f} s with {workers} on {cores} cores; one alone "
            f"makes {_number(found.one)} examples/s, so they make at most {_number(rate)}"
        )
        if found.workers > cores:
            yield warning(
                gives, f"--data.workers {cores}: more than cores only wait for each other"
            )
        else:
            yield problem(gives, "see what else this host does (uptime), and --data.workers 0")
    if step is None:
        if found.examples_per_second is not None:
            measures = f"{invocation.program()} bench measures"
            yield ok(f"{gives}; what a step takes here is not predicted: {measures}")
        return
    seen = f"{gives}; the step wants {_number(step.least)} to {_number(step.most)} ({step.how})"
    if rate >= step.most:
        yield ok(seen)
        return
    core = rate / max(1, min(found.workers, cores))  # with all of them at work
    least, most = math.ceil(step.least / core), math.ceil(step.most / core)
    if least > cores:
        cure = f"about {least} workers on as many cores, and this host has {cores}: "
        cure += faster or "a host with more, or a smaller source (lower resolution, shorter files)"
    else:
        cure = f"--data.workers {max(least, min(most, cores))} (this host has {cores} cores)"
        cure += f", or {faster}" if faster else ""
    if rate < step.least:
        yield problem(f"{seen}: the GPUs would wait", cure)
    else:
        yield warning(f"{seen}: the GPUs may wait", cure)


def _recorded(path: Path) -> list[BadExample]:
    """What the workers of the trial have put into the quarantine; each file once."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = {one["path"]: one["reason"] for one in map(json.loads, lines)}
    return [BadExample(path, reason) for path, reason in found.items()]


def _paths(sources: Sources) -> set[str]:
    return {one.path for one in sources.bad}


def _named(bad: list[BadExample]) -> str:
    more = f"; {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return "; ".join(str(one) for one in bad[:_NAMED]) + more


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
