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
from jaxtrain.checkpoint.pointer import BEST, CHECKPOINTS
from jaxtrain.comparison import experiment, runs
from jaxtrain.comparison.experiment import Comparison, Experiment, Pair, Question
from jaxtrain.comparison.identities import Identities
from jaxtrain.comparison.side import Facts, Side
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import run_marker

BASE = ("--loop.steps", "100", "--optim.peak_lr", "0.01")
CHANGE = ("--optim.peak_lr", "0.02")


def loaded(*changes: str) -> config.Run:
    return config.load("demo_gpt", [*BASE, *changes])


class Trainer:
    """Writes the directory of a run instead of training it.

    Args:
        value: config -> the metric of the run; None if it diverges.
        most: runs that end; the next one is a stop.
        code: digest of the source files.
        program: digest of the step's program.
    """

    def __init__(
        self,
        value: Callable[[config.Run], float | None],
        most: int = 10**6,
        *,
        code: str = "c1",
        program: str = "p1",
    ) -> None:
        self._value, self._most = value, most
        self.code, self.program, self.data = code, program, "d1"
        self.trained: list[tuple[str, int]] = []
        self.examined: list[dict[str, Any]] = []
        self.slots: set[str | None] = set()
        self.stopped = False
        self.while_training: Callable[[], None] = lambda: None

    def examine(self, side: Side, label: str, **request: Any) -> Facts:
        run = config.load(side.config, side.overrides)
        self.examined.append(request)
        settings = config.to_dict(run)
        del settings["seed"]
        steps = run.loop.steps or 0
        if request["flops"] is not None:  # a step of a costs 3, one of b 2
            steps = round(request["flops"] / 2)
        parts = {
            "the config": json.dumps(settings),
            "the program of the step": self.program,
            "the data": self.data,
        }
        facts = Facts(
            name=run.name,
            seed=run.seed,
            metric="val/bits_per_byte",
            mode="min",
            parts=parts,
            code=self.code,
            data=self.data,
            steps=steps,
            length=() if steps == run.loop.steps else ("--loop.steps", str(steps)),
            flops=steps * 3.0,
            step_s=2.0,
        )
        Identities(Path(request["known"])).examined(facts.identity, parts, self.code)
        return facts

    def train(
        self, side: Side, facts: Facts, seed: int, directory: Path, gpus: str | None, label: str
    ) -> None:
        if len(self.trained) >= self._most:
            raise RunAgain("stopped")
        self.while_training()
        run = config.load(side.config, [*side.overrides, *facts.length, "--seed", str(seed)])
        self.trained.append((directory.name, run.loop.steps or 0))
        self.slots.add(gpus)
        records = written_run.records(range(10, 101, 10))
        value = self._value(run)
        for record in records:
            if "val/loss" in record:
                record["val/bits_per_byte"] = value
        history = written_run.full_history()
        for event in history:
            if event["event"] == "compiled":
                event |= {"code": self.code, "data": self.data}
            if event["event"] == "end" and value is None:
                event |= {"code": 2, "why": "10 bad steps in a row", "diverged": True}
        written_run.write(
            directory,
            config={"seed": run.seed, "checkpoint": {"best_metric": "val/bits_per_byte"}},
            metrics=records,
            history=history,
        )
        (directory / run_marker.NAME).write_text(run_marker.new())
        for folder in (CHECKPOINTS, BEST):
            (directory / folder).mkdir()
            (directory / folder / "100.json").write_text("{}")

    def stop(self) -> None:
        self.stopped = True


def value_of(noise: float, gain: float) -> Callable[[config.Run], float]:
    """Values that share the luck of their seed; another rate gains something."""

    def value(run: config.Run) -> float:
        luck = np.random.default_rng([run.seed, int(run.optim.peak_lr * 1e6)])
        shared = np.random.default_rng(run.seed).normal()
        return float(3 + shared + noise * luck.normal() - gain * (run.optim.peak_lr != 0.01))

    return value


class Compared(Experiment):
    """A comparison of one change."""

    def answer(self) -> Comparison:
        (answer,) = self.run()
        return answer


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Any]:
    def make(
        trainer: Trainer,
        *changes: tuple[str, ...],
        directory: str = "study",
        shared: str = "runs",
        slots: tuple[str | None, ...] = (None,),
        said: list[str] | None = None,
        **more: Any,
    ) -> Compared:
        question = Question(
            sides=tuple(
                Side("demo_gpt", (*BASE, *change), " ".join(change))
                for change in ((), *(changes or (CHANGE,)))
            ),
            **more,
        )
        return Compared(
            question,
            tmp_path / directory,
            tmp_path / shared,
            trainer,  # type: ignore[arg-type]
            slots,
            (said if said is not None else list[str]()).append,
        )

    return make


