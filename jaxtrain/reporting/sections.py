"""The sections of the page that say how a run went: head, curves, time, memory, speed.

A section of which nothing is known is left out: the head says what is missing.
"""

from collections.abc import Callable, Sequence

from jaxtrain.reporting import facts, formats, times
from jaxtrain.reporting.markup import Html, element, escaped, joined, table
from jaxtrain.reporting.run_files import Run

NOTHING = "\N{EN DASH}"
Row = tuple[object, list[object]]


def section(title: str, *children: object, note: str = "") -> Html:
    """A section with its heading and, below that, what has to be known to read it."""
    name = title.lower().replace(" ", "-")
    above = element("p", note, class_="note") if note else ""
    return element("section", element("h2", title), above, *children, id=name)


def named(runs: Sequence[Run], index: int) -> Html:
    """A run's label with its colour; nothing where it is the only one."""
    if len(runs) == 1:
        return Html("")
    dot = element("span", class_=f"dot run-{index % 8}", aria_hidden="true")
    return joined([dot, element("span", runs[index].label, class_="label")])


def side_by_side(runs: Sequence[Run], rows: Sequence[Row], *, mark: bool = False) -> Html:
    """A table with a column for each run; rows that say nothing of any are left out.

    Args:
        runs: of the page.
        rows: a name, and a cell for each run.
        mark: whether rows whose cells differ are marked.
    """
    head = ["", *(named(runs, index) for index in range(len(runs)))] if len(runs) > 1 else []
    shown = []
    for name, cells in rows:
        if all(cell == NOTHING for cell in cells):
            continue
        differs = mark and len({str(cell) for cell in cells}) > 1
        marked = [element("mark", cell) if differs else escaped(cell) for cell in cells]
        shown.append([name, *marked])
    return table(head, shown)


def head(runs: Sequence[Run]) -> Html:
    """Name, state, steps, results, devices, wall time; and what is missing."""
    names = list(dict.fromkeys(str(run.config.get("name") or run.label) for run in runs))
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    parts: list[object] = [element("h1", title)]
    if len(runs) == 1:
        run = runs[0]
        state = facts.ending(run)
        pill = element("span", state.word, class_=f"pill {state.word}")
        parts.append(element("p", pill, " ", state.sentence, class_="state"))
        parts.append(element("p", str(run.directory), class_="path"))
        cards = [
            element("div", element("dt", name), element("dd", cell))
            for name, (cell,) in _facts(runs)
            if cell != NOTHING
        ]
        parts.append(element("dl", *cards, class_="cards"))
    else:
        states = [facts.ending(run) for run in runs]
        cells = [
            joined([element("span", one.word, class_=f"pill {one.word}"), " ", one.sentence])
            for one in states
        ]
        rows: list[Row] = [("state", [*cells]), *_facts(runs)]
        parts.append(side_by_side(runs, rows))
    missing = [
        element("li", element("b", f"{run.label}: ") if len(runs) > 1 else "", line)
        for run in runs
        for line in run.missing
    ]
    if missing:
        parts.append(
            element("div", element("b", "What is missing"), element("ul", *missing), class_="hint")
        )
    return element("header", *parts)


def _facts(runs: Sequence[Run]) -> list[Row]:
    def of_all(say: Callable[[Run], object]) -> list[object]:
        return [say(run) for run in runs]

    results = [facts.results(run) for run in runs]
    leading = list(
        dict.fromkeys(
            name
            for run, found in zip(runs, results, strict=True)
            for name in facts.leading(run, found)
        )
    )
    rows: list[Row] = [("steps", of_all(_steps))]
    for name in leading:
        rows.append((name, [_result(name, found.get(name)) for found in results]))
    return [
        *rows,
        ("wall time", of_all(_wall)),
        ("spent on updates", of_all(_useful)),
        ("devices", of_all(_devices)),
        ("began", of_all(_began)),
    ]


def _steps(run: Run) -> object:
    done, total = facts.steps_done(run), facts.steps_of_run(run)
    if done is None:
        return NOTHING
    of = element("small", f" of {total:,}") if total is not None else ""
    return joined([f"{done:,}", of])


def _result(name: str, found: facts.Result | None) -> object:
    if found is None:
        return NOTHING
    best = ""
    if found.best is not None and found.best != found.last:
        best = f" best {formats.metric(name, found.best)} at step {found.best_step:,}"
    return joined([formats.metric(name, found.last), element("small", best)])


