"""The plans that the documentation shows are those of today; requires ``cuda12``.

Not part of the default suite: ``python -m pytest tests/docs/documented_plans.py``.
"""

import re
import shlex
from pathlib import Path

import pytest

from jaxtrain import config, main
from jaxtrain.formats import GIB
from jaxtrain.planning.planner import Plan, Planner

CHECKOUT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
SAMPLE = re.compile(r"^```text\n((\w+) on \d+ x .*?)^```$", re.MULTILINE | re.DOTALL)
PLANNED = re.compile(r"planned: ([\d.]+) to ([\d.]+) (m?s) per step \| planned: ([\d.]+) GiB")


def samples() -> list[tuple[str, str, str]]:
    """Page, command, and the output that the page shows for the last such command before it."""
    found = []
    for page in sorted((CHECKOUT / "docs").rglob("*.md")):
        text = page.read_text()
        for match in SAMPLE.finditer(text):
            commands = re.findall(rf"^jaxtrain (plan .*\b{match[2]}\b.*)$", text, re.MULTILINE)
            before = [line for line in commands if text.index(line) < match.start()]
            found.append((page.name, before[-1], match[1]))
    return found


def planned() -> list[str]:
    """The rows of README.md with planned numbers."""
    text = (CHECKOUT / "README.md").read_text()
    return [line for line in text.splitlines() if PLANNED.search(line)]


def values(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


@pytest.mark.parametrize(("page", "command", "shown"), samples())
def test_a_page_shows_the_output_of_its_command(
    page: str,
    command: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Line by line, in the same order; "..." stands for omitted lines."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main(shlex.split(command, comments=True)) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        words = NUMBER.sub("0", line)
        same = next((one for one in printed if NUMBER.sub("0", one) == words), None)
        assert same is not None, f"{page}: {command} prints no such line: {line}"
        # The time that this machine takes to compile is part of the hours and of the cost.
        assert values(line) == pytest.approx(values(same), rel=0.02, abs=0.01), f"{page}: {same}"


@pytest.mark.parametrize("row", planned())
def test_readme_has_the_plan_of_a_config(row: str) -> None:
    numbers, name = PLANNED.search(row), re.search(r"`jaxtrain train (\w+) ([^`]*)`", row)
    assert numbers
    assert name
    assert config.named(name[1])
    plan: Plan = Planner(name[1], name[2].split()).plan()
    assert plan.time
    scale = 1000 if numbers[3] == "ms" else 1
    expected = (scale * plan.time.best, scale * plan.time.worst, plan.memory.needed / GIB)
    shown = (float(numbers[1]), float(numbers[2]), float(numbers[4]))
    assert shown == pytest.approx(expected, rel=0.02)


def test_plans_are_shown() -> None:
    assert len(samples()) >= 2
    assert planned()
