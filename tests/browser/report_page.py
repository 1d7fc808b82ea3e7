"""Tests the report in a real browser: charts, controls, and that it sends no requests.

Not part of the regular suite, as it requires Chromium and playwright (``.ci/run report``).
"""

import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from reporting import written_run

from jaxtrain.reporting import page

_PATIENCE_MS = 120_000  # the script is large, and the machine may be busy
_DRAWN = "body[data-drawn]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path is not None, "no chromium on PATH: apt-get install chromium"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Writes two runs with different losses."""
    found = []
    for number, name in enumerate(("first", "second")):
        records = written_run.records(range(1, 101))
        for record in records:
            if "train/loss" in record:
                record["train/loss"] += math.sin(record["step"]) / 10 + number
        directory = tmp_path_factory.mktemp("runs") / name
        written_run.write(directory, metrics=records, history=written_run.full_history())
        written_run.add_samples(directory, [50, 75, 100])
        found.append(directory)
    return found


def wait_until(tab: Page, expression: str) -> None:
    """Polls an expression until it is true; the page's policy forbids waiting inside the page."""
    deadline = time.monotonic() + _PATIENCE_MS / 1000
    while not tab.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        tab.wait_for_timeout(100)


class Opened:
    """A report in the browser."""

    def __init__(self, browser: Browser, file: Path, **how: Any) -> None:
        context = browser.new_context(**how)
        self.page: Page = context.new_page()
        self.page.set_default_timeout(_PATIENCE_MS)
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(_DRAWN)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def traces(self, metric: str) -> int:
        """Returns the number of curves drawn in a chart, counted as SVG elements."""
        return self.page.locator(f"[data-metric={metric}] .scatterlayer .trace").count()

    def path(self, metric: str, number: int = 0) -> str:
        """Returns the SVG path of a curve."""
        lines = self.page.locator(f"[data-metric={metric}] .scatterlayer .trace path.js-line")
        return str(lines.nth(number).get_attribute("d"))


@pytest.fixture(scope="module")
def single(browser: Browser, runs: list[Path]) -> Opened:
    page.write(runs[:1], runs[0] / "report.html")
    return Opened(browser, runs[0] / "report.html", viewport={"width": 1400, "height": 1000})


@pytest.fixture(scope="module")
def two_runs(browser: Browser, runs: list[Path]) -> Opened:
    page.write(runs, runs[0] / "both.html")
    return Opened(browser, runs[0] / "both.html", viewport={"width": 420, "height": 900})


def test_curves_are_drawn_with_validation_points(single: Opened) -> None:
    assert single.traces("loss") == 2
    points = single.page.locator("[data-metric=loss] .scatterlayer .trace .points path")
    assert points.count() == 2  # validations after steps 50 and 100
    assert single.path("loss").count("L") > 50
    drawn = single.page.locator("#charts .plot .scatterlayer .trace")
    assert drawn.count() == 3  # train and validation loss, gradient norm; the others are constant
    assert single.page.locator("[data-metric=loss] .shapelayer path").count() == 1  # the resume


def test_hovering_shows_values(single: Opened) -> None:
    box = single.page.locator("[data-metric=loss] .nsewdrag").bounding_box()
    assert box is not None
    single.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    single.page.wait_for_selector("[data-metric=loss] .hoverlayer .legend text")
    shown = single.page.locator("[data-metric=loss] .hoverlayer").text_content() or ""
    assert "train" in shown


def test_log_scale_smoothing_and_axis_can_be_chosen(single: Opened) -> None:
    tab = single.page

    def axis() -> str:
        kind = "document.querySelector('[data-metric=loss]')._fullLayout.yaxis.type"
        return str(tab.evaluate(kind))

    before = single.path("loss")
    tab.check("#log")
    wait_until(tab, "document.querySelector('[data-metric=loss]')._fullLayout.yaxis.type === 'log'")
    assert single.path("loss") != before
    tab.uncheck("#log")
    wait_until(
        tab, "document.querySelector('[data-metric=loss]')._fullLayout.yaxis.type === 'linear'"
    )
    assert (axis(), single.path("loss")) == ("linear", before)

    tab.locator("#smooth").fill("0.9")
    wait_until(tab, "document.querySelectorAll('[data-metric=loss] .trace').length === 3")
    assert single.path("loss", 1) != before  # drawn above the raw curve
    tab.locator("#smooth").fill("0")
    wait_until(tab, "document.querySelectorAll('[data-metric=loss] .trace').length === 2")

    for value, title in (("time", "wall time, seconds"), ("tokens", "tokens"), ("step", "steps")):
        tab.select_option("#over", value)
        text = tab.locator("[data-metric=loss] .xtitle", has_text=title)
        text.wait_for()


