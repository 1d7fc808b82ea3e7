"""The comparisons with PyTorch in benchmarks/ still run, at sizes that take seconds."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from program import CHECKOUT

WORDS = ("--model.vocab_size", "50", "--model.sequence_length", "16", "--data.batch_size", "4")
TINY = {
    "mlm_vs_transformers": "--model.hidden 16 --model.layers 1 --model.heads 2",
    # Output layers start at zero: at this rate they grow enough to reveal a wrong rotation.
    "gpt_vs_torch": "--model.depth 2 --model.width 16 --model.heads 4 --model.kv_heads 2 "
    "--optim.peak_lr 0.03",
}
ONCE = ("--rounds", "1", "--processes", "1")


@pytest.mark.parametrize("name", TINY)
def test_a_comparison_runs_and_both_sides_have_the_same_losses(name: str) -> None:
    found = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *ONCE, *WORDS, *TINY[name].split()],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "times as fast" in found.stdout
    (difference,) = re.findall(r"the losses differ by at most (\S+) ", found.stdout)
    assert float(difference) < 1e-5


def test_the_video_comparison_can_be_imported() -> None:
    assert callable(importlib.import_module("video_ae_vs_torch").main)
