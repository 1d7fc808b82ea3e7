"""The page's sections on what a run has used: time, memory, throughput."""

from collections.abc import Callable, Iterator, Sequence

from jaxtrain import formats
from jaxtrain.config.metrics import METRICS
from jaxtrain.reporting import facts, planned, times
from jaxtrain.reporting.markup import Html, element, joined
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import NOTHING, Cell, named, section, side_by_side

_STARTS = 20  # bars of a run; a run that failed again and again may have hundreds


def where_time_went(runs: Sequence[RecordedRun]) -> Html:
    """Shows the time by category, as a bar and as a table; the categories add up to the total."""
    accounts = {run.label: times.account(run.history) for run in runs}
    longest = max((account.total_s for account in accounts.values() if account), default=0.0)

    def bar(account: times.Account, longest: float = longest) -> Html:
        segments = [
            element(
                "span",
                class_=f"time-{number}",
                style=f"width:{100 * seconds / longest:.3f}%",
                title=f"{name}: {formats.seconds(seconds)}, "
                f"{formats.percent(seconds, account.total_s)}",
            )
            for number, (name, seconds) in enumerate(account.seconds.items())
            if seconds > 0
        ]
        return element("div", *segments, class_="bar")

    def cell(category: str) -> Cell:
        def of(run: RecordedRun) -> object:
            account = accounts[run.label]
            seconds = account.seconds[category] if account else 0.0
            return _time(seconds, account.total_s) if account and seconds >= 0.05 else None

        return of

    def total(run: RecordedRun) -> object:
        account = accounts[run.label]
        return account and _time(account.total_s, account.total_s)

    rows: list[tuple[object, Cell]] = []
    for number, (name, meaning) in enumerate(times.CATEGORIES.items()):
        swatch = element("span", class_=f"swatch time-{number}", aria_hidden="true")
        rows.append((joined([swatch, name, element("small", meaning)]), cell(name)))
    rows.append((element("b", "total"), total))
    bars = [
        element("div", named(runs, index), _all_starts(runs[index], account), bar(account))
        for index, account in enumerate(accounts.values())
        if account
    ]
    several = len(runs) > 1
    bars += [element("div", *_starts(run, f"{run.label}, " * several, bar)) for run in runs]
    notes = [
        element("p", f"{label if several else 'The run'}: {line}", class_="note")
        for label, account in accounts.items()
        if account
        for line in _notes(account)
    ]
    return section(
        "Where the time went",
        *bars,
        side_by_side(runs, rows),
        *notes,
        note="Measured with the clock of process 0.",
    )


def _all_starts(run: RecordedRun, account: times.Account) -> Html:
    if len(run.starts) < 2:
        return Html("")
    total = formats.seconds(account.total_s)
    return element("p", f"all {len(run.starts)} starts: {total}", class_="note")


def _starts(
    run: RecordedRun, label: str, bar: Callable[[times.Account, float], Html]
) -> Iterator[Html]:
    """Yields a bar for each of the newest starts of a run that was started several times."""
    starts = list(enumerate(times.by_start(run.history), 1))
    longest = max((account.total_s for _, (_, account) in starts), default=0.0)
    if len(starts) < 2 or not longest:
        return
    if len(starts) > _STARTS:
        yield element("p", f"The newest {_STARTS} of {len(starts)} starts.", class_="note")
    for number, (attempt, account) in starts[-_STARTS:]:
        text = (
            f"{label}start {number} from step {attempt.start['step']:,}: "
            f"{formats.seconds(account.total_s)}; {facts.how_ended(run, attempt)}"
        )
        yield element("p", text, class_="note")
        yield bar(account, longest)


def _time(seconds: float, total_s: float) -> Html:
    took = element("span", formats.seconds(seconds), class_="took")
    return joined([took, " ", element("span", formats.percent(seconds, total_s), class_="share")])


def _notes(account: times.Account) -> Iterator[str]:
    if account.repeated_steps:
        yield f"{account.repeated_steps:,} steps were repeated."
    if account.idle_s >= 1:
        idle = formats.seconds(account.idle_s)
        yield f"The total excludes {idle} in which the run was stopped."


