"""Tests the checks before a run starts; test_wrong_input.py has most of their messages."""

from pathlib import Path

from jaxtrain import config
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.training import preflight


def test_a_step_may_be_in_a_bucket_only(tmp_path: Path) -> None:
    """On another machine, the run directory does not exist yet."""
    flags = RunFlags(output_dir=str(tmp_path / "new"), resume="500")
    (problem,) = preflight._places(config.load("demo_mlm"), flags)
    assert "--resume 500: " in problem
    run = config.load("demo_mlm", ["--checkpoint.mirror", "s3://bucket/run"])
    assert not list(preflight._places(run, flags))
