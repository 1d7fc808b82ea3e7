"""``compare`` on real runs; test_wrong_use.py has the questions without an answer."""

import json
import signal
from pathlib import Path
from typing import Any

import program
import pytest
from comparison.own_config import OWN

import jaxtrain
from jaxtrain.comparison import experiment
from jaxtrain.storage import lock

TINY = [*program.TINY_MLM[2:], "--loop.steps", "4", "--mesh.fsdp", "1", "--data.path", "corpus"]
VALIDATED = [*TINY, "--loop.eval_every", "4"]


def answer_of(path: Path) -> dict[str, Any]:
    (answer,) = json.loads(path.read_text())["answers"]
    return dict(answer)


@pytest.mark.long
def test_real_runs_are_compared_and_equal_ones_are_identical(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    asked = ["compare", "demo_mlm", *VALIDATED, "--metric", "val/loss", "--json", "answer.json"]
    asked += ["--pairs", "1", "--runs", "shared"]
    equal = program.run(tmp_path, *asked, "--change", "--optim.peak_lr 1e-2")
    assert equal.returncode == 21, equal.stderr
    assert answer_of(tmp_path / "answer.json")["verdict"] == "identical"
    assert len(list((tmp_path / "shared").rglob("metrics.jsonl"))) == 2  # trained twice
    changed = program.run(tmp_path, *asked, "--change", "--optim.peak_lr 3e-5")
    assert changed.returncode == 22, changed.stderr
    assert "no verdict of a difference is possible before pair 6" in changed.stdout
    (pair,) = answer_of(tmp_path / "answer.json")["pairs"]
    assert len(list((tmp_path / "shared").rglob("metrics.jsonl"))) == 3  # without side a
    assert not list((tmp_path / "shared").rglob("checkpoints"))
    assert pair["b"] > pair["a"]
    existing = program.run(tmp_path, "compare", *pair["directories"], "--metric", "val/loss")
    assert f"b - a: {pair['b'] - pair['a']:+.4g}" in existing.stdout
    assert existing.returncode == 22


@pytest.mark.long
def test_edits_of_code_are_noticed_and_docstrings_are_not(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    own = tmp_path / "own.py"
    own.write_text(OWN)
    (tmp_path / "demo_mlm").mkdir()  # a folder with the name of a config changes nothing
    asked = ["compare", "own.py", *VALIDATED, "--metric", "val/loss", "--pairs", "1"]
    asked += ["--change", "--optim.peak_lr 3e-5", "--json", "answer.json"]

    def compared() -> tuple[tuple[float, float], str]:
        ended = program.run(tmp_path, *asked)
        assert ended.returncode == 22, ended.stderr
        (pair,) = answer_of(tmp_path / "answer.json")["pairs"]
        return (pair["a"], pair["b"]), ended.stdout

    first, _ = compared()
    own.write_text(OWN.replace("Builds it.", "Builds the module.\n\n        Of a model."))
    same, said = compared()
    assert same == first
    assert "changed since" not in said
    own.write_text(OWN.replace("FF = 64", "FF = 48"))
    edited, said = compared()
    assert edited[0] != first[0]
    assert edited[1] != first[1]
    assert "side a: the program of the step, the program of the first state, the program of" in said


@pytest.mark.long
def test_a_side_trains_with_the_code_of_another_commit(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    own = tmp_path / "own.py"

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        ended = program.execute(tmp_path, "git", *who, *arguments)
        assert ended.returncode == 0, ended.stderr

    git("init", "-q")
    for ff in (48, 64):
        own.write_text(OWN.replace("FF = 64", f"FF = {ff}"))
        git("add", "own.py")
        git("commit", "-q", "-m", str(ff))
    asked = ["compare", "own.py", *VALIDATED, "--metric", "val/loss", "--pairs", "1"]
    asked += ["--runs", "shared", "--json", "answer.json"]
    ended = program.run(tmp_path, *asked, "--change-code", "HEAD~1", "--change-code", "HEAD")
    assert ended.returncode == 21, ended.stderr  # one is identical
    other, same = json.loads((tmp_path / "answer.json").read_text())["answers"]
    assert (other["verdict"], same["verdict"]) == ("undecided", "identical")
    assert other["pairs"][0]["a"] == same["pairs"][0]["b"]
    assert not list(tmp_path.glob("output/compare/*/code/*"))


def training(folder: Path) -> list[str]:
    """Returns the processes that hold the lock of a run."""
    return [held for path in folder.glob("runs/*/") if (held := lock.holder(path))]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_trains_on_after_the_end_of_compare_and_it_continues(
    tmp_path: Path, number: int
) -> None:
    program.write_corpus(tmp_path)
    asked = ["compare", "demo_mlm", *TINY, "--metric", "val/loss", "--pairs", "1"]
    asked += ["--change", "--optim.peak_lr 3e-5", "--loop.steps", "60", "--loop.eval_every", "60"]
    asked += ["--checkpoint.every", "10"]
    undisturbed = program.run(tmp_path, *asked, "--output-dir", "undisturbed", "--runs", "other")
    assert undisturbed.returncode == 22, undisturbed.stderr
    stopped = tmp_path / "stopped"
    arguments = [*asked, "--output-dir", "stopped", "--runs", "stopped/runs"]
    compare = program.started(tmp_path, *arguments)
    program.wait_for(lambda: [*stopped.glob("runs/*/metrics.jsonl")], compare)
    compare.send_signal(number)
    compare.communicate()
    program.wait_for(lambda: not training(stopped), seconds=60)
    recorded = {path: path.stat().st_size for path in stopped.glob("runs/*/metrics.jsonl")}
    repeated = program.run(tmp_path, *arguments)
    assert repeated.returncode == 22, repeated.stderr
    assert recorded.keys() <= {*stopped.glob("runs/*/metrics.jsonl")}
    pairs = [
        answer_of(tmp_path / folder / "compare.json")["pairs"][0]
        for folder in ("undisturbed", "stopped")
    ]
    assert [(pair["a"], pair["b"]) for pair in pairs[:1]] == [
        (pair["a"], pair["b"]) for pair in pairs[1:]
    ]


def test_python_refuses_wrong_types() -> None:
    with pytest.raises(jaxtrain.InputError, match="pairs takes a whole number, not 'many'"):
        jaxtrain.compare("demo", change={"seed": 1}, pairs="many")  # type: ignore[arg-type]


@pytest.mark.parametrize(("typed", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_durations(typed: str, seconds: float) -> None:
    assert experiment.seconds(typed) == seconds
    with pytest.raises(jaxtrain.InputError, match=r"use a duration such as 90s, 5m, or 1\.5h"):
        experiment.seconds(typed.rstrip("smh"))