def memory(runs: Sequence[RecordedRun]) -> Html:
    """Compares planned with measured memory."""

    def compiled(name: str) -> Cell:
        return lambda run: _gib(run.last("compiled").get(name))

    def peak(name: str) -> Cell:
        return lambda run: _gib(max(facts.series(run, name), default=None))

    on_devices = "train/gpu_memory_usage"
    names = {name for run in runs for record in run.records for name in record}
    others = sorted(n for n in names if ("memory" in n or "shm" in n) and n != on_devices)
    unmeasured = [run.label for run in runs if not facts.series(run, on_devices)]
    if len(unmeasured) == len(runs):
        measured = "These devices do not report their memory use."
    elif unmeasured:
        measured = f"Not measured in {', '.join(unmeasured)}."
    else:
        measured = "Measured: memory that the runtime has allocated."
    rows = [
        ("planned, per device", compiled("planned_gib")),
        ("of which parameters, optimizer state, and the like", compiled("state_gib")),
        ("measured peak, on the fullest device", peak(on_devices)),
        *((f"measured peak, {name}", peak(name)) for name in others),
    ]
    note = (
        "Planned: what the compiled step needs, as reported by the compiler (XLA), and on a GPU "
        f"what plan assumes for cuDNN; with loop.replay_every a second state, too. {measured}"
    )
    return section("Memory", side_by_side(runs, rows), note=note)


def _gib(value: float | None) -> str | None:
    return None if value is None else formats.metric(value, "GiB")


def throughput(runs: Sequence[RecordedRun]) -> Html:
    """Compares measured rates with the datasheet's."""

    def middle(name: str, *, best: bool = False) -> Cell:
        def of(run: RecordedRun) -> object:
            values, unit = facts.series(run, f"train/{name}"), METRICS[name].unit
            if not values:
                return None
            largest = element("small", f" best {formats.metric(max(values), unit)}") if best else ""
            return joined([formats.metric(facts.typical(values), unit), largest])

        return of

    def flops(run: RecordedRun) -> object:
        needed = run.last("compiled").get("flops_per_step")
        rate = facts.typical(facts.series(run, "train/steps_per_second"))
        return formats.large(needed * rate, "FLOP/s") if needed and rate else None

    def datasheet(run: RecordedRun) -> object:
        peak = facts.peak_flops(run)
        return peak and formats.large(peak, "FLOP/s")

    waited = middle("data_wait_fraction")
    plans = {run.label: planned.compared(run) for run in runs}

    def beside_plan(name: str) -> Cell:
        def of(run: RecordedRun) -> object:
            compared = plans[run.label].get(name)
            if compared is None:
                return None
            measured = (
                NOTHING if compared.measured is None else planned.formatted(name, compared.measured)
            )
            plan = f" planned {planned.formatted(name, *compared.planned)}"
            return joined([measured, element("small", plan)])

        return of

    rows: list[tuple[object, Cell]] = [
        ("steps per second", middle("steps_per_second", best=True)),
        ("examples per second", middle("samples_per_second", best=True)),
        ("tokens per second", middle("tokens_per_second", best=True)),
        ("model FLOP/s, all devices", flops),
        ("datasheet, dense bf16, all devices", datasheet),
        ("MFU: model / datasheet FLOP/s", middle("mfu")),
        (planned.WAIT, lambda run: beside_plan(planned.WAIT)(run) or waited(run)),
        *((name, beside_plan(name)) for name in (planned.STEP, planned.HOURS)),
    ]
    note = (
        "Measured between log lines, without validations and saves; medians over the run. Model "
        "FLOP/s: those of its matmuls and convolutions in a step, times measured steps per second."
    )
    kinds = {run.last("start").get("device_kind") for run in runs if not facts.peak_flops(run)}
    if unknown := ", ".join(sorted(filter(None, kinds))):
        note += f" The datasheet rate of {unknown} is unknown, so there is no MFU."
    if any(run.last("compiled").get("planned_step_s", True) is None for run in runs):
        note += " For a device that is not in plan's table of cards, no times are planned."
    return section("Throughput", side_by_side(runs, rows), note=note)
