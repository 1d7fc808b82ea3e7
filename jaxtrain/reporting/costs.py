"""The sections of the page that say what a run has taken: time, memory, speed."""

from collections.abc import Sequence

from jaxtrain.reporting import facts, formats, times
from jaxtrain.reporting.markup import Html, element, joined
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import NOTHING, Row, named, section, side_by_side


def where_time_went(runs: Sequence[RecordedRun]) -> Html:
    """A bar and a table; the parts add up to the whole."""
    accounts = [times.account(run.history) for run in runs]
    known = [account for account in accounts if account is not None]
    if not known:
        return Html("")
    longest = max(account.whole_s for account in known)
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
                f"{formats.share(seconds, account.whole_s)}",
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
    whole: list[object] = [
        _time(account, account.whole_s) if account else NOTHING for account in accounts
    ]
    rows.append((element("b", "whole"), whole))
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
        note="Measured by the clock of process 0.",
    )


def _time(account: times.Account, seconds: float) -> Html:
    share = element("span", formats.share(seconds, account.whole_s), class_="share")
    took = element("span", formats.seconds(seconds), class_="took")
    return joined([took, " ", share])


def _time_notes(account: times.Account) -> list[str]:
    notes = []
    if account.updates_again:
        notes.append(f"{account.updates_again:,} updates were trained again.")
    if account.idle_s >= 1:
        notes.append(
            f"{formats.seconds(account.idle_s)} between a start that had come to its own end and "
            "the next are not counted."
        )
    return notes


def memory(runs: Sequence[RecordedRun]) -> Html:
    """Planned against measured."""

    def gib(value: object) -> object:
        return f"{value:.2f} GiB" if isinstance(value, int | float) else NOTHING

    def most(run: RecordedRun, name: str) -> object:
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
    measured: list[object] = [most(run, "train/gpu_memory_usage") for run in runs]
    rows: list[Row] = [
        ("planned, a device", [gib(one.get("planned_gib")) for one in planned]),
        (
            "of that parameters, optimizer and the like",
            [gib(one.get("state_gib")) for one in planned],
        ),
        ("measured at its most, the fullest device", measured),
        *((f"measured at its most, {name}", [most(run, name) for run in runs]) for name in other),
    ]
    untold = [run for run, cell in zip(runs, measured, strict=True) if cell == NOTHING]
    note = "Planned: the compiled program's need by the compiler's own account. "
    if len(untold) == len(runs):
        note += "The devices do not tell how much they hold."
    elif untold:
        note += f"Not measured in {', '.join(run.label for run in untold)}."
    else:
        note += "Measured: what the runtime has allocated."
    if all(cell == NOTHING for _, cells in rows for cell in cells):
        return Html("")
    return section("Memory", side_by_side(runs, rows), note=note)


def throughput(runs: Sequence[RecordedRun]) -> Html:
    """Measured rates against the datasheet's."""

    def rate(run: RecordedRun, name: str) -> object:
        found = facts.series(run, name)
        middle = facts.typical(found)
        if middle is None:
            return NOTHING
        best = element("small", f" at best {formats.metric(name, max(found))}")
        return joined([formats.metric(name, middle), best])

    def middle(run: RecordedRun, name: str) -> object:
        return formats.metric(name, facts.typical(facts.series(run, name)))

    def flops(value: float | None) -> object:
        return NOTHING if value is None else formats.large(value, "FLOP/s")

    rows: list[Row] = [
        (text, [rate(run, f"train/{name}") for run in runs])
        for text, name in (
            ("steps a second", "steps_per_second"),
            ("samples a second", "samples_per_second"),
            ("tokens a second", "tokens_per_second"),
        )
    ]
    rows += [
        ("model FLOP/s, all devices", [flops(facts.flops_per_second(run)) for run in runs]),
        ("datasheet, dense bf16, all devices", [flops(facts.peak_flops(run)) for run in runs]),
        ("MFU: the first of the second", [middle(run, "train/mfu") for run in runs]),
        ("waiting for input", [middle(run, "train/data_wait_fraction") for run in runs]),
    ]
    kinds = {
        str(run.last("start")["device_kind"])
        for run in runs
        if run.last("start").get("device_kind") and facts.peak_flops(run) is None
    }
    note = (
        "Measured between log lines, without validations and saves; medians over the run. Model "
        "FLOP/s: what the model's formula needs for a step, at the measured speed."
    )
    if kinds:
        note += f" No datasheet number is known for {', '.join(sorted(kinds))}, so there is no MFU."
    if all(cell == NOTHING for _, cells in rows for cell in cells):
        return Html("")
    return section("Throughput", side_by_side(runs, rows), note=note)