def test_zooming_one_chart_zooms_all(single: Opened) -> None:
    tab = single.page
    box = tab.locator("[data-metric=loss] .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + box["width"] * 0.25, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=5)
    tab.mouse.up()
    other = "document.querySelector('[data-metric=grad_norm]')._fullLayout.xaxis.range"
    wait_until(tab, f"{other}[0] > 15 && {other}[1] < 65")
    tab.mouse.dblclick(box["x"] + box["width"] * 0.4, middle)
    wait_until(tab, f"{other}[0] < 10 && {other}[1] > 90")


def test_two_runs_share_charts_and_can_be_hidden(two_runs: Opened) -> None:
    assert two_runs.traces("loss") == 4
    assert two_runs.path("loss", 0) != two_runs.path("loss", 1)
    two_runs.page.uncheck("input[data-run='1']")
    wait_until(two_runs.page, "document.querySelectorAll('[data-metric=loss] .trace').length === 2")
    two_runs.page.check("input[data-run='1']")
    wait_until(two_runs.page, "document.querySelectorAll('[data-metric=loss] .trace').length === 4")


def test_images_are_shown_and_clips_play(single: Opened) -> None:
    tab = single.page
    width = "[...document.querySelectorAll('figure img')].map(one => one.naturalWidth)"
    assert tab.evaluate(width) == [32, 32, 32]
    shown = "document.querySelector('video:not([hidden])')"
    wait_until(tab, f"{shown}.currentTime > 0")  # without a click
    assert tab.evaluate(f"[{shown}.muted, {shown}.loop, {shown}.controls]") == [True] * 3


def test_the_slider_shows_the_samples_of_a_step(single: Opened) -> None:
    tab = single.page
    slider = tab.locator("#sample-step")

    def shown() -> list[str]:
        found = "[...document.querySelectorAll('figure [data-step]')]"
        return list(
            tab.evaluate(f"{found}.filter(one => !one.hidden).map(one => one.dataset.step)")
        )

    assert slider.get_attribute("aria-valuetext") == "step 100"
    assert shown() == ["100"] * 3
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert shown() == ["75"] * 3
    assert slider.get_attribute("aria-valuetext") == "step 75"
    assert tab.locator("#sample-controls output").text_content() == "75"
    assert tab.locator("figure .at").all_text_contents() == ["75"] * 3
    assert tab.locator("figure pre:visible").text_content() == "step 75 <b>bold</b>"
    tab.keyboard.press("Home")
    assert shown() == ["50"] * 3
    wait_until(tab, "document.querySelector('video[data-step=\"50\"]').currentTime > 0")
    tab.keyboard.press("End")
    assert shown() == ["100"] * 3
    assert tab.evaluate("document.querySelector('video[data-step=\"50\"]').paused")


def test_all_charts_have_the_same_range_of_steps(single: Opened) -> None:
    ranges = "[...document.querySelectorAll('.plot')].map(one => one._fullLayout.xaxis.range)"
    found = single.page.evaluate(ranges)
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0][0] < 1
    assert found[0][1] > 100


def test_a_single_point_has_a_readable_axis(browser: Browser, tmp_path: Path) -> None:
    run = written_run.write(tmp_path / "run", metrics=written_run.records([7]))
    page.write([run], run / "report.html")
    tab = Opened(browser, run / "report.html").page
    ranges = "document.querySelector('[data-metric=tokens_per_second]')._fullLayout"
    low, high = tab.evaluate(f"{ranges}.yaxis.range")
    assert low == 0
    assert 512 < high < 1024
    assert tab.evaluate(f"{ranges}.xaxis.range") == [3.5, 10.5]


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_never_scrolls_sideways(two_runs: Opened, width: int) -> None:
    two_runs.page.set_viewport_size({"width": width, "height": 900})
    two_runs.page.wait_for_timeout(500)
    assert two_runs.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_charts_follow_the_color_scheme(two_runs: Opened) -> None:
    seen = (
        "getComputedStyle(document.querySelector('[data-metric=loss] .main-svg')).backgroundColor"
    )
    two_runs.page.emulate_media(color_scheme="dark")
    wait_until(two_runs.page, f"{seen} === 'rgb(20, 23, 27)'")
    two_runs.page.emulate_media(color_scheme="light")
    wait_until(two_runs.page, f"{seen} === 'rgb(255, 255, 255)'")


def test_a_run_without_metrics_has_a_page(browser: Browser, tmp_path: Path) -> None:
    run = written_run.write(tmp_path / "run", metrics=[])
    page.write([run], run / "report.html")
    context = browser.new_context()
    tab = context.new_page()
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto((run / "report.html").as_uri())
    tab.wait_for_selector("#charts .none")
    assert not problems


def test_the_page_sends_no_requests_and_logs_no_errors(single: Opened, two_runs: Opened) -> None:
    """Runs last, after the interactions of the tests above."""
    for opened in (single, two_runs):
        assert opened.problems == []
        assert len(opened.requests) >= 1
        for address in opened.requests:
            assert address.startswith(("file:", "data:", "blob:")), address
