"""A comparison pairs runs, stops at a verdict, and continues after an interruption."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting import written_run

from jaxtrain import config
from jaxtrain.comparison import experiment, runs
from jaxtrain.comparison.experiment import Experiment, Pair, Question
from jaxtrain.errors import InputError, RunAgain

BASE = ("--loop.steps", "100", "--optim.peak_lr", "0.01")
CHANGE = ("--optim.peak_lr", "0.02")


def loaded(*changes: str) -> config.Run:
    return config.load("demo_gpt", [*BASE, *changes])


class Trainer:
    """Writes the directory of a run instead of training it.

    Args:
        value: config -> the metric of the run.
        most: runs that end; the next one is a stop.
    """

    def __init__(self, value: Callable[[config.Run], float], most: int = 10**6) -> None:
        self._value, self._most = value, most
        self.trained: list[tuple[str, int]] = []
        self.slots: set[str | None] = set()
        self.stopped = False

    def train(self, run: config.Run, directory: Path, gpus: str | None) -> None:
        if len(self.trained) >= self._most:
            raise RunAgain("stopped")
        self.trained.append((directory.name, run.loop.steps or 0))
        self.slots.add(gpus)
        records = written_run.records(range(10, 101, 10))
        for record in records:
            if "val/loss" in record:
                record["val/bits_per_byte"] = self._value(run)
        written_run.write(
            directory,
            config={"seed": run.seed, "checkpoint": {"best_metric": "val/bits_per_byte"}},
            metrics=records,
            history=written_run.full_history(),
        )

    def stop(self) -> None:
        self.stopped = True


def value_of(noise: float, gain: float) -> Callable[[config.Run], float]:
    """Values that share the luck of their seed; another rate gains something."""

    def value(run: config.Run) -> float:
        luck = np.random.default_rng([run.seed, int(run.optim.peak_lr * 1e6)])
        shared = np.random.default_rng(run.seed).normal()
        return float(3 + shared + noise * luck.normal() - gain * (run.optim.peak_lr != 0.01))

    return value


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Any]:
    def make(
        trainer: Trainer,
        b: tuple[str, ...] = CHANGE,
        *,
        directory: str = "study",
        shared: str = "runs",
        slots: tuple[str | None, ...] = (None,),
        costs: tuple[float, float] = (1.0, 1.0),
        said: list[str] | None = None,
        **more: Any,
    ) -> Experiment:
        question = Question(
            a=loaded(),
            b=loaded(*b),
            words=("a", " ".join(b)),
            metric="val/bits_per_byte",
            mode="min",
            **more,
        )
        return Experiment(
            question,
            tmp_path / directory,
            tmp_path / shared,
            trainer,  # type: ignore[arg-type]
            slots,
            None,
            lambda: costs,
            (said if said is not None else list[str]()).append,
        )

    return make


Compare = Callable[..., Experiment]


def test_an_improvement_is_found_and_the_comparison_stops(compare: Compare) -> None:
    trainer, said = Trainer(value_of(0.1, 0.5)), list[str]()
    answer = compare(trainer, said=said).run()
    assert answer.verdict == "better"
    assert 6 <= len(answer.pairs) <= 8
    assert answer.interval.low < -0.5 < answer.interval.high < 0
    assert len(trainer.trained) == 2 * len(answer.pairs)
    assert any("pair 1 of at most 20 (seed 42): a " in line for line in said)
    assert any("no verdict is possible before the sixth pair" in line for line in said)


def test_the_luck_of_a_seed_cancels_out(compare: Compare) -> None:
    answer = compare(Trainer(value_of(0.0, 0.25)), pairs=3).run()
    assert [pair.seed for pair in answer.pairs] == [42, 43, 44]
    assert [pair.b - pair.a for pair in answer.pairs] == pytest.approx([-0.25] * 3)
    assert np.std([pair.a for pair in answer.pairs]) > 0.1


def test_equal_configs_are_identical_to_the_bit_after_two_pairs(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    answer = compare(trainer, b=()).run()
    assert (answer.verdict, len(answer.pairs)) == ("identical", 2)
    assert len(set(trainer.trained)) == 4  # trained twice, not read twice


def test_a_difference_that_is_too_small_to_matter_is_equivalent(compare: Compare) -> None:
    answer = compare(Trainer(value_of(0.001, 0.0)), practical=0.01, pairs=40).run()
    assert answer.verdict == "equivalent"
    assert -0.01 < answer.interval.low < answer.interval.high < 0.01


def test_what_is_undecided_says_so_and_ends_at_its_limits(compare: Compare) -> None:
    answer = compare(Trainer(value_of(1.0, 0.0)), pairs=8).run()
    assert (answer.verdict, len(answer.pairs)) == ("undecided", 8)
    limited = compare(Trainer(value_of(1.0, 0.0)), hours=0.3, directory="other").run()
    assert len(limited.pairs) == math.ceil(0.3 * 3600 / (answer.seconds / 8))


def test_a_stopped_comparison_continues_with_the_same_result(compare: Compare) -> None:
    whole = compare(Trainer(value_of(0.3, 0.5)), directory="whole").run()
    total, trained, answer = 2 * len(whole.pairs), 0, None
    for most in (3, 4, total):
        trainer = Trainer(value_of(0.3, 0.5), most)
        continued = compare(trainer, directory="stopped", shared="its runs")
        if most == total:
            answer = continued.run()
        else:
            with pytest.raises(RunAgain):
                continued.run()
        trained += len(trainer.trained)
    assert trained == total
    assert answer is not None
    assert [(pair.seed, pair.a, pair.b) for pair in answer.pairs] == [
        (pair.seed, pair.a, pair.b) for pair in whole.pairs
    ]
    assert (answer.interval, answer.verdict) == (whole.interval, whole.verdict)


def test_comparisons_with_the_same_folder_share_equal_runs(compare: Compare) -> None:
    first, second = Trainer(value_of(0.1, 0.5)), Trainer(value_of(0.1, 0.5))
    compare(first, pairs=3).run()
    compare(second, ("--optim.peak_lr", "0.03"), directory="second", pairs=3).run()
    assert (len(first.trained), len(second.trained)) == (6, 3)


def test_runs_train_beside_each_other_on_the_devices_there_are(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    answer = compare(trainer, slots=("0,1", "2,3", "4,5")).run()
    assert trainer.slots <= {"0,1", "2,3", "4,5"}
    one_by_one = compare(Trainer(value_of(0.1, 0.5)), directory="other").run()
    assert answer.interval == one_by_one.interval


def test_at_equal_cost_the_cheaper_side_takes_more_steps(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    warm = (*CHANGE, "--optim.warmup_steps", "10", "--optim.warmup_fraction", "None")
    made = compare(trainer, warm, at="time", costs=(0.3, 0.2), pairs=2)
    assert made.steps == (100, 150)
    made.run()
    assert {steps for _, steps in trainer.trained} == {100, 150}
    assert made._sides[1].optim.warmup_steps == 15
    stored = compare(trainer, warm, at="time", costs=(9.0, 1.0), pairs=2)
    assert stored.steps == (100, 150)  # what was measured once stays


@pytest.mark.parametrize("content", ["{}", '{"question": 1}', "[]", "not JSON"])
def test_a_file_of_the_same_name_is_refused_and_kept(
    compare: Compare, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "study" / experiment.NAME
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(InputError, match="was not written by a comparison"):
        compare(Trainer(value_of(0.1, 0.5)))
    assert path.read_text() == content


def test_a_folder_of_another_comparison_is_refused(compare: Compare, tmp_path: Path) -> None:
    compare(Trainer(value_of(0.1, 0.5)), pairs=1).run()
    with pytest.raises(InputError, match="is of another comparison"):
        compare(Trainer(value_of(0.1, 0.5)), ("--optim.peak_lr", "0.5"))
    stored = json.loads((tmp_path / "study" / experiment.NAME).read_text())
    assert stored["verdict"] == "undecided"
    assert stored["difference"]["low"] is None


def test_a_run_that_diverges_ends_the_comparison(compare: Compare) -> None:
    diverged = Trainer(lambda run: math.nan if run.seed == 43 else 1.0)
    with pytest.raises(InputError, match="of side a with seed 43 is nan: this run has diverged"):
        compare(diverged).run()


def pairs(*differences: float) -> list[Pair]:
    return [
        Pair(number, 1.0, 1.0 + difference, 60.0, False, ("a", "b"))
        for number, difference in enumerate(differences)
    ]


@pytest.mark.parametrize(("mode", "verdict"), [("max", "better"), ("min", "worse")])
def test_the_verdict_follows_the_direction_of_the_metric(mode: Any, verdict: str) -> None:
    answer = experiment.judged(pairs(*[0.1, 0.11, 0.12] * 3), "val/psnr", mode, None)
    assert answer.verdict == verdict
    assert json.loads(json.dumps(answer.to_dict()))["better"] == mode


def existing(
    folder: Path, name: str, seed: int, value: float, *, done: bool = True, speed: float = 8.0
) -> Path:
    records = written_run.records(range(10, 101, 10), **{"train/samples_per_second": speed})
    records[-1]["val/loss"] = value
    return written_run.write(
        folder / name,
        config=written_run.CONFIG | {"seed": seed},
        metrics=records,
        history=written_run.full_history() if done else [],
    )


def test_runs_that_exist_are_compared(tmp_path: Path) -> None:
    given = [
        (
            existing(tmp_path, f"a{seed}", seed, 2.0),
            existing(tmp_path, f"b{seed}", seed, 1.9 - seed / 99),
        )
        for seed in range(7)
    ]
    answer = experiment.of_existing(given, None, None, None)
    assert (answer.metric, answer.mode, answer.verdict) == ("val/loss", "min", "better")
    with pytest.raises(InputError, match="do not form a pair: their seeds are 0 and 1"):
        experiment.of_existing([(given[0][0], given[1][1])], None, None, None)
    with pytest.raises(InputError, match=r"has no val/psnr: choose --metric from .*val/loss"):
        experiment.of_existing(given, "val/psnr", "max", None)
    unfinished = existing(tmp_path, "c", 0, 1.0, done=False)
    with pytest.raises(InputError, match="this run is not done"):
        experiment.of_existing([(given[0][0], unfinished)], None, None, None)


def test_speeds_do_not_count_as_a_difference_and_one_bit_does(tmp_path: Path) -> None:
    one = existing(tmp_path, "one", 0, 2.0)
    assert runs.are_identical(one, existing(tmp_path, "other", 0, 2.0, speed=9.0))
    assert not runs.are_identical(one, existing(tmp_path, "off", 0, float(np.nextafter(2.0, 9))))


def test_gpus_are_divided_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4,5")

    def on(devices: int) -> config.Run:
        run = loaded()
        return dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, fsdp=devices, data=1))

    assert runs.slots(on(2), None) == ["0,1", "2,4"]
    assert runs.slots(on(2), 4) == [None]
    assert runs.slots(on(8), None) == [None]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert runs.slots(on(2), None) == [None]
