"""Configs, and a checkpoint of each model, of versions before the modules moved still work.

``tests/fixtures/configs`` contains the configs of commit 2332174, without a
``loop.early_stop_patience`` that could never be reached. ``older_runs.tar.gz`` was written by
commit 43566ac. For each model it contains a run directory with the checkpoint of step 2, the losses
of four steps, and the data.
"""

import tarfile
from pathlib import Path

import pytest
from program import losses, train

from jaxtrain import config

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = sorted((FIXTURES / "configs").glob("*.py"))

TEXT = (
    *("--data.path", "corpus", "--model.vocab_size", 300, "--model.sequence_length", 32),
    *("--model.heads", 2, "--data.batch_size", 4),
)
SMALL = {
    "mlm": (
        *("--config", "demo_mlm", "--model.hidden", 16, "--model.ff", 32, "--model.layers", 1),
        *TEXT,
    ),
    "gpt": ("--config", "demo_gpt", "--model.depth", 1, "--model.width", 16, *TEXT),
    "video_ae": (
        *("--config", "demo", "--data.path", "videos", "--data.batch_size", 4),
        *("--model.frames", 4, "--model.height", 16, "--model.width", 16),
        *("--model.encoder_width", 4, "--model.decoder_widths", 8, 4, 4, 4),
        *("--optim.peak_lr", 3e-3),
    ),
}
SMALL_LONG = ("gpt",)
SMALL_SUITE = ("mlm", "video_ae")
CHANGED = {
    "demo": ["model.init: random -> thumbnail", "optim.peak_lr: 0.003 -> 0.001"],
    "h100_8": ["model.remat: ends -> none"],  # faster by the plan, and it fits
}
ALL = (
    *("--data.workers", 0, "--optim.schedule", "constant", "--optim.warmup_steps", 0),
    *("--optim.warmup_fraction", None, "--optim.accumulate", 1, "--mesh.data", 1, "--mesh.fsdp", 1),
    *("--loop.epochs", None, "--loop.tokens_per_param", None, "--loop.steps", 4),
    *("--loop.log_every", 1, "--loop.eval_every", None),
    *("--checkpoint.every", 2, "--checkpoint.best_metric", None),
)


def test_all_configs_are_here() -> None:
    assert len(CONFIGS) == 20


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_older_configs_load_with_the_same_values(path: Path) -> None:
    """Except the number of workers, which follows the host now and changes no example, and what
    was changed on purpose."""
    older, now = config.load(str(path)), config.named(path.stem)
    changed = config.differences(config.to_dict(older), config.to_dict(now))
    expected = CHANGED.get(path.stem, [])
    assert [one for one in changed if not one.startswith("data.workers: ")] == expected
    assert now.data.workers is None or older.data.workers == now.data.workers


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [*SMALL_SUITE, *(pytest.param(name, marks=pytest.mark.long) for name in SMALL_LONG)],
)
def test_a_checkpoint_is_resumed_with_the_same_losses(tmp_path: Path, model: str) -> None:
    with tarfile.open(FIXTURES / "older_runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    wanted = losses(tmp_path / model)
    said = train(tmp_path, *SMALL[model], *ALL, "--output-dir", model, "--resume", "latest")
    assert "resumed from" in said or "resuming" in said, said
    found = losses(tmp_path / model)
    assert list(found) == list(wanted) == [1, 2, 3, 4]
    assert found == pytest.approx(wanted, rel=1e-5)
