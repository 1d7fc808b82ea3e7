"""The page's sections, except those on time, memory and speed (``costs``) and on samples.

A section without any data is omitted; the header says why.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain import config, formats
from jaxtrain.reporting import facts, planned, times
from jaxtrain.reporting.markup import Html, element, joined, table
from jaxtrain.reporting.run_files import RecordedRun

NOTHING = "\N{EN DASH}"
_MACHINE = ("host", "processes", "devices", "device_kind", "driver")

Cell = Callable[[RecordedRun], object]
"""Returns what a table shows about a run; None if that is unknown."""


def section(title: str, *children: object, note: str = "") -> Html:
    """Builds a section: a heading, a note that explains it, and the contents; "" without any."""
    if not any(children):
        return Html("")
    above = element("p", note, class_="note") if note else ""
    name = title.lower().replace(" ", "-")
    return element("section", element("h2", title), above, *children, id=name)


def named(runs: Sequence[RecordedRun], index: int) -> Html:
    """Builds a run's label with its color; empty if the page has only one run."""
    if len(runs) == 1:
        return Html("")
    dot = element("span", class_=f"dot run-{index % 8}", aria_hidden="true")
    return joined([dot, element("span", runs[index].label, class_="label")])


def heading(runs: Sequence[RecordedRun], index: int) -> Html:
    """Builds a heading above what belongs to a run; empty if the page has only one run."""
    return element("h3", named(runs, index)) if len(runs) > 1 else Html("")


def side_by_side(
    runs: Sequence[RecordedRun], rows: Iterable[tuple[object, Cell]], *, mark: bool = False
) -> Html:
    """Builds a table with a column for each run; omits rows without any value."""
    table_rows = []
    for name, cell in rows:
        cells = [cell(run) for run in runs]
        if all(value is None for value in cells):
            continue
        values = [NOTHING if value is None else value for value in cells]
        differs = mark and len(set(map(str, values))) > 1
        table_rows.append(
            [name, *(element("mark", value) if differs else value for value in values)]
        )
    head = ["", *(named(runs, index) for index in range(len(runs)))] if len(runs) > 1 else []
    return table(head, table_rows) if table_rows else Html("")


def head(runs: Sequence[RecordedRun]) -> Html:
    """Builds the header: name, state, steps, results, devices, running time, problems."""
    names = list(dict.fromkeys(str(run.config.get("name") or run.label) for run in runs))
    results = {run.label: facts.results(run) for run in runs}
    leading = dict.fromkeys(n for run in runs for n in facts.leading(run, results[run.label]))

    def last(name: str) -> Cell:
        return lambda run: _last_and_best(results[run.label].get(name))

    gates = dict.fromkeys(text for run in runs for text in facts.gates(run))

    def gate(text: str) -> Cell:
        return lambda run: facts.gates(run).get(text)

    rows: list[tuple[str, Cell]] = [
        ("steps", _steps),
        *((name, last(name)) for name in leading),
        *((f"gate {text}", gate(text)) for text in gates),
        ("running time", _running_time),
        ("time spent training", _useful),
        ("devices", _devices),
    ]
    if len(runs) == 1:
        run = runs[0]
        when = facts.span(run)
        started = f"started {formats.moment(when[0])}" if when else ""
        cards = [
            element("div", element("dt", name), element("dd", content))
            for name, cell in rows
            if (content := cell(run)) is not None
        ]
        blocks = [
            element("h1", names[0]),
            element("p", _state(run), class_="state"),
            element("p", element("span", str(run.directory)), started, class_="path"),
            element("dl", *cards, class_="cards"),
        ]
    else:
        title = element("h1", f"{len(runs)} runs: {', '.join(names)}")
        blocks = [title, side_by_side(runs, [("state", _state), *rows, ("started", _started)])]
    problems = [
        element("li", element("b", f"{run.label}: ") if len(runs) > 1 else "", line)
        for run in runs
        for line in (*run.problems, *planned.deviations(run))
    ]
    if problems:
        blocks.append(element("ul", *problems, class_="hint"))
    return element("header", *blocks)


def _state(run: RecordedRun) -> Html:
    state = facts.ending(run)
    pill = element("span", state.state, class_=f"pill {state.state}")
    return joined([pill, " ", state.sentence])


def _steps(run: RecordedRun) -> object:
    completed, total = facts.steps_done(run), facts.steps_of_run(run)
    if completed is None:
        return None
    return joined(
        [f"{completed:,}", element("small", f" of {total:,}") if total is not None else ""]
    )


def _running_time(run: RecordedRun) -> object:
    account, span = times.account(run.history), facts.span(run)
    if account is not None:
        starts = len(run.starts)
        count = element("small", f" in {starts} starts") if starts > 1 else ""
        return joined([formats.seconds(account.total_s), count])
    return None if span is None else formats.seconds(span[1] - span[0])


def _useful(run: RecordedRun) -> object:
    account = times.account(run.history)
    return account and formats.percent(account.seconds[times.STEPS], account.total_s)


def _devices(run: RecordedRun) -> object:
    start = run.last("start")
    if not start:
        return None
    processes = int(start.get("processes") or 1)
    per_process = f" in {processes} processes" if processes > 1 else ""
    kind = element("small", start.get("device_kind", "?"))
    return joined([f"{start.get('devices', '?')}{per_process}", kind])


def _started(run: RecordedRun) -> object:
    span = facts.span(run)
    if span is None:
        return None
    day, _, clock = formats.moment(span[0]).partition(" ")
    return joined([day, element("small", clock)])


