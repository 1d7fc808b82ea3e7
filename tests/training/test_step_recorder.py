"""StepRecorder: which steps are recorded, when, and with which values."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from telemetry import event_log
from training import toy

from jaxtrain import config
from jaxtrain.config import run_length
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import InputError
from jaxtrain.storage import json_lines
from jaxtrain.telemetry.phases import Phases
from jaxtrain.telemetry.throughput import Window
from jaxtrain.training import step_recorder
from jaxtrain.training.diagnosis import step_times
from jaxtrain.training.step_recorder import StepRecorder
from jaxtrain.training.validation import Validation

TOTAL, LOG_EVERY = 11, 4


class RecordingWatchdog(Watchdog):
    """Ends nothing; records its calls."""

    def __init__(self) -> None:
        super().__init__(None, Heartbeat(KeyValueStore(), StopSignals()))
        self.heard: list[Any] = []

    def beat(self, step: int | None = None) -> None:
        self.heard.append(step)

    @contextlib.contextmanager
    def pause(self, name: str, allowance_s: float = 0.0) -> Iterator[None]:
        self.heard.append(name)
        yield
        self.heard.append(f"{name} over")


class Computing:
    """A number that the device is still computing: reading it waits."""

    def __init__(self, number: float, wait: Any) -> None:
        self._number, self._wait = np.float32(number), wait

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self._wait()
        return np.asarray(self._number)


class Story:
    """A run controlled by the test; the device takes 1 s per step."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.now, self.done, self.patch = directory, 100.0, 0, patch
        patch.setattr(step_recorder, "Window", functools.partial(Window, clock=lambda: self.now))
        base = config.named("demo_mlm")
        base = base.override({"data.workers": 2})
        loop = dataclasses.replace(base.loop, steps=TOTAL, log_every=LOG_EVERY)
        self.run, self.watchdog = dataclasses.replace(base, loop=loop), RecordingWatchdog()
        self.log = event_log.attached(directory)
        self.batches: Any = SimpleNamespace(
            wait_s=0.0, workers=2, note_pending=lambda results: None
        )
        self.bad_in_a_row = 0
        self.recorder = self.begin()

    def begin(
        self, *, waits: bool = False, keep: Any = None, in_a_row: int = 10, **optim: Any
    ) -> StepRecorder:
        """Starts from scratch, with another optimizer config."""
        self.patch.setattr(step_recorder, "MOST_IN_A_ROW", in_a_row)
        self.run = dataclasses.replace(
            self.run,
            optim=dataclasses.replace(self.run.optim, **optim),
        )
        self.recorder = StepRecorder(
            self.run,
            self.log,
            Phases(self.watchdog),
            TOTAL,
            run_length.Position(),
            self.batches,
            toy.mesh_of(1, 8),
            waits=waits,
            keep=keep or (lambda bad, state: ""),
        )
        return self.recorder

    def step(
        self,
        loss: float | None = None,
        *,
        wait_s: float = 0.0,
        gradient: float = 2.0,
        complete: bool = False,
        bad: bool = False,
    ) -> None:
        """Runs one more step; its loss defaults to its number, and NaN/Inf makes it bad."""
        self.spend(wait_s + complete)
        self.batches.wait_s += wait_s
        bad |= not (math.isfinite(gradient) and (loss is None or math.isfinite(loss)))
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        self.done += 1
        found: Any = {
            "bad_in_a_row": np.uint32(self.bad_in_a_row),
            "grad_norm": np.float32(gradient),
            "learning_rate": np.float32(0.001),
        }
        number = self.done if loss is None else loss
        found["loss"] = Computing(number, lambda: self.spend(1.0 - complete))
        state, batch = f"after step {self.done}", f"batch {self.done}"
        self.recorder.push(found, np.arange(8) + 8 * self.done, cast(Any, state), cast(Any, batch))

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def records(self) -> dict[int, dict[str, Any]]:
        """Returns step -> its record in the file."""
        path = self.directory / "metrics.jsonl"
        return {record["step"]: record for record in json_lines.read(path)} if path.exists() else {}


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    told = Story(tmp_path, monkeypatch)
    yield told
    told.recorder.close()
    told.log.close()


