"""Tests failures at critical moments: before linking, while saving a step again, in a vote."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_state import make_state, meta_of, save

from jaxtrain.checkpoint import layout, manifest, resume
from jaxtrain.checkpoint.saver import Checkpoints, SaveFailed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def saver(run: Path) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(run / "checkpoints", 2)
    yield checkpoints
    checkpoints.close()


def test_a_save_fails_if_its_thread_dies(
    saver: Checkpoints, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example in a vote when process 0 is gone, and the result of the others is unknown."""
    save(saver, 2)

    def gone(part: str, failure: str) -> str:
        if part == "end":
            raise RuntimeError("UNAVAILABLE: the coordination service is gone")
        return failure

    with monkeypatch.context() as patched:
        patched.setattr(saver._votes, "agree", gone)
        saver.save(make_state(4), meta_of(4))
        with pytest.raises(SaveFailed, match=r"/4 could not be written \(RuntimeError: UNAVAI"):
            saver.wait()


def test_a_best_checkpoint_not_linked_due_to_a_kill_is_linked_on_resume(
    saver: Checkpoints, run: Path
) -> None:
    saver.save_best(make_state(2), meta_of(2))
    save(saver, 3)
    saver.close()
    best = {"metric": "val/psnr", "mode": "max", "value": 25.0, "step": 3, "validations_since": 0}
    saved, criterion = {"best": best, "validation": "5 clips"}, {**best, "validation": "5 clips"}
    assert resume.best_so_far(saved, criterion, run / "checkpoints" / "3", run, print) == best
    assert [path.name for path in (run / "best").iterdir()] == ["3"]
    assert manifest.verify(run / "best" / "3") == ""


def test_saving_a_step_again_keeps_the_old_checkpoint_until_the_new_one_is_complete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Checkpoints(run / "checkpoints", 2)
    first.save(make_state(4), meta_of(4), best=True)
    first.close()
    places = [run / "checkpoints", run / "best"]
    before = [manifest.read(place / "4") for place in places]

    def reachable() -> bool:
        """Whether a process started after a kill at this moment finds a checkpoint."""
        other = run.with_name("killed")
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(run, other)
        found = resume.choose("latest", other, run.parent, lambda line: None)
        return found == other / "checkpoints" / "4" and layout.is_complete(other / "best" / "4")

    written, looked = threading.Event(), threading.Event()

    def full(folder: Path, step: int) -> None:
        assert (folder / "state" / "_METADATA").exists()
        written.set()
        assert looked.wait(60)
        raise OSError(28, "No space left on device")

    again = Checkpoints(run / "checkpoints", 2, lambda line: None)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "write", full)
        again.save(make_state(4), meta_of(4), best=True)
        assert written.wait(60)
        assert reachable()
        looked.set()
        with pytest.raises(SaveFailed, match=r"newest complete one is .*/4;"):
            again.wait()
    assert [manifest.read(place / "4") for place in places] == before
    again.save(make_state(4), meta_of(4), best=True)
    again.close()
    assert [manifest.verify(place / "4") for place in places] == ["", ""]
    assert manifest.read(run / "checkpoints" / "4") != before[0]
    assert [[path.name for path in place.iterdir()] for place in places] == [["4"], ["4"]]
