"""Checkpoints at the worst moments: between two names, while a step is saved again, in a vote."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_state import make_state, meta_of, save

from jaxtrain import config
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


def test_a_save_whose_thread_dies_has_failed(
    saver: Checkpoints, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a vote, when process 0 is gone: nobody knows whether the others have written."""
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


def test_a_best_one_whose_second_name_a_kill_has_prevented_gets_it(
    saver: Checkpoints, run: Path
) -> None:
    saver.save_best(make_state(2), meta_of(2))
    save(saver, 3)
    saver.close()
    settings = config.Checkpoint(every=1, keep=1, best_metric="val/psnr", best_mode="max")
    best = {"metric": "val/psnr", "mode": "max", "value": 25.0, "step": 3, "validations_since": 0}
    assert resume.best_so_far(best, settings, run / "checkpoints" / "3", run) == best
    assert [path.name for path in (run / "best").iterdir()] == ["3"]
    assert manifest.verify(run / "best" / "3") == ""


def test_a_save_of_a_step_again_keeps_the_old_one_until_the_new_one_is_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Checkpoints(run / "checkpoints", 2)
    first.save(make_state(4), meta_of(4), best=True)
    first.close()
    places = [run / "checkpoints", run / "best"]
    before = [manifest.read(place / "4") for place in places]

    def reachable() -> bool:
        """What a process finds that starts after a kill at this moment."""
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