Compare = Callable[..., Compared]


def test_an_improvement_is_found_and_the_comparison_stops(compare: Compare) -> None:
    trainer, said = Trainer(value_of(0.1, 0.5)), list[str]()
    answer = compare(trainer, said=said).answer()
    assert answer.verdict == "better"
    assert 6 <= len(answer.pairs) <= 8
    assert answer.interval.low < -0.5 < answer.interval.high < 0
    assert len(trainer.trained) == 2 * len(answer.pairs)
    assert any("pair 1 of at most 20 (seed 42): a " in line for line in said)
    assert any("no verdict of a difference is possible before pair 6" in line for line in said)


def test_the_luck_of_a_seed_cancels_out(compare: Compare) -> None:
    answer = compare(Trainer(value_of(0.0, 0.25)), pairs=3).answer()
    assert [pair.seed for pair in answer.pairs] == [42, 43, 44]
    assert [pair.b - pair.a for pair in answer.pairs] == pytest.approx([-0.25] * 3)
    assert np.std([pair.a for pair in answer.pairs]) > 0.1


def test_equal_configs_are_identical_to_the_bit_after_two_pairs(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    answer = compare(trainer, ()).answer()
    assert (answer.verdict, len(answer.pairs)) == ("identical", 2)
    assert len(set(trainer.trained)) == 4  # trained twice, not read twice


def test_a_difference_that_is_too_small_to_matter_is_equivalent(compare: Compare) -> None:
    answer = compare(Trainer(value_of(0.001, 0.0)), practical=0.01, pairs=40).answer()
    assert answer.verdict == "equivalent"
    assert -0.01 < answer.interval.low < answer.interval.high < 0.01


def test_what_is_undecided_says_so_and_ends_at_its_limits(compare: Compare) -> None:
    answer = compare(Trainer(value_of(1.0, 0.0)), pairs=8).answer()
    assert (answer.verdict, len(answer.pairs)) == ("undecided", 8)
    limited = compare(Trainer(value_of(1.0, 0.0)), hours=0.3, directory="other").answer()
    assert len(limited.pairs) == math.ceil(0.3 * 3600 / (answer.seconds / 8))


def test_a_stopped_comparison_continues_with_the_same_result(compare: Compare) -> None:
    whole = compare(Trainer(value_of(0.3, 0.5)), directory="whole").answer()
    total, trained, answer = 2 * len(whole.pairs), 0, None
    for most in (3, 4, total):
        trainer = Trainer(value_of(0.3, 0.5), most)
        continued = compare(trainer, directory="stopped", shared="its runs")
        if most == total:
            answer = continued.answer()
        else:
            with pytest.raises(RunAgain):
                continued.answer()
        trained += len(trainer.trained)
    assert trained == total
    assert answer is not None
    assert [(pair.seed, pair.a, pair.b) for pair in answer.pairs] == [
        (pair.seed, pair.a, pair.b) for pair in whole.pairs
    ]
    assert (answer.interval, answer.verdict) == (whole.interval, whole.verdict)


def test_comparisons_with_the_same_folder_share_equal_runs(compare: Compare) -> None:
    first, second = Trainer(value_of(0.1, 0.5)), Trainer(value_of(0.1, 0.5))
    compare(first, pairs=3).answer()
    compare(second, ("--optim.peak_lr", "0.03"), directory="second", pairs=3).answer()
    assert (len(first.trained), len(second.trained)) == (6, 3)


def test_runs_train_beside_each_other_on_the_devices_there_are(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    answer = compare(trainer, slots=("0,1", "2,3", "4,5")).answer()
    assert trainer.slots <= {"0,1", "2,3", "4,5"}
    one_by_one = compare(Trainer(value_of(0.1, 0.5)), directory="other").answer()
    assert answer.interval == one_by_one.interval


def test_at_equal_flops_the_cheaper_side_takes_more_steps(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    answer = compare(trainer, at="flops", pairs=2).answer()
    assert answer.steps == (100, 150)
    assert {steps for _, steps in trainer.trained} == {100, 150}


def test_the_time_to_fit_is_passed_on_and_the_cost_is_said_before(compare: Compare) -> None:
    trainer, said = Trainer(value_of(0.1, 0.5)), list[str]()
    compare(trainer, said=said, fit_s=300.0, pairs=2).answer()
    assert [asked["fit_s"] for asked in trainer.examined] == [300.0, 300.0]
    cost = "a 100 steps of 2000 ms, b 100 steps of 2000 ms: about 13."
    (line,) = (line for line in said if line.startswith(cost))
    assert said.index(line) < next(n for n, line in enumerate(said) if line.startswith("pair 1"))
    assert said[0].startswith("warning: --pairs 2 cannot show that a side is better")


def test_several_changes_share_the_baseline_and_the_level(compare: Compare) -> None:
    changes = [("--optim.peak_lr", rate) for rate in ("0.02", "0.01", "0.03")]
    trainer, said = Trainer(value_of(0.1, 0.5)), list[str]()
    answers = compare(trainer, *changes, said=said).run()
    assert [answer.verdict for answer in answers] == ["better", "identical", "better"]
    assert {answer.level for answer in answers} == {0.05 / 3}
    assert min(len(answers[0].pairs), len(answers[2].pairs)) >= 7  # 6 at 5%
    most = max(len(answer.pairs) for answer in answers)
    assert len({name for name, _ in trainer.trained}) == most + sum(
        len(answer.pairs) for answer in answers
    )
    assert any("b3 - a: " in line and "98.33% at every look" in line for line in said)


def test_checkpoints_of_judged_runs_are_deleted(compare: Compare, tmp_path: Path) -> None:
    compare(Trainer(value_of(0.1, 0.5)), pairs=1).answer()
    assert not [*tmp_path.glob("runs/*/checkpoints"), *tmp_path.glob("runs/*/best")]
    assert len([*tmp_path.glob("runs/*/metrics.jsonl")]) == 2
    compare(
        Trainer(value_of(0.1, 0.5)), pairs=1, shared="kept", directory="x", keep_checkpoints=True
    ).answer()
    assert len([*tmp_path.glob("kept/*/checkpoints/100.json")]) == 2


def test_edited_code_makes_new_runs_and_says_so(compare: Compare) -> None:
    said = list[str]()
    compare(Trainer(value_of(0.1, 0.5)), pairs=2).answer()
    same = Trainer(value_of(0.1, 0.5), code="a docstring was edited")
    compare(same, pairs=2, said=said).answer()
    assert not same.trained
    assert not any("changed since" in line for line in said)
    other = Trainer(value_of(0.1, -0.5), code="c3", program="p2")
    answer = compare(other, pairs=2, said=said).answer()
    assert len(other.trained) == 4
    assert len(answer.pairs) == 2  # none of the old ones
    assert [line for line in said if "changed since" in line] == [
        f"side {side}: the program of the step changed since an earlier comparison of this "
        "config, whose runs are not used"
        for side in "ab"
    ]
    back = Trainer(value_of(0.1, 0.5), code="c1")
    compare(back, pairs=2).answer()
    assert not back.trained


def test_other_data_make_new_runs(compare: Compare) -> None:
    compare(Trainer(value_of(0.1, 0.5)), pairs=1).answer()
    other = Trainer(value_of(0.1, 0.5))
    other.data = "d2"
    compare(other, pairs=1).answer()
    assert len(other.trained) == 2


def test_code_that_changes_while_a_run_trains_is_not_mixed_in(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))

    def edit() -> None:
        if len(trainer.trained) == 2:
            trainer.code, trainer.program = "c2", "p2"

    trainer.while_training = edit
    with pytest.raises(InputError, match="the program of the step changed while side a was com"):
        compare(trainer).answer()
    # The code is as it was at first: the run of the other code is deleted and trained again.
    again, said = Trainer(value_of(0.1, 0.5)), list[str]()
    compare(again, said=said, pairs=3).answer()
    assert len(again.trained) == 4
    assert any("was trained by other code or data: it is deleted" in line for line in said)


def test_a_docstring_that_is_edited_while_a_run_trains_changes_nothing(compare: Compare) -> None:
    trainer = Trainer(value_of(0.1, 0.5))
    trainer.while_training = lambda: setattr(trainer, "code", f"c{len(trainer.trained)}")
    assert len(compare(trainer, pairs=3).answer().pairs) == 3
    assert len(trainer.trained) == 6


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
    compare(Trainer(value_of(0.1, 0.5)), pairs=1).answer()
    with pytest.raises(InputError, match="is of another comparison"):
        compare(Trainer(value_of(0.1, 0.5)), ("--optim.peak_lr", "0.5"))
    stored = json.loads((tmp_path / "study" / experiment.NAME).read_text())
    (answer,) = stored["answers"]
    assert answer["verdict"] == "undecided"
    assert answer["difference"]["low"] is None


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_side_that_diverges_is_an_answer(compare: Compare, value: float | None) -> None:
    """A rate that is too high is the most common change of all."""

    def diverges(run: config.Run) -> float | None:
        changed = run.optim.peak_lr == 0.02
        return value if run.seed == 44 and changed else run.seed + 0.1 * changed

    trainer = Trainer(diverges)
    answer = compare(trainer).answer()
    assert (answer.verdict, len(answer.pairs)) == ("diverged", 3)
    assert answer.reason.startswith("b diverged in 1 of 3 runs, a in 0 (seed 44: ")
    assert answer.to_dict()["diverged"] == {"a": 0, "b": 1}
    assert answer.pairs[-1].b is None
    again = Trainer(diverges)  # what has diverged is not trained again
    assert compare(again).answer().verdict == "diverged"
    assert not again.trained


def pairs(*differences: float) -> list[Pair]:
    return [
        Pair(number, 1.0, 1.0 + difference, 60.0, False, ("a", "b"))
        for number, difference in enumerate(differences)
    ]


@pytest.mark.parametrize(("mode", "verdict"), [("max", "better"), ("min", "worse")])
def test_the_verdict_follows_the_direction_of_the_metric(mode: Any, verdict: str) -> None:
    answer = experiment.judge(pairs(*[0.1, 0.11, 0.12] * 3), "val/psnr", mode, None)
    assert answer.verdict == verdict
    assert json.loads(json.dumps(answer.to_dict()))["verdict"] == verdict


def test_a_practical_difference_wins_over_a_certain_one() -> None:
    """With shared seeds, small and consistent differences are the usual case."""
    given = pairs(*[0.0009, 0.001, 0.0011, 0.0012, 0.0013] * 2)
    assert experiment.judge(given, "val/psnr", "max", None).verdict == "better"
    assert experiment.judge(given, "val/psnr", "max", 0.01).verdict == "equivalent"


def test_the_printed_center_is_in_the_interval_and_skewed_differences_are_warned_of() -> None:
    """A side that collapses in one of ten runs: its mean is worse, and its center better."""
    given = pairs(*[0.1, 0.11, 0.12, 0.1, 0.11, 0.12, 0.1, 0.11, 0.12, -9.0])
    answer = experiment.judge(given, "val/psnr", "max", None)
    interval = answer.interval
    assert interval.mean < 0 < interval.low <= interval.center <= interval.high
    assert f"b - a: {interval.center:+.4g} (95%" in experiment.summary(answer)
    (warning,) = answer.warnings
    assert warning.startswith("the differences do not look symmetric; their mean is -0.801")
    assert answer.to_dict()["warnings"] == [warning]
    assert not experiment.judge(pairs(0.1, 0.2, 0.3), "val/psnr", "max", None).warnings


def existing(
    folder: Path,
    name: str,
    seed: int,
    value: float,
    *,
    done: bool = True,
    speed: float = 8.0,
    batch_size: int | None = None,
) -> Path:
    records = written_run.records(range(10, 101, 10), **{"train/samples_per_second": speed})
    records[-1]["val/loss"] = value
    return written_run.write(
        folder / name,
        config=written_run.CONFIG
        | {"seed": seed}
        | ({} if batch_size is None else {"data": {"batch_size": batch_size}}),
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
    answer = experiment.of_existing(given, None, None)
    assert (answer.metric, answer.mode, answer.verdict) == ("val/loss", "min", "better")
    with pytest.raises(InputError, match="do not form a pair: their seeds are 0 and 1"):
        experiment.of_existing([(given[0][0], given[1][1])], None, None)
    with pytest.raises(InputError, match=r"has no val/psnr: choose --metric from .*val/loss"):
        experiment.of_existing(given, "val/psnr", None)
    with pytest.raises(
        InputError, match="has seed 0, as a pair before it, and a repeated run adds"
    ):
        experiment.of_existing([given[0], given[0]], None, None)
    other = existing(tmp_path, "longer", 9, 1.0, batch_size=64)
    with pytest.raises(InputError, match=r"not of the same config .* side b \(.*data.batch_size"):
        experiment.of_existing([given[0], (existing(tmp_path, "a9", 9, 2.0), other)], None, None)
    unfinished = existing(tmp_path, "c", 0, 1.0, done=False)
    with pytest.raises(InputError, match="this run is not done"):
        experiment.of_existing([(given[0][0], unfinished)], None, None)


def test_speeds_do_not_count_as_a_difference_and_one_bit_does(tmp_path: Path) -> None:
    one = existing(tmp_path, "one", 0, 2.0)
    assert runs.are_identical(one, existing(tmp_path, "other", 0, 2.0, speed=9.0))
    assert not runs.are_identical(one, existing(tmp_path, "off", 0, float(np.nextafter(2.0, 9))))


def test_gpus_are_divided_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4,5")

    def on(devices: int) -> config.Mesh:
        return dataclasses.replace(loaded().mesh, fsdp=devices, data=1)

    assert runs.slots(on(2), None) == ["0,1", "2,4"]
    assert runs.slots(on(2), 4) == [None]
    assert runs.slots(on(8), None) == [None]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert runs.slots(on(2), None) == [None]
