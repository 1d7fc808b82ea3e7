"""``compare`` refuses questions without an answer, and compares real runs."""

import json
from pathlib import Path

import program
import pytest

import jaxtrain
from jaxtrain import main

TINY = [*program.TINY_MLM[2:], "--loop.steps", "4", "--mesh.fsdp", "1", "--data.path", "corpus"]
VALIDATED = [*TINY, "--loop.eval_every", "4"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "usage: "),
        (["demo"], 'what is compared with demo? Add --change "--section.field VALUE"'),
        (["demo", "--change", "--optim.lr 3"], "unknown field --optim.lr; did you mean"),
        (["demo", "--chnge", "x"], "unknown flag --chnge; did you mean --change?"),
        (["demo", "demo_gpt", "demo_mlm"], "compare takes two configs, not 3"),
        (["demo", "--change", "--seed 1"], "side b has seed 1, and a 42: change other fields"),
        (["demo", "demo_gtp"], "unknown config 'demo_gtp'; did you mean demo_gpt,"),
        (
            ["demo", "--change", "--optim.b1 0.8", "--metric", "val/nothing"],
            "--metric val/nothing: use a",
        ),
        (
            ["demo", "--change", "--optim.b1 0.8", "--metric", "train/loss"],
            "--metric train/loss: use a",
        ),
        (["demo", "--change", "--optim.b1 0.8", "--pairs", "0"], "--pairs 0: use at least 1"),
        (
            ["demo", "--change", "--optim.b1 0.8", "--practical", "0"],
            "--practical 0: use a number above 0",
        ),
        (
            ["demo_mlm", *TINY, "--change", "--optim.b1 0.8"],
            "checkpoint.best_metric is None: name what",
        ),
        (
            ["demo_mlm", *TINY, "--change", "--optim.b1 0.8", "--metric", "val/loss"],
            "side a has no validation: set --loop.eval_every",
        ),
        (
            [
                *("demo_mlm", *VALIDATED, "--loop.steps", "None", "--loop.epochs", "1"),
                *("--at", "time", "--change", "--optim.b1 0.8", "--metric", "val/loss"),
            ],
            "--at time needs the length of side a in steps",
        ),
    ],
)
def test_a_question_without_an_answer_is_one_line(
    typed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main.main(["compare", *typed])
    printed = capsys.readouterr()
    assert code == (2 if typed else 0)
    assert message in (printed.err if typed else printed.out)
    assert len(printed.err.splitlines()) == bool(typed)


def test_other_folders_than_pairs_of_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(tmp_path), str(tmp_path), str(tmp_path)]
    assert main.main(["compare", *folders]) == 2
    assert main.main(["compare", *folders[:2], "--change", "--optim.b1 0.8"]) == 2
    assert main.main(["compare", *folders[:2]]) == 2
    errors = capsys.readouterr().err
    assert "compare takes pairs of runs, but 3 folders are given" in errors
    assert "compare of runs that exist changes no fields" in errors


@pytest.mark.slow
def test_real_runs_are_compared_and_equal_ones_are_identical(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    asked = ["compare", "demo_mlm", *VALIDATED, "--metric", "val/loss", "--json", "answer.json"]
    equal = program.run(tmp_path, *asked, "--change", "--optim.peak_lr 1e-2", "--pairs", "2")
    assert equal.returncode == 0, equal.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["verdict"] == "identical"
    changed = program.run(
        tmp_path, *asked, "--change", "--optim.peak_lr 3e-5", "--pairs", "1", "--runs", "shared"
    )
    assert "no verdict is possible before the sixth pair" in changed.stdout
    (pair,) = json.loads((tmp_path / "answer.json").read_text())["pairs"]
    assert pair["a"] == answer["pairs"][0]["a"]  # the same run, trained again
    assert pair["b"] > pair["a"]
    assert len(list((tmp_path / "output" / "compare").glob("*/report.html"))) == 2
    existing = program.run(tmp_path, "compare", *pair["directories"], "--metric", "val/loss")
    assert f"b - a: {pair['b'] - pair['a']:+.4g}" in existing.stdout


def test_python_refuses_wrong_types() -> None:
    with pytest.raises(jaxtrain.InputError, match="pairs takes a whole number, not 'many'"):
        jaxtrain.compare("demo", change={"seed": 1}, pairs="many")  # type: ignore[arg-type]
