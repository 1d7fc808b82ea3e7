"""The benchmarks against PyTorch programs still start: one runs, at sizes that take seconds."""

import importlib
import os
import subprocess
import sys

import pytest
from program import CHECKOUT

TINY = (
    *("--model.vocab_size", "50", "--model.sequence_length", "16", "--model.hidden", "16"),
    *("--model.layers", "1", "--model.heads", "2", "--data.batch_size", "4"),
)

ONCE = ("--rounds", "1", "--processes", "1")


def test_a_comparison_runs() -> None:
    found = subprocess.run(
        [sys.executable, "benchmarks/mlm_vs_transformers.py", *ONCE, *TINY],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "times as fast" in found.stdout


@pytest.mark.parametrize("name", ["gpt_vs_torch", "mlm_vs_transformers", "video_ae_vs_torch"])
def test_the_others_find_what_they_import(name: str) -> None:
    assert callable(importlib.import_module(name).main)
