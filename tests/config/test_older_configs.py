"""Configs of versions before the modules moved still load.

``tests/fixtures/configs`` contains the configs of commit 2332174, without a
``loop.early_stop_patience`` that could never be reached.
"""

from pathlib import Path

import pytest

from jaxtrain import config

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = sorted((FIXTURES / "configs").glob("*.py"))

CHANGED = {
    "demo": ["model.init: random -> thumbnail", "optim.peak_lr: 0.003 -> 0.001"],
    "h100_8": ["model.remat: ends -> none"],  # faster by the plan, and it fits
}


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
