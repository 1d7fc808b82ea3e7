"""Early stopping by the metric that the config names, on all devices."""

from pathlib import Path

import pytest
from program import TINY_MLM, losses, train, write_corpus

pytestmark = pytest.mark.slow


def test_early_stopping_uses_the_named_metric(tmp_path: Path) -> None:
    """Without a learning rate nothing improves: the run ends after two more validations.

    The best state is that of the first validation, although later ones were equally good.
    """
    write_corpus(tmp_path)
    still = ("--optim.peak_lr", 1e-12, "--simulate-devices", 2, "--mesh.fsdp", 2)
    best = ("--checkpoint.best_metric", "val/pseudo_perplexity", "--checkpoint.best_mode", "min")
    patience = ("--loop.early_stop_patience", 2, "--loop.eval_every", 2, "--loop.steps", 12)
    data = ("--data.path", "corpus", "--output-dir", "early")
    text = train(tmp_path, *TINY_MLM, *data, *still, *best, *patience)
    assert "stopped early: 2 validations without a better val/pseudo_perplexity" in text
    assert max(losses(tmp_path / "early")) == 6
    assert [path.name for path in (tmp_path / "early/best").iterdir()] == ["2"]
