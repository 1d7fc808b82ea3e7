"""What a model card takes from the records of a run."""

import json
from pathlib import Path

from jaxtrain.interop import model_card


def metrics(folder: Path, *lines: str) -> str:
    """Returns the card's table of a run with these lines in its metrics.jsonl."""
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return "\n".join(model_card._metrics(folder, {"step": 4}))


def test_the_validation_of_the_checkpoints_step_is_listed(tmp_path: Path) -> None:
    text = metrics(
        tmp_path,
        json.dumps({"step": 2, "val/loss": 3.0}),
        json.dumps({"step": 4, "val/loss": 2.5, "train/loss": 9.0}),
    )
    assert "| val/loss | 2.5 |" in text
    assert "train" not in text
    assert "3" not in text


def test_the_config_and_the_versions_cannot_become_markup() -> None:
    evil = "a` ![b](c) |\n# d"
    lines = model_card._training({"step": 4, "examples_seen": 8}, {"name": evil}, [evil])
    assert "| config | `a? ![b](c) ?\\n# d` |" in lines
    assert "| data | `a? ![b](c) ?\\n# d` |" in lines
    assert model_card._trained_with({"jax": evil}) == ["Trained with `jax a? ![b](c) ?\\n# d`.", ""]
    assert model_card._trained_with(None) == []