def _last_and_best(result: facts.Result | None, *, first: bool = False) -> object:
    if result is None:
        return None
    last, best = formats.metric(result.last, result.unit), ""
    if result.best is not None and (first or result.best != result.last):
        best = f" best {formats.metric(result.best, result.unit)} at step {result.best_step:,}"
    before = f"{formats.metric(result.first, result.unit)} → " if first else ""
    return joined([f"{before}{last}", element("small", best)])


def curves(runs: Sequence[RecordedRun], notes: Sequence[str]) -> Html:
    """Builds the placeholder for the charts, their controls, and the table of results.

    Args:
        notes: sentences about what the curves do not show.
    """

    def control(before: str, tag: str, *children: object, **attributes: object) -> Html:
        return element("label", before, element(tag, **attributes), *children)

    several = range(len(runs) if len(runs) > 1 else 0)
    axes = {"step": "steps", "time": "wall time", "examples": "examples", "tokens": "tokens"}
    options = [element("option", text, value=value) for value, text in axes.items()]
    smooth = {"type": "range", "id": "smooth", "min": "0", "max": "0.98", "step": "0.02"}
    controls = element(
        "div",
        *(
            control("", "input", " ", named(runs, n), type="checkbox", checked=True, data_run=n)
            for n in several
        ),
        element("label", "x axis: ", element("select", *options, id="over")),
        control("", "input", " log scale for losses and norms", type="checkbox", id="log"),
        control("smoothing ", "input", element("output", "0", for_="smooth"), value="0", **smooth),
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
    results = {run.label: facts.results(run) for run in runs}
    if len(runs) > 1:

        def cell(name: str) -> Cell:
            return lambda run: _last_and_best(results[run.label].get(name), first=True)

        names = dict.fromkeys(name for result in results.values() for name in result)
        return side_by_side(runs, [(name, cell(name)) for name in names])
    cells = []
    for name, result in results[runs[0].label].items():
        values = (
            formats.metric(value, result.unit) for value in (result.first, result.last, result.best)
        )
        step = NOTHING if result.best_step is None else f"{result.best_step:,}"
        cells.append([name, *values, step])
    return table(["", "first", "last", "best", "at step"], cells) if cells else Html("")


def configs(runs: Sequence[RecordedRun]) -> Html:
    """Shows what differs between the runs or was set on the command line, then the full config."""
    flat = {run.label: config.flat(run.config) for run in runs}
    names = list(dict.fromkeys(name for values in flat.values() for name in values))
    if not names:
        return Html("")

    def value(name: str) -> Cell:
        return lambda run: _setting(flat[run.label][name]) if name in flat[run.label] else None

    def of(names: Iterable[str], *, mark: bool = False) -> Html:
        return side_by_side(runs, [(name, value(name)) for name in names], mark=mark)

    several = len(runs) > 1
    if several:
        title = "Differences"
        differing = (n for n in names if len({str(value(n)(run)) for run in runs}) > 1)
        none = element("p", "None: the runs have the same config.", class_="none")
        first: Html = of(differing, mark=True) or none
    else:
        title, set_names = "Set on the command line", _from_command_line(runs[0])
        first = of(name for name in names if name in set_names)
    summary = element("summary", f"All {len(names)} values")
    everything = element("details", summary, of(names, mark=several))
    return section("Config", element("h3", title) if first else "", first, everything)


def _setting(value: object) -> str:
    """Formats a config value the way it is typed on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_command_line(run: RecordedRun) -> set[str]:
    arguments = itertools.chain.from_iterable(start.get("arguments") or () for start in run.starts)
    return {
        str(argument).removeprefix("--").partition("=")[0].replace("-", "_")
        for argument in arguments
        if str(argument).startswith("--")
    }


def hardware(runs: Sequence[RecordedRun]) -> Html:
    """Shows the hardware and the versions of the newest start."""

    def of(name: str) -> Cell:
        return lambda run: run.last("start").get(name) or None

    def version(name: str) -> Cell:
        return lambda run: run.last("start").get("versions", {}).get(name)

    def parameters(run: RecordedRun) -> object:
        count = run.last("compiled").get("params")
        return f"{count:,}" if count else None

    packages = dict.fromkeys(n for run in runs for n in run.last("start").get("versions", {}))
    rows = [
        ("model parameters", parameters),
        *((name.replace("_", " "), of(name)) for name in (*_MACHINE, "platform")),
        *((name, version(name)) for name in packages),
    ]
    table = side_by_side(runs, rows, mark=len(runs) > 1)
    return section("Hardware and versions", table, note="Of the newest start; host of process 0.")


def starts(runs: Sequence[RecordedRun]) -> Html:
    """Shows each start: where it resumed from, how it ended, what had changed before it."""
    blocks: list[object] = []
    for index, run in enumerate(runs):
        attempts = times.attempts(run.history)
        rows = []
        for number, attempt in enumerate(attempts):
            start = attempt.start
            before = attempts[number - 1].start if number else start
            source = str(start.get("from") or "").removeprefix(f"{run.directory}/")
            rows.append(
                [
                    str(number + 1),
                    formats.moment(attempt.began),
                    f"{source} (step {start['step']:,})" if source else "scratch",
                    f"{start['step']:,} → {max(event['step'] for event in attempt.events):,}",
                    formats.seconds(attempt.last - attempt.began),
                    facts.how_ended(run, attempt),
                    joined(element("div", line) for line in _changes(before, start)),
                ]
            )
        if rows:
            columns = ["", "started", "from", "steps", "duration", "end", "changes"]
            blocks += [heading(runs, index), table(columns, rows)]
    return section("Starts", *blocks)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before is now:
        return []
    machine = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in _MACHINE
        if before.get(name) != now.get(name)
    ]
    return [
        *config.differences(before.get("config") or {}, now.get("config") or {}),
        *machine,
        *config.differences(before.get("versions") or {}, now.get("versions") or {}),
    ] or ["nothing"]
