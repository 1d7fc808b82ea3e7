"""The history of a run: how each start spent its time, and how it ended."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import IMPORTED_AT, config
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import InputError, RunAgain, Stopped
from jaxtrain.telemetry import history
from jaxtrain.telemetry.phases import Phases
from jaxtrain.training.run_log import RunLog


class RecordingHeartbeat(Heartbeat):
    """Records the exit code of this process."""

    code: int | None = None

    def leave(self, code: int) -> None:
        self.code = code


class Story:
    """A run that has only phases, on a clock that the test controls."""

    def __init__(self, directory: Path, position: Position = Position()) -> None:  # noqa: B008
        self.now = 100.0
        self.directory = directory
        self.position = position
        signals = StopSignals()
        self.heartbeat = RecordingHeartbeat(KeyValueStore(), signals)
        self.watchdog = Watchdog(None, self.heartbeat)
        signals.before_exit(self.heartbeat.leave)
        self.log = RunLog(signals, self.watchdog)
        self.phases = self.log.phases = Phases(self.watchdog, self.log.emit, lambda: self.now)
        self.signals = signals

    def begin(
        self, start_from: str | None = None, arguments: tuple[str, ...] = ("--config", "demo_mlm")
    ) -> RunLog:
        """Opens the run directory."""
        self.log.open(
            config.named("demo_mlm"),
            self.directory,
            start_from,
            self.position,
            arguments,
        )
        return self.log

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def records(self) -> list[dict[str, Any]]:
        text = (self.directory / history.NAME).read_text()
        return [json.loads(line) for line in text.splitlines()]

    def phases_written(self) -> list[tuple[str, float, int]]:
        """Returns name, seconds and step of each phase in the file."""
        found = [record for record in self.records() if record["event"] == "phase"]
        return [(one["name"], round(one["seconds"], 6), one["step"]) for one in found]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    made = Story(tmp_path)
    yield made
    made.log.close()


def test_every_second_of_a_run_belongs_to_one_phase(story: Story) -> None:
    story.spend(0.25)
    with story.phases.within("start"):
        story.spend(0.5)
    story.spend(0.25)
    written = story.begin()
    with story.phases.within("data", None):
        story.spend(2.0)
    story.spend(0.25)  # the model is built
    assert not (story.directory / history.NAME).exists()
    written.started(40)
    with story.phases.within("compile"):
        story.spend(4.0)
    story.phases.training()
    story.spend(8.0)
    story.phases.stepped(1, 0.5, {"train/loss": 2.0})
    story.phases.logged({"train/loss": 2.0})
    story.spend(16.0)
    story.phases.stepped(2, 1.0, {"train/loss": 1.0})
    with story.phases.within("evaluation", 0.0):
        story.spend(32.0)
        with story.phases.within("compile"):
            story.spend(64.0)
        story.spend(128.0)
    story.phases.ending()
    story.spend(0.5)
    written.ended(0, "done: 2 of 40 steps")
    written.ended(1, "a second end is ignored")

    assert story.phases_written() == [
        ("start", 1.0, 0),
        ("data", 2.0, 0),
        ("start", 0.25, 0),
        ("compile", 4.0, 0),
        ("training", 8.0, 1),
        ("training", 16.0, 2),
        ("evaluation", 32.0, 2),
        ("compile", 64.0, 2),
        ("evaluation", 128.0, 2),
        ("end", 0.5, 2),
    ]
    assert sum(seconds for _, seconds, _ in story.phases_written()) == story.now - 100.0
    first, *_, last = story.records()
    assert (last["event"], last["code"], last["why"]) == ("end", 0, "done: 2 of 40 steps")
    training = [record for record in story.records() if record.get("name") == "training"]
    assert [(one["from_step"], one["step"], one["waited_s"]) for one in training] == [
        (0, 1, 0.5),
        (1, 2, 1.0),
    ]
    assert (first["event"], first["step"], first["total"], first["from"]) == ("start", 0, 40, None)
    assert first["arguments"] == ["--config", "demo_mlm"]
    assert first["config"]["name"] == "demo_mlm"
    assert first["versions"]["jax"]
    assert first["devices"] == 8
    assert first["platform"] == "cpu"


def test_a_resume_removes_an_incomplete_line_and_appends(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.begin().started(10)
    with (tmp_path / history.NAME).open("a") as file:
        file.write('{"event": "pha')  # the process was killed here

    again = Story(tmp_path, Position(4, 32))
    again.spend(1.0)
    written = again.begin("s3://bucket/run/checkpoints/4")
    written.started(10)
    again.spend(1.0)
    written.ended(75, "stopped by SIGTERM")
    assert [record["event"] for record in again.records()] == ["start", "start", "phase", "end"]
    resumed = again.records()[1]
    assert (resumed["step"], resumed["seen"]) == (4, 32)
    assert resumed["from"] == "s3://bucket/run/checkpoints/4"
    assert again.phases_written() == [("start", 2.0, 4)]


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (InputError("--data.path x is\nnot there"), 2, "--data.path x is not there"),
        (RunAgain("the disk is full"), 75, "the disk is full"),
        (Stopped("SIGTERM"), 75, "stopped by SIGTERM; there was nothing to save"),
        (KeyboardInterrupt(), 130, "stopped at once by Ctrl-C, without saving"),
        (ValueError("odd"), 1, "ValueError: odd"),
    ],
)
def test_the_end_is_written_even_before_the_length_is_known(
    story: Story, error: BaseException, code: int, why: str
) -> None:
    with (
        contextlib.suppress(type(error)),
        story.begin(),
        story.phases.within("data"),
    ):
        story.spend(3.0)
        raise error
    start, phase, end = story.records()
    assert (start["event"], start["total"]) == ("start", None)
    assert (phase["name"], phase["seconds"]) == ("data", 3.0)
    assert (end["event"], end["code"], end["why"]) == ("end", code, why)


def test_a_process_ended_by_a_signal_writes_its_phase(story: Story) -> None:
    written = story.begin()
    written.started(10)
    with story.phases.within("compile"):
        story.spend(7.0)
        story.signals.run_exit_actions(130)  # from the signal thread
    assert story.heartbeat.code == 130
    assert story.phases_written() == [("compile", 7.0, 0)]
    assert story.records()[-1]["code"] == 130


@pytest.mark.parametrize("arguments", [("--config", "demo_mlm"), ()])
def test_a_start_begins_with_the_command_or_the_call(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A notebook imports jaxtrain long before it trains; a shell may have become this process."""
    called = time.time()
    story = Story(tmp_path)
    story.begin(arguments=arguments).started(40)
    story.log.close()
    began = story.records()[0]["began"]
    if arguments:
        assert began == IMPORTED_AT < called
    else:
        assert called <= began <= time.time()
