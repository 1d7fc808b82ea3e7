"""``compare`` on real runs; test_wrong_use.py has the questions without an answer."""

import json
from pathlib import Path

import program
import pytest

import jaxtrain

TINY = [*program.TINY_MLM[2:], "--loop.steps", "4", "--mesh.fsdp", "1", "--data.path", "corpus"]
VALIDATED = [*TINY, "--loop.eval_every", "4"]


@pytest.mark.long
def test_real_runs_are_compared_and_equal_ones_are_identical(tmp_path: Path) -> None:
    program.write_corpus(tmp_path)
    asked = ["compare", "demo_mlm", *VALIDATED, "--metric", "val/loss", "--json", "answer.json"]
    asked += ["--pairs", "1", "--runs", "shared"]
    equal = program.run(tmp_path, *asked, "--change", "--optim.peak_lr 1e-2")
    assert equal.returncode == 0, equal.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["verdict"] == "identical"
    assert len(list((tmp_path / "shared").rglob("metrics.jsonl"))) == 2  # trained twice
    changed = program.run(tmp_path, *asked, "--change", "--optim.peak_lr 3e-5")
    assert "no verdict is possible before the sixth pair" in changed.stdout
    (pair,) = json.loads((tmp_path / "answer.json").read_text())["pairs"]
    assert len(list((tmp_path / "shared").rglob("metrics.jsonl"))) == 3  # without side a
    assert pair["b"] > pair["a"]
    assert len(list((tmp_path / "output" / "compare").glob("*/report.html"))) == 2
    existing = program.run(tmp_path, "compare", *pair["directories"], "--metric", "val/loss")
    assert f"b - a: {pair['b'] - pair['a']:+.4g}" in existing.stdout


def test_python_refuses_wrong_types() -> None:
    with pytest.raises(jaxtrain.InputError, match="pairs takes a whole number, not 'many'"):
        jaxtrain.compare("demo", change={"seed": 1}, pairs="many")  # type: ignore[arg-type]