def _wall(run: Run) -> object:
    span = facts.span(run)
    return NOTHING if span is None else formats.seconds(span[1] - span[0])


def _began(run: Run) -> object:
    span = facts.span(run)
    if span is None:
        return NOTHING
    day, _, clock = formats.moment(span[0]).partition(" ")
    return joined([day, element("small", clock)])


def _devices(run: Run) -> object:
    count, kind = facts.devices(run)
    return joined([count, element("small", kind)]) if count else NOTHING


def _useful(run: Run) -> object:
    account = times.account(run.history)
    return (
        NOTHING if account is None else formats.share(account.seconds[times.STEPS], account.whole_s)
    )


def curves(runs: Sequence[Run], notes: Sequence[str]) -> Html:
    """The place of the curves with their controls, and the table of what they come to.

    Args:
        runs: of the page.
        notes: sentences on what the curves do not show.
    """
    toggles = [
        element(
            "label",
            element("input", type="checkbox", checked=True, data_run=index),
            " ",
            named(runs, index),
        )
        for index in range(len(runs))
        if len(runs) > 1
    ]
    options = [
        element("option", text, value=value)
        for value, text in (
            ("step", "steps"),
            ("time", "wall time"),
            ("examples", "examples"),
            ("tokens", "tokens"),
        )
    ]
    controls = element(
        "div",
        *toggles,
        element("label", "over ", element("select", *options, id="over")),
        element(
            "label", element("input", type="checkbox", id="log"), " log scale of losses and norms"
        ),
        element(
            "label",
            "smoothing ",
            element(
                "input", type="range", id="smooth", min="0", max="0.98", step="0.02", value="0"
            ),
            element("output", "0", for_="smooth"),
        ),
        class_="controls",
    )
    results = [facts.results(run) for run in runs]
    rows: list[Row] = []
    for name in dict.fromkeys(name for found in results for name in found):
        rows.append((name, [_from_to(name, found.get(name)) for found in results]))
    return section(
        "Curves",
        controls,
        element("noscript", element("p", "The curves need JavaScript.", class_="hint")),
        element("div", id="charts"),
        element("ul", *(element("li", note) for note in notes), class_="note") if notes else "",
        element("h3", "First, last and best") if rows else "",
        side_by_side(runs, rows) if rows else "",
        note="Lines: training. Dots: validation. Drag over a chart to zoom all of them; a double "
        "click goes back.",
    )


def _from_to(name: str, found: facts.Result | None) -> object:
    if found is None:
        return NOTHING
    first, last = formats.metric(name, found.first), formats.metric(name, found.last)
    best = ""
    if found.best is not None:
        best = f" best {formats.metric(name, found.best)} at step {found.best_step:,}"
    return joined([f"{first} → {last}", element("small", best)])


def where_time_went(runs: Sequence[Run]) -> Html:
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
            _time(account, account.seconds[name]) if account and account.seconds[name] else NOTHING
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
    return joined([formats.seconds(seconds), " ", share])


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


def memory(runs: Sequence[Run]) -> Html:
    """Planned against measured."""

    def gib(value: object) -> object:
        return f"{value:.2f} GiB" if isinstance(value, int | float) else NOTHING

    def most(run: Run, name: str) -> object:
        found = facts.series(run, name)
        return gib(max(found) if found else None)

    planned = [run.last("compiled") for run in runs]
    other = sorted(
        {
            name
            for run in runs
            for record in run.records
            for name in record
            if "memory" in name and name != "train/gpu_memory_usage"
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
        note += "Nothing was measured: the devices do not tell how much they hold."
    elif untold:
        note += f"Not measured in {', '.join(run.label for run in untold)}."
    else:
        note += "Measured: what the runtime has allocated."
    if all(cell == NOTHING for _, cells in rows for cell in cells):
        return Html("")
    return section("Memory", side_by_side(runs, rows), note=note)


def throughput(runs: Sequence[Run]) -> Html:
    """Measured rates against the datasheet's."""

    def rate(run: Run, name: str) -> object:
        found = facts.series(run, name)
        middle = facts.typical(found)
        if middle is None:
            return NOTHING
        best = element("small", f" at best {formats.metric(name, max(found))}")
        return joined([formats.metric(name, middle), best])

    def middle(run: Run, name: str) -> object:
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
