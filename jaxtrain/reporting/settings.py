"""The page's sections on what was run: samples, config, hardware, starts, skipped input."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxtrain import config
from jaxtrain.reporting import formats, times
from jaxtrain.reporting.markup import Html, element, escaped, joined, table
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.samples import (
    MOST_BYTES,
    MOST_EARLIER_BYTES,
    Sample,
    fitting,
    found,
    slider_steps,
)
from jaxtrain.reporting.sections import NOTHING, Row, named, section, side_by_side

_MAX_ROWS = 10
_MAX_CHARACTERS = 20_000

_ROWS = (
    "Rows of a reconstruction: original, reconstruction, error (black = 0, white = 25% of the "
    "range)."
)


def samples(runs: Sequence[RecordedRun]) -> Html:
    """Shows the newest images, clips, and texts, and with a slider those of earlier validations."""
    every = [found(run.directory) for run in runs]
    newest = [group[-1] for groups in every for group in groups]
    if not newest:
        return Html("")
    kept = {one.path for one in fitting(newest)}
    left = MOST_BYTES - sum(one.size for one in newest if one.path in kept)
    omitted = [one for one in newest if one.path not in kept]
    earlier = [
        one for groups in every for group in groups for one in group[:-1] if group[-1].path in kept
    ]
    chosen = set(slider_steps(earlier, min(left, MOST_EARLIER_BYTES)))
    shown: list[object] = []
    for index, groups in enumerate(every):
        figures = [
            _figure([*(one for one in group[:-1] if one.step in chosen), group[-1]])
            for group in groups
            if group[-1].path in kept
        ]
        title = element("h3", named(runs, index)) if len(runs) > 1 and figures else ""
        shown += [title, element("div", *figures, class_="samples")]
    steps = sorted(chosen | {one.step for one in newest if one.path in kept})
    notes = []
    if any(one.name == "reconstruction" for one in newest):
        notes.append(_ROWS)
    if more := len({one.step for one in earlier} - chosen):
        notes.append(
            f"The slider has {len(steps)} steps, to keep the page small; samples/ has {more} more."
        )
    if omitted:
        names = ", ".join(
            f"{one.path.name} ({formats.size(one.size)})" for one in omitted[:_MAX_ROWS]
        )
        if len(omitted) > _MAX_ROWS:
            names += f" and {len(omitted) - _MAX_ROWS:,} more"
        notes.append(f"Omitted to keep the page small: {names}.")
    return section("Samples", _slider(steps), *shown, note=" ".join(notes))


def _slider(steps: Sequence[int]) -> Html:
    """Builds the slider over the steps, which page.js shows; empty for a single step."""
    if len(steps) < 2:
        return Html("")
    slider = element(
        "input",
        type="range",
        id="sample-step",
        min="0",
        max=len(steps) - 1,
        value=len(steps) - 1,
        data_steps=" ".join(map(str, steps)),
    )
    shown = element("output", f"{steps[-1]:,}", for_="sample-step")
    label = element("label", "step ", slider, shown, class_="steps")
    return element("div", label, class_="controls", id="sample-controls", hidden=True)


def _figure(every: Sequence[Sample]) -> Html:
    """Builds a figure of one sample at several steps, of which page.js shows one."""
    newest = every[-1]
    step = element("span", f"{newest.step:,}", class_="at")
    caption = element("figcaption", f"{newest.name} ", element("small", "after step ", step))
    shown = [_content(one, hidden=one is not newest) for one in every]
    text = newest.kind == "text/plain"
    return element("figure", caption, *shown, class_="text" if text else None)


def _content(sample: Sample, *, hidden: bool) -> Html:
    attributes: dict[str, Any] = {"data_step": sample.step, "hidden": hidden}
    try:
        if sample.kind == "text/plain":
            text = sample.path.read_text(encoding="utf-8", errors="replace")
            shown = text[:_MAX_CHARACTERS]
            if len(text) > len(shown):
                shown += f"\n… {len(text) - len(shown):,} more characters"
            return element("pre", shown, tabindex="0", **attributes)
        address = sample.data_uri()
    except OSError as error:
        reason = f"{sample.path.name} cannot be read ({error.strerror})."
        return element("p", reason, class_="none", **attributes)
    described = f"{sample.name} after step {sample.step:,}"
    if sample.kind == "video/mp4":
        return element(
            "video",
            src=address,
            aria_label=described,
            autoplay=not hidden,
            controls=True,
            loop=True,
            muted=True,
            playsinline=True,
            preload="none" if hidden else "auto",
            tabindex="0",
            **attributes,
        )
    return element("img", src=address, alt=described, **attributes)


def configs(runs: Sequence[RecordedRun]) -> Html:
    """Shows what differs between the runs or was set on the command line, then the full config."""
    flat = [config.flat(run.config) for run in runs]
    if not any(flat):
        return Html("")
    names = list(dict.fromkeys(name for one in flat for name in one))

    def cells(name: str) -> list[object]:
        return [formats.setting(one[name]) if name in one else NOTHING for one in flat]

    parts: list[object] = []
    if len(runs) > 1:
        differing = [name for name in names if len({str(cell) for cell in cells(name)}) > 1]
        rows: list[Row] = [(name, cells(name)) for name in differing]
        parts.append(element("h3", "Differences"))
        parts.append(
            side_by_side(runs, rows, mark=True)
            if rows
            else element("p", "None: the runs have the same config.", class_="none")
        )
    else:
        from_command_line = _from_command_line(runs[0])
        chosen: list[Row] = [(name, cells(name)) for name in names if name in from_command_line]
        if chosen:
            parts += [element("h3", "Set on the command line"), side_by_side(runs, chosen)]
    everything: list[Row] = [(name, cells(name)) for name in names]
    parts.append(
        element(
            "details",
            element("summary", f"All {len(names)} values"),
            side_by_side(runs, everything, mark=len(runs) > 1),
        )
    )
    return section("Config", *parts)


def _from_command_line(run: RecordedRun) -> set[str]:
    """Returns the fields that were set on the command line of any start."""
    arguments = itertools.chain.from_iterable(start.get("arguments") or () for start in run.starts)
    return {
        str(argument).removeprefix("--").partition("=")[0].replace("-", "_")
        for argument in arguments
        if str(argument).startswith("--")
    }


def hardware(runs: Sequence[RecordedRun]) -> Html:
    """Shows the hardware and the versions of the newest start."""
    starts = [run.last("start") for run in runs]
    if not any(starts):
        return Html("")

    def of(name: str) -> list[object]:
        return [escaped(start[name]) if start.get(name) else NOTHING for start in starts]

    rows: list[Row] = [
        ("device", of("device_kind")),
        ("devices", of("devices")),
        ("processes", of("processes")),
        ("host of process 0", of("host")),
        ("platform", of("platform")),
        ("driver", of("driver")),
    ]
    parameters: list[object] = [
        f"{run.last('compiled')['params']:,}" if run.last("compiled").get("params") else NOTHING
        for run in runs
    ]
    rows.append(("model parameters", parameters))
    versions: list[Row] = []
    packages = dict.fromkeys(name for start in starts for name in start.get("versions") or {})
    for name in packages:
        cells: list[object] = [(one.get("versions") or {}).get(name, NOTHING) for one in starts]
        versions.append((name, cells))
    several = len(runs) > 1
    return element(
        "div",
        section("Hardware", side_by_side(runs, rows, mark=several)),
        section("Versions", side_by_side(runs, versions, mark=several)),
        class_="pair",
    )


def starts(runs: Sequence[RecordedRun]) -> Html:
    """Shows each start: where it resumed from, how it ended, what had changed before it."""
    parts: list[object] = []
    for index, run in enumerate(runs):
        found = times.attempts(run.history)
        if not found:
            continue
        rows = []
        for number, attempt in enumerate(found):
            before = found[number - 1].start if number else None
            start = attempt.start
            source = start.get("from")
            rows.append(
                [
                    str(number + 1),
                    formats.moment(attempt.began),
                    _source(run, source, int(start["step"])),
                    f"{start['step']:,} → {_last_step(attempt):,}",
                    formats.seconds(attempt.last - attempt.began),
                    _end(run, attempt, last=number == len(found) - 1),
                    joined([*(element("div", line) for line in _changes(before, start))]),
                ]
            )
        head = ["", "started", "from", "steps", "duration", "end", "changes"]
        parts += [element("h3", named(runs, index)) if len(runs) > 1 else ""]
        parts.append(table(head, rows, class_="words"))
    return section("Starts", *parts) if parts else Html("")


def _source(run: RecordedRun, source: object, step: int) -> str:
    if not source:
        return "scratch"
    inside = f"{run.directory}/"
    return f"{str(source).removeprefix(inside)} (step {step:,})"


def _last_step(attempt: times.Attempt) -> int:
    return max(int(event["step"]) for event in attempt.events)


def _end(run: RecordedRun, attempt: times.Attempt, *, last: bool) -> str:
    if attempt.end is not None:
        return f"{attempt.end.get('why') or ''} (code {attempt.end.get('code')})".strip()
    return "running" if last and run.active_process else "killed: no end was recorded"


def _changes(before: Any, now: Any) -> list[str]:
    if before is None:
        return []
    settings = config.differences(before.get("config") or {}, now.get("config") or {})
    packages = config.differences(before.get("versions") or {}, now.get("versions") or {})
    machine = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in ("host", "processes", "devices", "device_kind", "driver")
        if before.get(name) != now.get(name)
    ]
    return [*settings, *machine, *packages] or ["nothing"]


def problems(runs: Sequence[RecordedRun]) -> Html:
    """Shows inputs that could not be read and steps that were skipped."""
    parts: list[object] = []
    for index, run in enumerate(runs):
        if len(runs) > 1 and (run.quarantined or run.bad_steps):
            parts.append(element("h3", named(runs, index)))
        if run.quarantined:
            rows = [[one.path, one.found, one.reason] for one in run.quarantined[:_MAX_ROWS]]
            parts.append(
                element("p", _counted(len(run.quarantined), "input that could not be read"))
            )
            parts.append(table(["input", "found in", "why"], rows, class_="words"))
        if run.bad_steps:
            fields = ("step", "position", "loss", "grad_norm", "origin")
            rows = [
                [NOTHING if one.get(name) is None else str(one[name]) for name in fields]
                for one in run.bad_steps[:_MAX_ROWS]
            ]
            parts.append(element("p", _counted(len(run.bad_steps), "step that was skipped")))
            heads = ["after step", "first example", "loss", "gradient norm", "NaN/Inf began"]
            parts.append(table(heads, rows))
    if not parts:
        parts = [element("p", "None: all input was read and no step was skipped.", class_="none")]
    return section("Unreadable input and skipped steps", *parts)


def _counted(count: int, what: str) -> str:
    first, _, rest = what.partition(" ")
    described = what if count == 1 else f"{first}s {rest.replace('was', 'were', 1)}"
    shown = f"; the first {_MAX_ROWS}:" if count > _MAX_ROWS else ":"
    return f"{count:,} {described}{shown}"
