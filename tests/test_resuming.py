"""Which checkpoint a resume takes: no damage is missed, and what is whole is found."""

import shutil
from pathlib import Path

import pytest
from small_state import make_state, meta_of, save

from jaxtrain import checkpoint
from jaxtrain.errors import InputError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 4 and 9 and best 4, for tests that only read it, or copy it."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = checkpoint.Checkpoints(directory / "checkpoints", 2)
    save(checkpoints, 4, 9)
    checkpoints.save_best(make_state(4), meta_of(4))
    checkpoints.close()
    return directory


@pytest.mark.parametrize(
    "loss",
    [
        "manifest.json",
        "_CHECKPOINT_METADATA",
        "state/manifest.ocdbt",
        "state/_METADATA",
        "meta/metadata",
    ],
)
def test_an_incomplete_folder_is_never_taken(saved: Path, tmp_path: Path, loss: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoints" / "9" / loss).unlink()
    (run / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints" / "13").mkdir()
    assert checkpoint.steps(run / "checkpoints") == [4]
    with pytest.raises(InputError, match=r"no complete checkpoint 9 \(.*\): complete ones are 4"):
        checkpoint.find("9", run, tmp_path)
    with pytest.raises(InputError, match=r"not a complete checkpoint .*beside it are 4"):
        checkpoint.find(str(run / "checkpoints" / "9"), None, tmp_path)
    with pytest.raises(InputError, match="not a complete checkpoint"):
        checkpoint.read_meta(run / "checkpoints" / "9")
    said: list[str] = []
    assert checkpoint.find("latest", run, tmp_path, said.append) == run / "checkpoints" / "4"
    assert [line.partition(" is damaged")[0] for line in said[:-1]] == [
        f"warning: checkpoint {run / 'checkpoints' / step}" for step in ("13", "9")
    ]


def test_find_latest(saved: Path, tmp_path: Path) -> None:
    assert checkpoint.find("latest", tmp_path / "nothing", tmp_path) is None
    assert checkpoint.find("latest", None, tmp_path / "nothing") is None
    runs = tmp_path / "runs"
    for name, step in (("2026-01-02", "9"), ("2026-01-03", "4")):
        shutil.copytree(saved / "checkpoints" / step, runs / name / "checkpoints" / step)
    (runs / "2026-01-04" / "checkpoints").mkdir(parents=True)
    # 4 was saved before 9, though its folder sorts after: the run that saved last is the newest.
    assert checkpoint.find("latest", None, runs) == runs / "2026-01-02" / "checkpoints" / "9"
    shutil.copytree(runs / "2026-01-02", runs / "2026-01-05")
    assert checkpoint.find("latest", None, runs) == runs / "2026-01-05" / "checkpoints" / "9"


def test_find_step_and_path(saved: Path, tmp_path: Path) -> None:
    kept = saved / "checkpoints"
    assert checkpoint.find("4", saved, tmp_path) == kept / "4"
    assert checkpoint.find(str(kept / "4"), None, tmp_path) == kept / "4"
    assert checkpoint.find(str(saved), tmp_path / "other", tmp_path) == kept / "9"
    assert checkpoint.find(str(saved / "best"), None, tmp_path) == saved / "best" / "4"
    with pytest.raises(InputError, match=r"complete ones are 4, 9, and 4 as the best"):
        checkpoint.find("5", saved, tmp_path)
    with pytest.raises(InputError, match="needs --output-dir"):
        checkpoint.find("5", None, tmp_path)
    with pytest.raises(InputError, match=r"nowhere: there is no such folder"):
        checkpoint.find(str(tmp_path / "nowhere"), None, tmp_path)
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        checkpoint.find(str(tmp_path), None, tmp_path)
