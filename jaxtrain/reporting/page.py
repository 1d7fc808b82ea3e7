"""Writes the page: one file with all text, styles, scripts, and images."""

import base64
import datetime
import functools
import gzip
import importlib.resources
import secrets
import string
from collections.abc import Sequence
from pathlib import Path

from jaxtrain import formats, versions
from jaxtrain.errors import InputError, first_line
from jaxtrain.reporting import costs, curves, facts, run_files, samples, sections
from jaxtrain.reporting.markup import Html, element, escaped, joined, json_text
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.storage.atomic import write_whole

NAME = "report.html"


def write(
    directories: Sequence[Path], out: Path, *, holders: Sequence[str | None] | None = None
) -> list[RecordedRun]:
    """Writes the page of one run, or of several runs side by side.

    Args:
        out: the file, which is replaced atomically.
        holders: the process that trains each run, as in :func:`run_files.read`.

    Returns:
        The runs as read.

    Raises:
        InputError: a record of a run is damaged: it is JSON, but not what a run writes.
        OSError: the file cannot be written.
    """
    labels = run_files.labels(directories)
    try:
        runs = [
            run_files.read(directory, label, holder=holder)
            for directory, label, holder in zip(
                directories, labels, holders or [None] * len(directories), strict=True
            )
        ]
        content = page(runs)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Run directories are trusted: no record is checked field by field.
        raise InputError(
            f"the report of {', '.join(map(str, directories))} cannot be made, because a record in "
            f"its .json or .jsonl files is damaged ({type(error).__name__}: {first_line(error)}): "
            "delete that line, or restore the file"
        ) from error
    # A path on the page may contain bytes that are not UTF-8.
    write_whole(out, content.encode(errors="replace"))
    return runs


def page(runs: Sequence[RecordedRun]) -> str:
    """Returns the page.

    The browser runs only scripts with the page's random nonce and loads nothing, so a run's text
    that ever got in unescaped could not run.
    """
    configs = [sections.configs(runs)]
    several = len(runs) > 1  # of which one asks first what differs
    return _filled(
        runs,
        title=", ".join(run.label for run in runs),
        head=[sections.head(runs), *(configs if several else ())],
        tail=[
            samples.samples(runs),
            costs.where_time_went(runs),
            element("div", costs.throughput(runs), costs.memory(runs), class_="pair"),
            *(() if several else configs),
            sections.hardware(runs),
            sections.starts(runs),
        ],
    )


def without_curves(title: str, blocks: Sequence[object]) -> str:
    """Returns a page with a title and these elements."""
    return _filled((), title=title, head=[element("header", element("h1", title), *blocks)])


def _filled(
    runs: Sequence[RecordedRun], *, title: str, head: Sequence[Html], tail: Sequence[Html] = ()
) -> str:
    charts, notes = curves.charts(runs)
    notes += [line for run in runs for line in curves.nonfinite(run, facts.results(run))]
    data = {"runs": [curves.described(run) for run in runs], "charts": charts}
    return string.Template(_shipped("page.html")).substitute(
        nonce=secrets.token_urlsafe(16),
        title=escaped(title),
        style=_shipped("colors.css") + _shipped("page.css"),
        body=joined(
            [*head, *([sections.curves(runs, notes)] if runs else []), *tail, _foot()], "\n"
        ),
        data=json_text(data),
        plotly=_plotly() if charts else "",
        program=_shipped("page.js"),
    )


def _foot() -> Html:
    now = datetime.datetime.now(datetime.UTC).timestamp()
    version = versions.versions()["jaxtrain"]
    return element("footer", f"Written {formats.moment(now)} by jaxtrain {version}.")


def _shipped(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


@functools.cache
def _plotly() -> str:
    """Returns plotly.js, gzipped and in base64: 2 MB instead of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()
