"""Checks the input files, opens the data, lists broken files, and measures the loader."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxtrain import machine
from jaxtrain.config import invocation
from jaxtrain.data import loader_rate
from jaxtrain.data.loader_rate import LONGEST_S, Rate
from jaxtrain.data.quarantine import Quarantine, too_many
from jaxtrain.data.source import Sources
from jaxtrain.distributed import process_group
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.formats import counted
from jaxtrain.interop import hub, huggingface, weights
from jaxtrain.storage.atomic import expanded
from jaxtrain.training import preflight

_NAMED = 5  # broken files in a message


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "data"."""
    opened: list[Sources] = []
    return {
        "inputs": lambda: inputs(subject),
        "open": lambda: opening(subject, opened),
        "same data": lambda: same(subject, opened),
        "loader": lambda: (finding for sources in opened for finding in trial(subject, sources)),
    }


def inputs(subject: Subject) -> Iterator[Finding]:
    """Checks, like a run, that the files it starts from exist and match the config."""
    run = subject.run
    has_data = run.data.path is not None
    missing = list(preflight.unreadable(run, resumes=subject.resumes, data=has_data))
    if missing:
        yield from map(problem, missing)
        return
    if run.model.init_from is not None and not subject.resumes:
        yield ok(_initial_weights(subject))
    if read := run.model.file_weights():
        yield ok(f"the weights of the losses are present: {len(read)} arrays")


def _initial_weights(subject: Subject) -> str:
    """Checks ``model.init_from``; a model that is still on the Hub only by its settings."""
    model = subject.run.model
    source: str | Path = model.init_from
    if hub.is_named(source):
        named = hub.parse(str(source), "model.init_from")
        on_hub = hub.find(named, lambda line: None)
        if missing := on_hub.missing(named.repository):
            checked = "settings and arrays"
            if huggingface.SETTINGS in on_hub.sizes:
                settings = on_hub.only(huggingface.SETTINGS)
                weights.check_settings(hub.download(named, settings, lambda line: None), model)
                checked = "arrays"
            return (
                f"{named.text} is on the Hub ({on_hub.described(missing)}); the run downloads it "
                f"and checks its {checked}"
            )
        source = hub.download(named, on_hub, lambda line: None)
    source = expanded(source)
    _, notes = weights.params_for(source, model, subject.built.definition.params)
    return "; ".join([f"model.init_from {source} fits the model", *notes])


def opening(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Opens the data, and writes the same caches as a run; reports broken files."""
    run = subject.run
    if run.data.path is None and not run.data.demo:
        yield warning(
            f"{run.name} has no data of its own: data and loader were not checked",
            "set --data.path, as for the run",
        )
        return
    if run.data.problems(run.model):
        return  # inputs() reports them
    model = hub.with_local_tokenizer(run.model, lambda line: None)
    sources = run.data.open(model, seed=run.seed, say=lambda line: None)
    opened.append(sources)
    yield ok(sources.summary)
    bad, files = sources.bad, sources.files
    if complaint := too_many(len(bad), files, run.data.max_bad_share):
        yield problem(
            f"{complaint}: {_named(bad)}", "fix or remove them, or raise --data.max_bad_share"
        )
    elif bad:
        yield _broken(f"{len(bad)} of {files} input files are broken ({len(bad) / files:.1%})", bad)


def same(subject: Subject, opened: list[Sources]) -> Iterator[Finding]:
    """Checks, like a run, that all processes see the same examples."""
    if subject.store.count > 1:
        fingerprint = opened[0].train.fingerprint if opened else "none"
        process_group.check_same("data", fingerprint, "give every process the same files")
        yield ok("the same data in all processes")


def trial(subject: Subject, sources: Sources) -> Iterator[Finding]:
    """Runs the real pipeline briefly with the config's workers."""
    run = subject.run
    with tempfile.TemporaryDirectory(prefix="jaxtrain-doctor-") as folder:
        subject.scratch(Path(folder))
        quarantine = Quarantine.open(Path(folder), subject.store.index)
        rate = loader_rate.measure(
            sources.train,
            subject.one_device,
            run.sent_spec,
            rows=subject.rows,
            workers=subject.workers,
            prefetch=run.data.prefetch,
            seed=run.seed,
            quarantine=quarantine,
        )
        more = sorted(quarantine.recorded() - {bad.path for bad in sources.bad})
    yield judge(rate, machine.cores())
    if more:
        yield _broken(f"the trial found {len(more)} more broken files", more)


def judge(rate: Rate, cores: int) -> Finding:
    """Reports the loader's rate."""
    workers, core = counted(rate.workers, "worker"), _number(rate.of_a_core)
    if rate.examples_per_second is not None:
        return ok(
            f"the loader delivers {_number(rate.examples_per_second)} examples/s with {workers}, "
            f"one core alone {core} (measured); {invocation.program()} plan shows what the step "
            "needs"
        )
    seen = (
        f"almost no batches arrived in {LONGEST_S:.0f} s with {workers} on {cores} cores; one core "
        f"alone loads {core} examples/s"
    )
    return problem(seen, f"try --data.workers {cores // 2}, and check uptime for load")


def _broken(seen: str, bad: Iterable[object]) -> Finding:
    return warning(f"{seen}: {_named(bad)}", "fix or remove them; the run uses other files instead")


def _named(bad: Iterable[object]) -> str:
    texts = list(map(str, bad))
    more = f"; {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return "; ".join(texts[:_NAMED]) + more


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
