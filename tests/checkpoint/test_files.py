"""Tests checkpoint files on failing disks."""

import errno
import os
import tempfile
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from small_state import make_state, mesh_of, meta_of, save, target_of

from jaxtrain.checkpoint import files, layout, manifest, resume, saver
from jaxtrain.checkpoint.restore import restore
from jaxtrain.distributed import key_value
from jaxtrain.errors import InputError, RunAgain, Stopped


def test_a_save_succeeds_if_only_linking_the_best_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", []
    checkpoints = saver.Checkpoints(run / "checkpoints", 1, said.append)
    checkpoints.save(make_state(2), meta_of(2), best=True)
    checkpoints.wait()

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "link", full)
        checkpoints.save(make_state(4), meta_of(4), best=True)
        with pytest.raises(saver.BestNotKept, match=r"best/4 \(No space left"):
            checkpoints.wait()
    assert said == [
        f"warning: the best checkpoint could not be linked as {run / 'best' / '4'} (No space left "
        "on device): the previous best is kept"
    ]
    assert layout.steps(run / "checkpoints") == [4]
    assert layout.steps(run / "best") == [2]
    checkpoints.close()


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on that disk (lower --checkpoint.keep)"),
        (errno.EIO, "bring the disk back"),
        (errno.ESTALE, "bring the disk back"),
        (errno.EACCES, "check that disk, or choose another --output-dir"),
    ],
)
def test_a_failed_save_reports_the_fix_for_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 1, lambda line: None)

    def refuse(dir: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(saver.SaveFailed) as caught:
        checkpoints.save(make_state(2), meta_of(2))
    assert str(caught.value).endswith(f"({os.strerror(number)}): none is complete; {cure}")
    checkpoints.close()


def test_a_process_that_does_not_answer_is_not_blamed_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 1, lambda line: None)
    silent = f"process 3 {key_value.NO_VOTE} 1200 s"
    monkeypatch.setattr(checkpoints._votes, "agree", lambda part, failure: silent)
    with pytest.raises(saver.SaveFailed) as caught:
        checkpoints.save(make_state(2), meta_of(2))
    assert str(caught.value).endswith(f"({silent}): none is complete; see its log")
    checkpoints.close()


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, RunAgain), (errno.EACCES, InputError)])
def test_temporary_disk_errors_raise_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(path: Path, *arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    place = tmp_path / "checkpoints"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        with pytest.raises(kind, match="cannot be created"):
            saver.Checkpoints(place, 1)
    with monkeypatch.context() as patched:
        patched.setattr(files, "sweep", refuse)
        with pytest.raises(kind, match="cannot be read"):
            saver.Checkpoints(place, 1)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "verify", refuse)
        with pytest.raises(kind, match="cannot be read"):
            restore(place / "2", None)


def test_a_missing_disk_raises_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 1)
    save(checkpoints, 2)
    checkpoints.close()

    def away(*arguments: object, **more: object) -> None:
        raise ValueError("NOT_FOUND: Error reading: Input/output error [os_error_code='5']")

    monkeypatch.setattr(ocp.Checkpointer, "restore", away)
    target = target_of(make_state(2), mesh_of(8))
    with pytest.raises(RunAgain, match=r"\(Input/output error\): bring the disk back"):
        restore(tmp_path / "checkpoints" / "2", target, verified=True)


def test_a_stop_signal_during_a_restore_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax reads in its own event loop and wraps exceptions that interrupt it."""
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 1)
    save(checkpoints, 2)
    checkpoints.close()

    def stopped(*arguments: object, **more: object) -> None:
        try:
            raise Stopped("SIGTERM")
        except Stopped as stop:
            raise ValueError("cannot restore") from stop

    monkeypatch.setattr(ocp.Checkpointer, "restore", stopped)
    target = target_of(make_state(2), mesh_of(8))
    with pytest.raises(Stopped):
        restore(tmp_path / "checkpoints" / "2", target, verified=True)


def test_the_newest_regular_checkpoint_is_always_kept(tmp_path: Path) -> None:
    """Checkpoints saved by stop signals must not displace it, as a rollback needs it."""
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 2, lambda line: None, every=10)
    there = []
    for step in (10, 20, 23, 24, 27, 30, 31):
        checkpoints.save(make_state(step), meta_of(step), best=True)
        checkpoints.wait()
        there.append(layout.steps(tmp_path / "checkpoints"))
        assert layout.steps(tmp_path / "best") == [step]
    checkpoints.close()
    assert there == [[10], [10, 20], [20, 23], [20, 23, 24], [20, 24, 27], [27, 30], [30, 31]]


def test_the_newest_certified_checkpoint_is_always_kept(tmp_path: Path) -> None:
    """Those after it are moved aside if a device turns out to have computed wrong results."""
    (tmp_path / layout.CERTIFIED).write_text("25\n")
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 1, lambda line: None, every=10)
    for step in (10, 20, 30, 40):
        checkpoints.save(make_state(step), meta_of(step), best=True)
        checkpoints.wait()
    assert layout.steps(tmp_path / "checkpoints") == [20, 40]
    assert layout.steps(tmp_path / "best") == [40]
    (tmp_path / layout.CERTIFIED).write_text("50\n")
    checkpoints.save(make_state(50), meta_of(50))
    checkpoints.close()
    assert layout.steps(tmp_path / "checkpoints") == [50]


def test_steps_after_a_rollback_are_saved_again(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    checkpoints = saver.Checkpoints(run / "checkpoints", 3, said.append)
    save(checkpoints, 2, 4)
    (run / "checkpoints" / "4" / "meta" / "metadata").write_text("{}")
    assert resume.to_roll_back_to(run, 4, 2, said.append) == run / "checkpoints" / "2"
    assert layout.steps(run / "checkpoints") == [2]
    assert (run / "damaged" / "checkpoints" / "4" / "reason.txt").exists()
    assert "is damaged (meta/metadata has 2 bytes" in said[0]
    checkpoints.forget_after(2)
    save(checkpoints, 4)
    assert manifest.verify(run / "checkpoints" / "4") == ""
    checkpoints.close()


def test_a_rollback_without_an_intact_checkpoint_moves_nothing(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    (run / "checkpoints" / "4").mkdir(parents=True)
    assert resume.to_roll_back_to(run, 4, 2, said.append) is None
    assert (run / "checkpoints" / "4").is_dir()
    assert said == []


def test_a_failed_link_can_be_retried(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "a").write_text("a")
    manifest.write(tmp_path / "12", 12)
    best = tmp_path / "best" / "12"
    (best.with_name("12.partial") / "left").mkdir(parents=True)
    files.link(tmp_path / "12", best)
    assert manifest.verify(best) == ""
    assert [path.name for path in best.parent.iterdir()] == ["12"]
    assert not (best / "left").exists()


def test_additional_files_are_saved_and_listed_in_the_manifest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = saver.Checkpoints(
        run / "checkpoints", 1, lambda line: None, files={"tokenizer.json": b"{}"}
    )
    checkpoints.save(make_state(2), meta_of(2), best=True)
    checkpoints.close()
    for folder in (run / "checkpoints" / "2", run / "best" / "2"):
        assert (folder / "tokenizer.json").read_bytes() == b"{}"
        assert manifest.verify(folder) == ""
        assert restore(folder, target_of(make_state(2), mesh_of(8))) is not None
    (run / "checkpoints" / "2" / "tokenizer.json").unlink()
    assert manifest.verify(run / "checkpoints" / "2") == "tokenizer.json is missing"
