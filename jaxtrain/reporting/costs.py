"""The page's sections on what a run has used: time, memory, throughput."""

from collections.abc import Sequence

from jaxtrain.config.metrics import METRICS
from jaxtrain.reporting import facts, formats, times
from jaxtrain.reporting.markup import Html, element, joined
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import NOTHING, Row, named, section, side_by_side


def where_time_went(runs: Sequence[RecordedRun]) -> Html:
    """Shows the time by category, as a bar and as a table; the categories add up to the total."""
    accounts = [times.account(run.history) for run in runs]
    known = [account for account in accounts if account is not None]
    if not known:
        return Html("")
    longest = max(account.total_s for account in known)
    names = list(times.CATEGORIES)
    bars = []
    for index, account in enumerate(accounts):
        if account is None:
            continue
        parts = [
            element(
                "span",
                class_=f"time-{names.index(name)}",
                style=f"width:{100 * seconds / longest:.3f}%",
                title=f"{name}: {formats.seconds(seconds)}, "
                f"{formats.percent(seconds, account.total_s)}",
            )
            for name, seconds in account.seconds.items()
            if seconds > 0 and longest > 0
        ]
        bars.append(element("div", named(runs, index), element("div", *parts, class_="bar")))
    rows: list[Row] = []
    for number, (name, meaning) in enumerate(times.CATEGORIES.items()):
        cells: list[object] = [
            _time(account, account.seconds[name])
            if account and account.seconds[name] >= 0.05
            else NOTHING
            for account in accounts
        ]
        swatch = element("span", class_=f"swatch time-{number}", aria_hidden="true")
        rows.append((joined([swatch, name, element("small", meaning)], ""), cells))
    total: list[object] = [
        _time(account, account.total_s) if account else NOTHING for account in accounts
    ]
    rows.append((element("b", "total"), total))
    notes = [
        f"{run.label if len(runs) > 1 else 'The run'}: {line}"
        for run, account in zip(runs, accounts, strict=True)
        if account is not None
        for line in _time_notes(account)
    ]
    return section(
        "Where the time went",
        *bars,
        side_by_side(runs, rows),
        *(element("p", line, class_="note") for line in notes),
        note="Measured with the clock of process 0.",
    )


def _time(account: times.Account, seconds: float) -> Html:
    share = element("span", formats.percent(seconds, account.total_s), class_="share")
    took = element("span", formats.seconds(seconds), class_="took")
    return joined([took, " ", share])


def _time_notes(account: times.Account) -> list[str]:
    notes = []
    if account.repeated_steps:
        notes.append(f"{account.repeated_steps:,} steps were repeated.")
    if account.idle_s >= 1:
        notes.append(
            f"The total excludes {formats.seconds(account.idle_s)} in which the run was stopped."
        )
    return notes


def memory(runs: Sequence[RecordedRun]) -> Html:
    """Compares planned with measured memory."""

    def gib(value: object) -> object:
        if not isinstance(value, int | float):
            return NOTHING
        return f"{value * 1024:.1f} MiB" if 0 < value < 0.1 else f"{value:.2f} GiB"

    def peak(run: RecordedRun, name: str) -> object:
        found = facts.series(run, name)
        return gib(max(found) if found else None)

    planned = [run.last("compiled") for run in runs]
    other = sorted(
        {
            name
            for run in runs
            for record in run.records
            for name in record
            if ("memory" in name or "shm" in name) and name != "train/gpu_memory_usage"
        }
    )
    measured: list[object] = [peak(run, "train/gpu_memory_usage") for run in runs]
    rows: list[Row] = [
        ("planned, per device", [gib(one.get("planned_gib")) for one in planned]),
        (
            "of which parameters, optimizer state, and the like",
            [gib(one.get("state_gib")) for one in planned],
        ),
        ("measured peak, on the fullest device", measured),
        *((f"measured peak, {name}", [peak(run, name) for run in runs]) for name in other),
    ]
    unmeasured = [run for run, cell in zip(runs, measured, strict=True) if cell == NOTHING]
    note = "Planned: what the compiled step needs, as reported by the compiler (XLA). "
    if len(unmeasured) == len(runs):
        note += "These devices do not report their memory use."
    elif unmeasured:
        note += f"Not measured in {', '.join(run.label for run in unmeasured)}."
    else:
        note += "Measured: memory that the runtime has allocated."
    if all(cell == NOTHING for _, cells in rows for cell in cells):
        return Html("")
    return section("Memory", side_by_side(runs, rows), note=note)


def throughput(runs: Sequence[RecordedRun]) -> Html:
    """Compares measured rates with the datasheet's."""

    def rate(run: RecordedRun, name: str) -> object:
        found = facts.series(run, f"train/{name}")
        middle = facts.typical(found)
        if middle is None:
            return NOTHING
        best = element("small", f" best {formats.metric(max(found), METRICS[name].unit)}")
        return joined([formats.metric(middle, METRICS[name].unit), best])

    def middle(run: RecordedRun, name: str) -> object:
        return formats.metric(facts.typical(facts.series(run, f"train/{name}")), METRICS[name].unit)

    def flops(value: float | None) -> object:
        return NOTHING if value is None else formats.large(value, "FLOP/s")

    def seconds(value: float | None) -> object:
        return NOTHING if value is None else f"{value:.3g}"

    rows: list[Row] = [
        (text, [rate(run, name) for run in runs])
        for text, name in (
            ("steps per second", "steps_per_second"),
            ("examples per second", "samples_per_second"),
            ("tokens per second", "tokens_per_second"),
        )
    ]
    rows += [
        ("model FLOP/s, all devices", [flops(facts.flops_per_second(run)) for run in runs]),
        ("datasheet, dense bf16, all devices", [flops(facts.peak_flops(run)) for run in runs]),
        (
            "MFU: model / datasheet FLOP/s",
            [middle(run, "mfu") for run in runs],
        ),
        ("data wait", [middle(run, "data_wait_fraction") for run in runs]),
    ]
    planned = [facts.seconds_at_the_peaks(run) for run in runs]
    if any(planned):
        rows += [
            ("seconds per step, planned at the datasheet's peaks", [seconds(x) for x in planned]),
            ("seconds per step, measured", [seconds(facts.seconds_per_step(x)) for x in runs]),
        ]
    kinds = {
        str(run.last("start")["device_kind"])
        for run in runs
        if run.last("start").get("device_kind") and facts.peak_flops(run) is None
    }
    note = (
        "Measured between log lines, without validations and saves; medians over the run. Model "
        "FLOP/s: the model's formula for one step, times the measured steps per second."
    )
    if kinds:
        note += f" The datasheet rate of {', '.join(sorted(kinds))} is unknown, so there is no MFU."
    if all(cell == NOTHING for _, cells in rows for cell in cells):
        return Html("")
    return section("Throughput", side_by_side(runs, rows), note=note)