@pytest.fixture
def new_lines(capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the console lines since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


def test_a_step_is_recorded_when_the_next_one_is_pushed(story: Story, new_lines: Any) -> None:
    story.step()
    assert (story.records(), new_lines(), story.watchdog.heard) == ({}, [], [])
    story.step()
    assert {step: record["train/loss"] for step, record in story.records().items()} == {1: 1.0}
    assert [line.split(" | ")[:2] for line in new_lines()] == [["step 1/11", "loss 1.0000"]]
    assert story.watchdog.heard == [1]


def test_the_first_the_last_and_every_nth_step_are_recorded(story: Story, new_lines: Any) -> None:
    for _ in range(TOTAL):
        story.step()
    story.recorder.flush()
    story.recorder.flush()  # nothing is pending any more
    assert [record["train/loss"] for record in story.records().values()] == [1, 4, 8, 11]
    assert list(story.records()) == [1, 4, 8, 11]
    assert len(new_lines()) == 4
    assert story.watchdog.heard == list(range(1, TOTAL + 1))  # each step


def test_a_validation_before_the_first_step_keeps_its_record(story: Story, new_lines: Any) -> None:
    story.recorder.validated(0, Validation({"val/loss": 3.0}, {}))
    story.step(wait_s=60.0)  # workers start
    story.step()
    assert story.records()[1]["train/loss"] == 1
    assert not [line for line in new_lines() if "waits for data" in line]


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_bad_step_stops_the_run_if_the_config_says_so(story: Story, loss: float) -> None:
    story.begin(bad_updates="off")
    for _ in range(5):
        story.step()
    # The sixth, which is not logged. Another step would change the state, which is saved.
    with pytest.raises(InputError, match=rf"step 6 is bad: loss {loss}, gradient norm 2 "):
        story.step(loss)


def test_a_bad_step_is_skipped_and_its_examples_are_reported(story: Story, new_lines: Any) -> None:
    story.begin(bad_updates="skip", in_a_row=2)
    for gradient in (2.0, math.inf, 2.0, 2.0):
        story.step(gradient=gradient)
    assert story.recorder.step == 3
    assert story.recorder.last_step_was_good()
    assert list(story.records()) == [1]
    (line,) = (story.directory / "bad_steps.jsonl").read_text().splitlines()
    rows = story.run.data.batch_size
    assert json.loads(line) == {
        "step": 1,
        "position": rows,
        "loss": "2.0",
        "grad_norm": "inf",
        "ids": list(range(16, 24)),
    }
    (spoken,) = [line for line in new_lines() if "is bad" in line]
    assert "step 2 is bad: loss 2, gradient norm inf" in spoken
    assert f"examples {rows} to {2 * rows - 1})" in spoken
    assert not story.recorder.finished()


def test_bad_steps_in_a_row_are_two_lines(story: Story, new_lines: Any) -> None:
    story.begin(bad_updates="skip", in_a_row=20)
    for gradient in (2.0, *[math.inf] * 10, 2.0, math.inf, 2.0, *[math.inf] * 2, 2.0, 2.0):
        story.step(gradient=gradient)
    found = [line for line in new_lines() if "bad" in line]
    assert [line.partition(":")[0] for line in found] == [
        "step 2 is bad",
        "9 more steps skipped in a row; see bad_steps.jsonl",
        "step 3 is bad",
        "step 4 is bad",
        "1 more step skipped in a row; see bad_steps.jsonl",
    ]
    assert len((story.directory / "bad_steps.jsonl").read_text().splitlines()) == 13


class RecordingKeeper:
    """The bad steps that a recorder lets be saved."""

    def __init__(self, command: str) -> None:
        self.command, self.calls = command, list[Any]()

    def __call__(self, bad: Any, state: Any) -> str:
        self.calls.append((bad.position, bad.in_a_row, bad.batch, list(bad.ids), state))
        return self.command


@pytest.mark.parametrize("command", ["jaxtrain find-nan out", ""])
def test_the_first_nan_in_a_row_is_saved_when_bad_steps_end_the_run(
    story: Story, command: str
) -> None:
    kept = RecordingKeeper(command)
    story.begin(bad_updates="skip", in_a_row=3, keep=kept)
    story.step()
    story.step(gradient=math.nan)  # alone: forgotten after the next good one
    for _ in range(2):
        story.step()
    for _ in range(2):
        story.step(gradient=math.nan)
    assert not kept.calls
    advice = r"lower --optim\.peak_lr" + (f", or find the cause with: {command}" if command else "")
    wanted = (
        r"step 4 is bad: .*; see bad_steps\.jsonl: resume from the newest checkpoint with --resume "
        rf"latest; {advice}$"
    )
    with pytest.raises(InputError, match=wanted):
        story.step(gradient=math.nan)
    rows = story.run.data.batch_size
    # The three steps have left the state as it was; no other step was dispatched.
    wanted_position = Position(3, 4 * rows, skipped=rows)
    ids = list(range(8 * 5, 8 * 6))
    assert kept.calls == [(wanted_position, 0, "batch 5", ids, "after step 7")]


def test_a_nan_after_a_large_norm_is_the_one_that_is_saved(story: Story) -> None:
    kept = RecordingKeeper("jaxtrain find-nan out")
    story.begin(bad_updates="skip", in_a_row=2, keep=kept)
    story.step()
    story.step(bad=True)
    with pytest.raises(InputError, match="find the cause with"):
        story.step(gradient=math.nan)
    ((position, in_a_row, batch, *_),) = kept.calls
    rows = story.run.data.batch_size
    assert (position, in_a_row, batch) == (Position(1, 2 * rows, skipped=rows), 1, "batch 3")


def test_nothing_is_saved_if_only_norms_were_too_large(story: Story) -> None:
    kept = RecordingKeeper("jaxtrain find-nan out")
    story.begin(bad_updates="skip", in_a_row=2, keep=kept)
    story.step(bad=True)
    with pytest.raises(InputError, match=r"latest; lower --optim\.peak_lr$"):
        story.step(bad=True)
    with_muon = story.begin(muon=config.Muon())
    assert with_muon.advice(cast(Any, "state")) == "lower --optim.muon.peak_lr"
    assert not kept.calls


def test_the_bad_steps_before_a_rollback_are_forgotten(story: Story) -> None:
    kept = RecordingKeeper("jaxtrain find-nan out")
    story.begin(bad_updates="rollback", in_a_row=1, keep=kept)
    story.step()
    story.step(gradient=math.nan)
    assert story.recorder.too_many_bad()
    rows = story.run.data.batch_size
    story.recorder.rewind(Position(0, 0))
    assert not story.recorder.too_many_bad()
    story.step()
    story.step(gradient=math.nan)
    assert story.recorder.advice(cast(Any, "state")).endswith("with: jaxtrain find-nan out")
    assert [call[:3] for call in kept.calls] == [
        (Position(1, 3 * rows, skipped=2 * rows), 0, "batch 4")
    ]


def test_the_last_step_may_be_bad(story: Story) -> None:
    for _ in range(TOTAL - 1):
        story.step()
    story.step(gradient=math.nan)
    assert story.recorder.step == TOTAL  # until its metrics are fetched
    assert not story.recorder.finished()
    story.step()
    assert story.recorder.finished()
    rows = story.run.data.batch_size
    assert story.recorder.position() == Position(TOTAL, (TOTAL + 1) * rows, skipped=rows)
    assert list(story.records()) == [1, 4, 8, 11]


def test_a_rollback_removes_records_but_not_the_examples_seen(story: Story) -> None:
    loop = dataclasses.replace(story.run.loop, record_examples=True, log_every=1)
    story.run = dataclasses.replace(story.run, loop=loop)
    story.begin()
    for _ in range(5):
        story.step()
    story.recorder.flush()
    rows = story.run.data.batch_size
    story.recorder.rewind(Position(2, 2 * rows))
    assert story.recorder.position() == Position(2, 5 * rows, skipped=3 * rows)
    assert (story.recorder.step, list(story.records())) == (2, [1, 2])
    story.step()
    story.recorder.flush()
    lines = (story.directory / "examples.jsonl").read_text().splitlines()
    assert [(line["step"], line["position"]) for line in map(json.loads, lines)] == [
        (1, 0),
        (2, rows),
        (3, 5 * rows),
    ]


def test_pauses_do_not_count_in_the_rate(story: Story) -> None:
    for number in range(1, TOTAL + 1):
        story.step()
        if number in (4, 6):  # at the beginning and in the middle of a window
            with story.recorder.paused_for("evaluation"):
                assert max(story.records()) == 4  # the pending step is recorded first
                story.spend(1000.0)
    story.recorder.flush()
    rates = [record["train/steps_per_second"] for record in story.records().values()]
    assert rates == [1.0, 1.0, 1.0, 1.0]
    heard = story.watchdog.heard
    assert heard[:9] == [1, 2, 3, 4, "evaluation", "evaluation over", 5, 6, "evaluation"]


def test_the_rate_of_steps_that_are_complete_when_pushed(story: Story) -> None:
    """With --debug, a step is complete when it is pushed."""
    story.begin(waits=True)
    for _ in range(TOTAL):
        story.step(complete=True)
    assert story.recorder.finished()
    rates = [record["train/steps_per_second"] for record in story.records().values()]
    assert rates == [1.0, 1.0, 1.0, 1.0]


def test_a_long_wait_for_data_is_reported_once_with_the_fix(story: Story, new_lines: Any) -> None:
    for number in range(1, TOTAL + 1):
        # Long while the workers start, short for a window, then as long as the step.
        story.step(wait_s=9.0 if number <= 2 else 0.01 if number <= 5 else 1.0)
    story.recorder.flush()
    shares = [record["train/data_wait_fraction"] for record in story.records().values()]
    assert shares == pytest.approx([18 / 19, 0.03 / 3.03, 4 / 8, 2 / 5])
    lines = new_lines()
    (mentioned,) = [line for line in lines if "waits for data" in line]
    assert lines[lines.index(mentioned) - 1].startswith("step 8/11")
    assert "50% of the time" in mentioned
    assert "--data.workers (now 2)" in mentioned
    assert f"--data.prefetch (now {story.run.data.prefetch})" in mentioned


def test_the_first_window_is_not_compared_between_processes(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It includes the start of the workers."""
    calls: list[str] = []

    class Recorded(step_times.SlowProcesses):
        def started(self) -> None:
            calls.append("started")

        def logged(self) -> None:
            calls.append("logged")

    monkeypatch.setattr(step_recorder, "SlowProcesses", Recorded)
    story.begin()
    for _ in range(LOG_EVERY + 2):
        story.step()
    assert calls == ["started", "logged", "logged"]


def test_workers_that_fill_the_host_cannot_be_raised(story: Story, new_lines: Any) -> None:
    story.run = story.run.override({"data.workers": None})
    story.begin()
    for number in range(1, TOTAL + 1):
        story.step(wait_s=0.01 if number <= 5 else 1.0)
    story.recorder.flush()
    (mentioned,) = [line for line in new_lines() if "waits for data" in line]
    assert "use a host with more CPU cores (they allow 2 workers)" in mentioned


def test_a_validation_is_recorded_and_its_images_are_kept(story: Story, new_lines: Any) -> None:
    pictures = {"reconstruction": np.full((4, 6, 3), 7, np.uint8)}
    story.recorder.validated(2, Validation({"val/psnr": 20.0, "val/loss": 0.5}, pictures))
    story.recorder.validated(4, Validation({"val/psnr": 22.0, "val/loss": 0.25}, pictures))
    assert [record["val/psnr"] for record in story.records().values()] == [20.0, 22.0]
    assert "step 2/11 | validation | val/loss 0.5 | val/psnr 20" in new_lines()
    kept = [story.directory / "samples" / f"reconstruction_{step}.png" for step in (2, 4)]
    assert all(path.is_file() for path in kept)
    assert sorted((story.directory / "samples").iterdir()) == kept
    story.recorder.validated(6, Validation({"val/psnr": 22.0}, {"text": "a\n"}))
    assert (story.directory / "samples/text_6.txt").read_text() == "a\n"
