"""The page's header and curves, and the helpers that all sections use.

A section without any data is omitted; the header lists what is missing.
"""

from collections.abc import Callable, Sequence

from jaxtrain.reporting import facts, formats, times
from jaxtrain.reporting.markup import Html, element, escaped, joined, table
from jaxtrain.reporting.run_files import RecordedRun

NOTHING = "\N{EN DASH}"
Row = tuple[object, list[object]]


def section(title: str, *children: object, note: str = "") -> Html:
    """Builds a section: a heading, a note that explains it, and the contents."""
    name = title.lower().replace(" ", "-")
    above = element("p", note, class_="note") if note else ""
    return element("section", element("h2", title), above, *children, id=name)


def named(runs: Sequence[RecordedRun], index: int) -> Html:
    """Builds a run's label with its color; empty if the page has only one run."""
    if len(runs) == 1:
        return Html("")
    dot = element("span", class_=f"dot run-{index % 8}", aria_hidden="true")
    return joined([dot, element("span", runs[index].label, class_="label")])


def side_by_side(runs: Sequence[RecordedRun], rows: Sequence[Row], *, mark: bool = False) -> Html:
    """Builds a table with a column for each run; rows without any value are omitted.

    Args:
        runs: the runs of the page.
        rows: a name, and a cell for each run.
        mark: whether to highlight rows whose cells differ.
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


def head(runs: Sequence[RecordedRun]) -> Html:
    """Builds the header: name, state, steps, results, devices, running time, missing files."""
    names = list(dict.fromkeys(str(run.config.get("name") or run.label) for run in runs))
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    parts: list[object] = [element("h1", title)]
    if len(runs) == 1:
        run = runs[0]
        state = facts.ending(run)
        pill = element("span", state.word, class_=f"pill {state.word}")
        parts.append(element("p", pill, " ", state.sentence, class_="state"))
        when = facts.span(run)
        since = f"started {formats.moment(when[0])}" if when else ""
        parts.append(element("p", element("span", str(run.directory)), since, class_="path"))
        cards = [
            element("div", element("dt", name), element("dd", cell))
            for name, (cell,) in _facts(runs)
            if cell != NOTHING and name != "started"
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
            element("div", element("b", "Missing"), element("ul", *missing), class_="hint")
        )
    return element("header", *parts)


def _facts(runs: Sequence[RecordedRun]) -> list[Row]:
    def of_all(cell: Callable[[RecordedRun], object]) -> list[object]:
        return [cell(run) for run in runs]

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
        rows.append((name, [_result(found.get(name)) for found in results]))
    return [
        *rows,
        ("running time", of_all(_time)),
        ("time spent training", of_all(_useful)),
        ("devices", of_all(_devices)),
        ("started", of_all(_started)),
    ]


def _steps(run: RecordedRun) -> object:
    done, total = facts.steps_done(run), facts.steps_of_run(run)
    if done is None:
        return NOTHING
    of = element("small", f" of {total:,}") if total is not None else ""
    return joined([f"{done:,}", of])


def _result(found: facts.Result | None) -> object:
    if found is None:
        return NOTHING
    best = ""
    if found.best is not None and found.best != found.last:
        best = f" best {formats.metric(found.best, found.unit)} at step {found.best_step:,}"
    return joined([formats.metric(found.last, found.unit), element("small", best)])


def _time(run: RecordedRun) -> object:
    account, span = times.account(run.history), facts.span(run)
    if account is not None:
        starts = len(run.starts)
        count = element("small", f" in {starts} starts") if starts > 1 else ""
        return joined([formats.seconds(account.total_s), count])
    return NOTHING if span is None else formats.seconds(span[1] - span[0])


def _started(run: RecordedRun) -> object:
    span = facts.span(run)
    if span is None:
        return NOTHING
    day, _, clock = formats.moment(span[0]).partition(" ")
    return joined([day, element("small", clock)])


def _devices(run: RecordedRun) -> object:
    count, kind = facts.devices(run)
    return joined([count, element("small", kind)]) if count else NOTHING


def _useful(run: RecordedRun) -> object:
    account = times.account(run.history)
    if account is None:
        return NOTHING
    return formats.percent(account.seconds[times.STEPS], account.total_s)


def curves(runs: Sequence[RecordedRun], notes: Sequence[str]) -> Html:
    """Builds the placeholder for the charts, their controls, and the table of results.

    Args:
        runs: the runs of the page.
        notes: sentences about what the curves do not show.
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
        element("label", "x axis: ", element("select", *options, id="over")),
        element(
            "label", element("input", type="checkbox", id="log"), " log scale for losses and norms"
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
    results = _results(runs)
    return section(
        "Curves",
        controls,
        element("noscript", element("p", "The curves require JavaScript.", class_="hint")),
        element("div", id="charts"),
        element("ul", *(element("li", note) for note in notes), class_="note") if notes else "",
        element("h3", "First, last, and best values") if results else "",
        results,
        note="Lines: training. Dots: validation. Drag to zoom all charts; double-click to reset.",
    )


def _results(runs: Sequence[RecordedRun]) -> Html:
    """Builds the table of the quality metrics."""
    results = [facts.results(run) for run in runs]
    names = list(dict.fromkeys(name for found in results for name in found))
    if not names:
        return Html("")
    if len(runs) > 1:
        rows: list[Row] = [
            (name, [_from_to(found.get(name)) for found in results]) for name in names
        ]
        return side_by_side(runs, rows)
    cells = []
    for name, found in results[0].items():
        values = [
            formats.metric(value, found.unit) for value in (found.first, found.last, found.best)
        ]
        step = NOTHING if found.best_step is None else f"{found.best_step:,}"
        cells.append([name, *values, step])
    return table(["", "first", "last", "best", "at step"], cells)


def _from_to(found: facts.Result | None) -> object:
    if found is None:
        return NOTHING
    first, last = formats.metric(found.first, found.unit), formats.metric(found.last, found.unit)
    best = ""
    if found.best is not None:
        best = f" best {formats.metric(found.best, found.unit)} at step {found.best_step:,}"
    return joined([f"{first} → {last}", element("small", best)])
