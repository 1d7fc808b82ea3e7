"""Checks that the data opens, lists broken files, and measures the loader."""

from collections.abc import Iterator
from pathlib import Path

from jaxtrain.config import invocation
from jaxtrain.data import loader_rate, worker_count
from jaxtrain.data.loader_rate import LONGEST_S, Rate
from jaxtrain.data.quarantine import Quarantine, TooManyBroken, too_many
from jaxtrain.data.source import Sources
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import Subject
from jaxtrain.errors import BadExample
from jaxtrain.interop import hub, huggingface, weights
from jaxtrain.storage import json_lines
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.formats import counted
from jaxtrain.training import preflight

_NAMED = 5  # broken files in a message
_FIX_BROKEN = "fix or remove them, or raise --data.max_bad_share"


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "data"."""
    opened: list[Sources] = []
    return {
        "inputs": lambda: inputs(subject),
        "open": lambda: opening(subject, opened),
        "broken files": lambda: broken(subject, opened),
        "same data": lambda: same(opened, subject.store),
        "loader": lambda: trial(subject, opened),
    }


def inputs(subject: Subject) -> Iterator[Finding]:
    """Checks that the files that a run starts from exist and match the config."""
    run = subject.run
    missing = list(preflight.unreadable(run, resumes=subject.resumes, data=False))
    if run.data.path is not None:
        missing += run.data.problems(run.model) if hasattr(run.data, "problems") else []
    for line in missing:  # each names its fix
        yield Finding(level="problem", seen=line)
    if missing:
        return
    if run.model.init_from is not None and not subject.resumes:
        yield ok(_source(subject))
    if read := run.model.constants():
        yield ok(f"the weights of the losses are present: {len(read)} arrays")


def _source(subject: Subject) -> str:
    """Checks ``model.init_from``; a model that is still on the Hub only by its settings."""
    model = subject.run.model
    source: str | Path = model.init_from
    if hub.is_named(source):
        named = hub.parse(str(source), "model.init_from")
        found = hub.find(named, lambda line: None)
        missing = found.missing(named.repository)
        if missing:
            checked = "arrays"
            if huggingface.SETTINGS in found.sizes:
                settings = found.only(huggingface.SETTINGS)
                weights.check_settings(hub.download(named, settings, lambda line: None), model)
            else:
                checked = "settings and arrays"
            return (
                f"{named.text} is on the Hub ({found.described(missing)}); the run downloads it "
                f"and checks its {checked}"
            )
        source = hub.download(named, found, lambda line: None)
    source = expanded(source)
    _, notes = weights.params_for(source, model, subject.built.definition.params)
    return "; ".join([f"model.init_from {source} fits the model", *notes])


def opening(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Checks that the data opens; writes the same caches as a run."""
    data = subject.run.data
    if data.path is None and not data.demo:
        yield warning(
            f"{subject.run.name} has no data of its own: data and loader were not checked",
            "set --data.path, as for the run",
        )
        return
    if hasattr(data, "problems") and data.problems(subject.run.model):
        return  # inputs() reports them
    model = hub.with_local_tokenizer(subject.run.model, lambda line: None)
    try:
        opened.append(data.open(model, seed=subject.run.seed, say=lambda line: None))
    except TooManyBroken as error:
        yield problem(f"{error.complaint}: {_named(list(error.bad))}", _FIX_BROKEN)
        return
    yield ok(opened[0].summary)


def broken(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Reports the broken files found while opening."""
    for sources in opened:
        if not sources.bad:
            continue
        count, named = len(sources.bad), _named(list(sources.bad))
        complaint = too_many(count, sources.files, subject.run.data.max_bad_share)
        if complaint:
            yield problem(f"{complaint}: {named}", _FIX_BROKEN)
        else:
            summary = (
                f"{count} of {sources.files} input files are broken ({count / sources.files:.1%})"
            )
            yield warning(
                f"{summary}: {named}", "fix or remove them; the run uses other files instead"
            )


def same(opened: list[Sources], store: KeyValueStore) -> Iterator[Finding]:
    """Checks that all processes see the same examples."""
    if store.count == 1:
        return
    own = opened[0].train.fingerprint if opened else "none"
    prints = store.gather("fingerprint", own, 3 * ANSWER_S)
    other = next((process for process, one in enumerate(prints) if one != prints[0]), None)
    if other is not None:
        yield problem(
            f"process {other} has different data ({prints[other][:12]}) than process 0 "
            f"({prints[0][:12]})",
            "give every process the same files, for example on storage that all of them mount",
        )
    elif opened:
        yield ok("the same data in all processes")


def trial(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Runs the real pipeline briefly with the config's workers."""
    for sources in opened:
        data = subject.run.data
        quarantine = Quarantine.open(subject.temporary, subject.store.index)
        found = loader_rate.measure(
            sources.train,
            subject.one_device,
            subject.run.batch_spec,
            rows=subject.rows,
            workers=subject.workers,
            prefetch=data.prefetch,
            seed=subject.run.seed,
            quarantine=quarantine,
        )
        yield judged(found, worker_count.cores(), sources.faster)
        worse = [bad for bad in _recorded(quarantine.path) if bad.path not in _paths(sources)]
        if worse:
            yield warning(
                f"the trial found {len(worse)} more broken files: {_named(worse)}",
                "fix or remove them; the run uses other files instead",
            )


def judged(found: Rate, cores: int, faster: str = "") -> Finding:
    """Judges the loader's rate.

    Args:
        found: the loader's rate.
        cores: number of this host's CPU cores.
        faster: how to make this data cheaper to read; empty if unknown.
    """
    workers, core = counted(found.workers, "worker"), _number(found.of_a_core)
    if found.examples_per_second is not None:
        plan = f"{invocation.program()} plan shows what the step needs"
        more = f"; {faster} makes it faster" if faster else ""
        return ok(
            f"the loader delivers {_number(found.examples_per_second)} examples/s with {workers}, "
            f"one core alone {core} (measured); {plan}{more}"
        )
    seen = (
        f"almost no batches arrived in {LONGEST_S:.0f} s with {workers} on {cores} cores; one core "
        f"alone loads {core} examples/s"
    )
    if found.workers > cores:
        return warning(
            seen, f"--data.workers {cores}: more workers than cores only wait for each other"
        )
    return problem(seen, faster or "check the load of this host (uptime), try --data.workers 0")


def _recorded(path: Path) -> list[BadExample]:
    """Returns what the trial's workers have quarantined; each file once."""
    found = {one["path"]: one["reason"] for one in json_lines.Reader(path).new()}
    return [BadExample(path, reason) for path, reason in found.items()]


def _paths(sources: Sources) -> set[str]:
    return {one.path for one in sources.bad}


def _named(bad: list[BadExample]) -> str:
    more = f"; {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return "; ".join(str(one) for one in bad[:_NAMED]) + more


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
