"""What a run says while it runs: which steps, when, and what stands in a record."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxtrain import config, metrics
from jaxtrain.errors import InputError
from jaxtrain.progress import Progress
from jaxtrain.throughput import Window
from jaxtrain.watchdog import Watchdog

TOTAL, LOG_EVERY = 11, 4
AGAIN = "python -m jaxtrain.main --config demo_mlm --output-dir there --resume latest"


class Told(Watchdog):
    """Ends nothing; remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(None, Path(), pytest.fail)
        self.heard: list[Any] = []

    def beat(self, step: int | None = None) -> None:
        self.heard.append(step)

    @contextlib.contextmanager
    def pause(self, name: str, allowance_s: float = 0.0) -> Iterator[None]:
        self.heard.append(name)
        yield
        self.heard.append(f"{name} over")


class Story:
    """A run in which nothing happens but what the test says; a step takes a second."""

    def __init__(
        self, directory: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.directory, self._capsys = directory, capsys
        self.now, self.done = 100.0, 0
        patch.setattr(metrics, "Window", functools.partial(Window, clock=lambda: self.now))
        base = config.named("demo_mlm")
        run = dataclasses.replace(
            base, loop=dataclasses.replace(base.loop, steps=TOTAL, log_every=LOG_EVERY)
        )
        self.run, self.batches, self.watchdog = run, SimpleNamespace(wait_s=0.0), Told()
        self.recorder = metrics.Recorder(directory, 0, 1)
        batches: Any = self.batches
        mesh = toy.mesh_of(1, 8)
        self.progress = Progress(run, self.recorder, self.watchdog, TOTAL, batches, mesh)

    def step(self, loss: float | None = None, wait_s: float = 0.0) -> None:
        """One more step, whose loss is its number unless told."""
        self.batches.wait_s += wait_s
        self.now += 1.0
        self.done += 1
        loss = self.done if loss is None else loss
        found = {"loss": loss, "grad_norm": 2.0, "learning_rate": 0.001}
        self.progress.push(self.done, {name: jnp.float32(value) for name, value in found.items()})

    def records(self) -> dict[int, dict[str, Any]]:
        """Step -> what stands in the file now."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return {}
        records = list(metrics.read(path))
        assert len({record["step"] for record in records}) == len(records)
        return {record["step"]: record for record in records}

    def said(self) -> list[str]:
        """Lines since the last call."""
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Story]:
    told = Story(tmp_path, capsys, monkeypatch)
    yield told
    told.progress.close()
    told.recorder.close()


def test_a_step_is_recorded_once_the_next_one_is_handed_over(story: Story) -> None:
    story.step()
    assert (story.records(), story.said(), story.watchdog.heard) == ({}, [], [])
    story.step()
    assert list(story.records()) == [1]
    assert story.records()[1]["train/loss"] == 1.0
    assert [line.split(" | ")[:2] for line in story.said()] == [["step 1/11", "loss 1.0000"]]
    assert story.watchdog.heard == [1]


def test_the_first_step_the_last_and_those_at_cadence_are_recorded(story: Story) -> None:
    for _ in range(TOTAL):
        story.step()
    story.progress.flush()
    story.progress.flush()  # nothing is pending
    records = story.records()
    assert {step: record["train/loss"] for step, record in records.items()} == {
        1: 1.0,
        4: 4.0,
        8: 8.0,
        11: 11.0,
    }
    assert len(story.said()) == 4
    assert story.watchdog.heard == list(range(1, TOTAL + 1))  # it is told of each


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_at_any_step(story: Story, loss: float) -> None:
    for _ in range(5):
        story.step()
    story.step(loss)  # the sixth, which is not at cadence
    with pytest.raises(InputError, match=rf"loss of update 6 is {loss}.*gradient norm 2\)"):
        story.step()
    record = story.records()[6]
    assert math.isnan(loss) == math.isnan(record["train/loss"])
    assert not math.isfinite(record["train/loss"])


def test_nothing_is_evaluated_or_saved_after_a_bad_step(story: Story) -> None:
    story.step(math.nan)
    with pytest.raises(InputError, match="update 1"), story.progress.interrupted("save"):
        pytest.fail("a state that is broken would be saved")


def test_time_that_is_no_training_counts_for_no_rate(story: Story) -> None:
    for number in range(1, 9):
        story.step()
        if number in (4, 6):  # at the end of a window, and in its middle
            with story.progress.interrupted("evaluation"):
                assert max(story.records()) == 4  # what was pending is recorded before
                story.now += 1000.0
    story.progress.flush()
    rates = [record["train/steps_per_second"] for record in story.records().values()]
    assert rates == [1.0, 1.0, 1.0]
    assert story.watchdog.heard.count("evaluation over") == 2
    assert story.watchdog.heard.index(4) < story.watchdog.heard.index("evaluation")


def test_a_long_wait_for_input_is_mentioned_once_with_the_cure(story: Story) -> None:
    story.step(wait_s=0.9)  # while the workers start
    for number in range(2, TOTAL + 1):
        story.step(wait_s=0.01 if number <= 4 else 0.5)
    story.progress.flush()
    shares = [record["train/data_wait_fraction"] for record in story.records().values()]
    assert shares == pytest.approx([0.9, 0.01, 0.5, 0.5], abs=0.01)
    lines = story.said()
    (mentioned,) = [line for line in lines if "waits for input" in line]
    assert lines[lines.index(mentioned) - 1].startswith("step 8/11")
    workers, prefetch = story.run.data.workers, story.run.data.prefetch
    assert f"--data.workers (now {workers})" in mentioned
    assert f"--data.prefetch (now {prefetch})" in mentioned


def test_a_validation_is_recorded_and_its_pictures_kept(story: Story) -> None:
    picture = np.full((4, 6, 3), 7, np.uint8)
    for _ in range(2):
        story.step()
    story.progress.validated(2, {"val/psnr": 20.0, "val/loss": 0.5}, {"reconstruction": picture})
    story.progress.validated(4, {"val/psnr": 22.0, "val/loss": 0.25}, {"reconstruction": picture})
    assert story.records()[2]["val/psnr"] == 20.0
    assert "step 2/11 | validation | val/loss 0.5 | val/psnr 20" in story.said()
    story.progress.summarise(story.directory, "python -m jaxtrain.main", AGAIN)
    lines = story.said()
    kept = [story.directory / "samples" / f"reconstruction_{step}.png" for step in (2, 4)]
    assert all(path.is_file() for path in kept)
    assert [line for line in lines if line.startswith("picture")][0].endswith(f": {kept[1]}")
    assert {"val/psnr: 20 -> 22", "val/loss: 0.5 -> 0.25"} <= set(lines)


def test_the_summary_says_what_was_reached_and_what_to_type_next(story: Story) -> None:
    for number in range(TOTAL):
        story.step(loss=8.0 / 2**number)
    story.progress.flush()
    story.said()
    story.progress.summarise(story.directory, "python -m jaxtrain.main --config demo_mlm", AGAIN)
    lines = story.said()
    assert lines[0] == "train/loss: 8 -> 0.007812"
    assert not [line for line in lines if line.startswith("picture")]
    assert f"checkpoints: {story.directory / 'checkpoints'}" in lines
    assert any(str(story.directory / "tensorboard") in line for line in lines)
    assert f"train on: {AGAIN} --loop.steps {2 * TOTAL}" in lines
    own = "train on your own data: python -m jaxtrain.main --config demo_mlm --data.path DIR"
    assert lines[-1] == own  # the demo made its own
