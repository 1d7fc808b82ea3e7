"""Tests which checkpoint a resume uses: damage is detected, and intact checkpoints are found."""

import dataclasses
import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_state import make_state, mesh_of, meta_of, save, target_of

from jaxtrain import config, versions
from jaxtrain.checkpoint import layout, saver
from jaxtrain.checkpoint import resume as resume
from jaxtrain.checkpoint.restore import restore
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training import run_directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a run with checkpoints 4 and 9 and best 4, for tests that only read or copy it."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = saver.Checkpoints(directory / "checkpoints", 2)
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
def test_an_incomplete_checkpoint_is_never_used(saved: Path, tmp_path: Path, loss: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoints" / "9" / loss).unlink()
    (run / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints" / "13").mkdir()
    assert layout.steps(run / "checkpoints") == [4]
    with pytest.raises(
        InputError, match=r"no complete checkpoint 9 \(.*\); complete checkpoints: 4"
    ):
        resume.choose("9", run, tmp_path)
    with pytest.raises(
        InputError, match=r"is not a complete checkpoint .*; checkpoints/ has: 4; best"
    ):
        resume.choose(str(run / "checkpoints" / "9"), None, tmp_path)
    said: list[str] = []
    assert resume.choose(str(run), None, tmp_path, said.append) == run / "checkpoints" / "4"
    assert f"checkpoint {run / 'checkpoints' / '9'} is damaged (" in "".join(said)
    assert said[-1].endswith("checkpoints/4, the newest intact one in checkpoints/")
    with pytest.raises(InputError, match="not a complete checkpoint"):
        layout.read_meta(run / "checkpoints" / "9")
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints" / "4"
    assert [line.partition(" is damaged")[0] for line in said[:-1]] == [
        f"warning: checkpoint {run / 'checkpoints' / step}" for step in ("13", "9")
    ]


def test_find_latest(saved: Path, tmp_path: Path) -> None:
    assert resume.choose("latest", tmp_path / "nothing", tmp_path) is None
    assert resume.choose("latest", None, tmp_path / "nothing") is None
    runs = tmp_path / "runs"
    for name, step in (("2026-01-02", "9"), ("2026-01-03", "4")):
        shutil.copytree(saved / "checkpoints" / step, runs / name / "checkpoints" / step)
    (runs / "2026-01-04" / "checkpoints").mkdir(parents=True)
    # 4 was saved before 9, although its folder sorts after it: the time of the save counts.
    assert resume.choose("latest", None, runs) == runs / "2026-01-02" / "checkpoints" / "9"
    shutil.copytree(runs / "2026-01-02", runs / "2026-01-05")
    assert resume.choose("latest", None, runs) == runs / "2026-01-05" / "checkpoints" / "9"


def test_find_step_and_path(saved: Path, tmp_path: Path) -> None:
    kept = saved / "checkpoints"
    assert resume.choose("4", saved, tmp_path) == kept / "4"
    assert resume.choose(str(kept / "4"), None, tmp_path) == kept / "4"
    assert resume.choose(str(saved), tmp_path / "other", tmp_path) == kept / "9"
    assert resume.choose(str(saved / "best"), None, tmp_path) == saved / "best" / "4"
    with pytest.raises(InputError, match=r"complete checkpoints: 4, 9; best: 4"):
        resume.choose("5", saved, tmp_path)
    with pytest.raises(InputError, match="requires --output-dir"):
        resume.choose("5", None, tmp_path)
    with pytest.raises(InputError, match=r"nowhere: no such folder"):
        resume.choose(str(tmp_path / "nowhere"), None, tmp_path)
    with pytest.raises(InputError, match="no complete checkpoint found there"):
        resume.choose(str(tmp_path), None, tmp_path)


def files_of(path: Path) -> list[str]:
    return sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(1))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def exchange(path: Path, rng: random.Random) -> None:
    """Replaces the file by that of the previous step, or by an empty file if there is none."""
    before = path.parents[len(path.parts) - path.parts.index("9") - 2].parent / "4"
    other = before / path.relative_to(before.parent / "9")
    path.write_bytes(other.read_bytes() if other.exists() else b"")


@pytest.mark.parametrize("damage", [flip, truncate, lengthen, delete, exchange])
def test_damage_to_any_file_is_detected(
    saved: Path, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    names = [
        name
        for name in files_of(saved / "checkpoints" / "9")
        if (saved / "checkpoints" / "9" / name).stat().st_size
    ]
    assert {"manifest.json", "meta/metadata", "state/_METADATA"} < set(names)
    assert any(name.startswith("state/d/") for name in names)
    for seed, name in enumerate(names):
        run = tmp_path / str(seed)
        shutil.copytree(saved, run)
        victim = run / "checkpoints" / "9" / name
        before = victim.read_bytes()
        damage(victim, random.Random(seed))
        if victim.exists() and victim.read_bytes() == before:
            assert damage is exchange  # the two steps have this file in common
            continue
        said: list[str] = []
        assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints" / "4"
        aside = run / "damaged" / "checkpoints" / "9"
        when, wrong = (aside / "reason.txt").read_text().splitlines()
        assert when.endswith(f"moved from {run / 'checkpoints' / '9'}")
        assert name in wrong
        assert said == [
            f"warning: checkpoint {run / 'checkpoints' / '9'} is damaged ({wrong}): moved to "
            f"{aside}",
            f"warning: resuming from {run / 'checkpoints' / '4'}, the newest intact one in "
            "checkpoints/",
        ]
        assert set(files_of(aside)) - {"reason.txt", name} == set(names) - {name} | {
            one for one in files_of(saved / "checkpoints" / "9") if one not in names
        }


def spoil(path: Path) -> None:
    flip(path / "state/_METADATA", random.Random(0))


def test_falls_back_to_the_best_checkpoint_if_all_others_are_damaged(
    saved: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "checkpoints" / "9")
    spoil(run / "checkpoints" / "4")
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "best" / "4"
    assert len(said) == 3
    assert said[-1].endswith(f"resuming from {run / 'best' / '4'}")
    assert [path.name for path in (run / "damaged").iterdir()] == ["checkpoints"]


def test_no_fresh_start_if_all_checkpoints_are_damaged(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for path in ("checkpoints/9", "checkpoints/4", "best/4"):
        spoil(run / path)
    before = files_of(run)
    for _ in range(2):  # nothing is moved, or the second attempt would start from scratch
        with pytest.raises(InputError) as caught:
            resume.choose("latest", run, tmp_path)
        assert "\n" not in str(caught.value)
        assert re.fullmatch(
            rf"--resume latest: no checkpoint of {run} is intact \(checkpoints/9: state/_METADATA "
            r"was changed after .*, and 2 more; .*, and more than 0 steps would be lost: "
            r"to start from scratch, choose another --output-dir or move .*",
            str(caught.value),
        )
    assert files_of(run) == before


def test_an_unfinished_first_save_leads_to_a_fresh_start(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved / "checkpoints" / "9", run / "checkpoints" / "9")
    (run / "checkpoints" / "9" / "manifest.json").unlink()
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append, max_lost_steps=9) is None
    assert said[-1] == f"warning: no intact checkpoint is left in {run}"


def test_a_fresh_start_if_few_steps_are_lost(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in ("checkpoints", "best"):
        shutil.copytree(saved / "checkpoints" / "9", run / folder / "9")
        spoil(run / folder / "9")
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append, max_lost_steps=9) is None
    assert said[-1] == f"warning: no intact checkpoint is left in {run}"
    assert (run / "damaged" / "checkpoints" / "9" / "reason.txt").exists()


@pytest.mark.parametrize("how", ["spoiled", "unmarked", "one is left", "all were moved"])
def test_a_long_run_never_restarts_from_scratch(saved: Path, tmp_path: Path, how: str) -> None:
    """Whatever the damage, and whether or not it was found before."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for path in ("checkpoints/9", "checkpoints/4", "best/4"):
        if how == "unmarked":
            (run / path / "manifest.json").unlink()
        else:
            spoil(run / path)
    if how in ("one is left", "all were moved"):
        (run / "damaged" / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "9").rename(run / "damaged" / "checkpoints" / "9")
        shutil.rmtree(run / "best")
    if how == "all were moved":
        (run / "checkpoints" / "4").rename(run / "damaged" / "checkpoints" / "4")
    before = files_of(run)
    for _ in range(2):
        with pytest.raises(InputError, match=r"more than 8 steps would be lost"):
            resume.choose("latest", run, tmp_path, max_lost_steps=8)
    assert files_of(run) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
def test_checkpoints_with_temporary_read_errors_are_not_moved(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "checkpoints" / "9")
    before = files_of(run)
    real, victim = Path.open, run / "checkpoints" / "4" / "meta" / "metadata"

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == victim:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    kind = InputError if number == errno.EACCES else RunAgain
    for flag in ("latest", "4"):
        with pytest.raises(kind, match=rf"metadata cannot be read \({os.strerror(number)}\): "):
            run_directory.start_from("demo", flag, str(run), tmp_path)
    assert files_of(run) == [".lock", *before]


def test_a_damaged_best_checkpoint_is_moved_even_if_not_used(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "best" / "4")
    assert resume.choose("latest", run, tmp_path) == run / "checkpoints" / "9"
    assert (run / "damaged" / "best" / "4" / "reason.txt").exists()
    assert layout.steps(run / "best") == []


def test_several_damaged_checkpoints_of_a_step_do_not_collide(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(3):
        shutil.copytree(saved / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
        spoil(run / "checkpoints" / "9")
        assert resume.choose("latest", run, tmp_path) == run / "checkpoints" / "4"
    aside = run / "damaged" / "checkpoints"
    assert sorted(path.name for path in aside.iterdir()) == ["9", "9.2", "9.3"]


def test_a_damaged_checkpoint_that_cannot_be_moved_is_skipped(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "checkpoints" / "9")
    (run / "damaged").write_text("in the way: not even root makes a folder in it")
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints" / "4"
    assert "and skipped; it cannot be moved to" in said[0]
    assert (run / "checkpoints" / "9").is_dir()


def test_a_symbolic_link_as_reason_file_is_not_followed(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoints" / "9" / "meta" / "metadata").unlink()
    (tmp_path / "mine").write_text("kept")
    (run / "checkpoints" / "9" / "reason.txt").symlink_to(tmp_path / "mine")
    assert resume.choose("latest", run, tmp_path, lambda line: None) == run / "checkpoints" / "4"
    assert (tmp_path / "mine").read_text() == "kept"
    assert "moved from" in (run / "damaged" / "checkpoints" / "9" / "reason.txt").read_text()


def test_failing_to_write_the_reason_only_warns(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "checkpoints" / "9")

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "write_whole", full)
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints" / "4"
    assert "reason.txt cannot be written (No space left on device)" in said[1]


def test_a_damaged_step_or_path_is_rejected_and_nothing_moves(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    spoil(run / "checkpoints" / "9")
    before = files_of(run)
    for wish in ("9", str(run / "checkpoints" / "9")):
        with pytest.raises(InputError) as caught:
            resume.choose(wish, run, tmp_path)
        message = str(caught.value)
        assert "state/_METADATA was changed after it was saved" in message
        assert "4" in message.rpartition(": ")[2] + message.rpartition(";")[2]
        assert "\n" not in message
    said: list[str] = []
    for wish in (str(run), str(run / "checkpoints")):
        assert resume.choose(wish, None, tmp_path, said.append) == run / "checkpoints" / "4"
    assert len(said) == 4
    assert f"checkpoint {run / 'checkpoints' / '9'} is damaged (state/_METADATA" in said[0]
    assert said[1].endswith("checkpoints/4, the newest intact one in checkpoints/")
    assert files_of(run) == before
    spoil(run / "checkpoints" / "4")
    assert resume.choose("4", run, tmp_path) == run / "best" / "4"  # the same state
    assert resume.choose(str(run), None, tmp_path, said.append) == run / "best" / "4"
    with pytest.raises(InputError, match=r"no checkpoint there is intact \(.*/9: state/_METADATA"):
        resume.choose(str(run / "checkpoints"), None, tmp_path, said.append)


def test_an_older_checkpoint_of_the_newest_run_precedes_older_runs(
    saved: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("old", "new"):
        shutil.copytree(saved / "checkpoints", runs / name / "checkpoints")
    shutil.rmtree(runs / "old" / "checkpoints" / "9")
    spoil(runs / "new" / "checkpoints" / "9")
    assert resume.choose("latest", None, runs) == runs / "new" / "checkpoints" / "4"
    shutil.copytree(saved / "checkpoints", runs / "new" / "checkpoints", dirs_exist_ok=True)
    for step in ("4", "9"):
        spoil(runs / "new" / "checkpoints" / step)
    said: list[str] = []
    assert resume.choose("latest", None, runs, said.append) == runs / "old" / "checkpoints" / "4"
    assert len(said) == 1
    assert f"warning: no checkpoint of {runs / 'new'} is intact (checkpoints/9: state/" in said[0]
    instead = runs / "old" / "checkpoints" / "4"
    assert said[0].endswith(f"resuming an older run from {instead} instead")


@pytest.mark.parametrize("max_lost", [0, 100])
@pytest.mark.parametrize("damage", ["a byte", "no record", "moved"])
def test_resuming_an_older_run_is_never_silent(
    saved: Path, tmp_path: Path, damage: str, max_lost: int
) -> None:
    """Whether the newer run's only save is damaged, lacks its records, or was moved before."""
    runs = tmp_path / "runs"
    new, old = (runs / name / "checkpoints" for name in ("new", "old"))
    shutil.copytree(saved / "checkpoints" / "4", old / "4")
    shutil.copytree(saved / "checkpoints" / "9", new / "9")
    if damage == "no record":
        (new / "9" / "_CHECKPOINT_METADATA").unlink()
        (new / "9" / "manifest.json").unlink()
    else:
        spoil(new / "9")
    if damage == "moved":
        (runs / "new" / "damaged" / "checkpoints").mkdir(parents=True)
        (new / "9").rename(runs / "new" / "damaged" / "checkpoints" / "9")
    for _ in range(2):  # also the second time, when the damaged checkpoint may have been moved
        said: list[str] = []
        found = resume.choose("latest", None, runs, said.append, max_lost_steps=max_lost)
        assert found == old / "4"
        assert f"warning: no checkpoint of {runs / 'new'} is intact (" in said[-1]
        assert said[-1].endswith(f": resuming an older run from {old / '4'} instead")


def test_without_an_older_run_a_damaged_run_is_refused(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    shutil.copytree(saved / "checkpoints" / "9", run / "checkpoints" / "9")
    (run / "checkpoints" / "9" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(InputError, match=rf"no checkpoint of {run} is intact .*more than 8 steps"):
        resume.choose("latest", None, run.parent, max_lost_steps=8)


def test_leftovers_of_an_interrupted_save_are_not_damage(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for name in ("12.orbax-checkpoint-tmp", "3.deleted", "15.partial"):
        (run / "checkpoints" / name).mkdir()
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints" / "9"
    assert said == []
    assert not (run / "damaged").exists()


def test_restore_verifies_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "9"
    shutil.copytree(saved / "checkpoints" / "9", path)
    data = max((path / "state").rglob("d/*"), key=lambda one: one.stat().st_size)
    flip(data, random.Random(1))
    target = target_of(make_state(9), mesh_of(8))
    with pytest.raises(InputError, match=r"is damaged \(state/.* its checksum is wrong\)"):
        restore(path, target)


def test_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "output"
    assert not resume.is_expected(None, tmp_path, root)
    assert not resume.is_expected("latest", tmp_path, root)
    assert not resume.is_expected("latest", None, root)
    assert resume.is_expected("200", tmp_path, root)
    monkeypatch.setattr(layout, "is_complete", lambda path: True)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    assert resume.is_expected("latest", tmp_path, root)


RUN = config.named("demo_mlm")
CRITERION = {"metric": "val/psnr", "mode": "max", "validation": "5 clips"}


def described(run: config.Run, fingerprint: str) -> dict[str, Any]:
    """Returns a checkpoint's metadata, as far as :func:`resume.check_same_run` reads it."""
    return {
        "fingerprint": fingerprint,
        "config": config.to_dict(run),
        "versions": versions.versions(),
    }


def check_same_run(saved: dict[str, Any], now: dict[str, Any], say: Callable[[str], None]) -> None:
    resume.check_same_run(
        "4",
        saved,
        model=RUN.model,
        fingerprint=now["fingerprint"],
        settings=now["config"],
        versions=now["versions"],
        say=say,
    )


def test_a_resumed_run_keeps_its_best_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {tmp_path / "run" / "best" / "3"}
    monkeypatch.setattr(resume, "is_complete", there.__contains__)
    best = {"metric": "val/psnr", "mode": "max", "value": 25.0, "step": 3, "validations_since": 1}
    start = tmp_path / "run/checkpoints/4"
    lines: list[str] = []

    def so_far(saved: object, directory: str = "run", **changes: object) -> object:
        return resume.best_so_far(
            {"best": saved, "validation": "5 clips"},
            CRITERION | changes,
            start,
            tmp_path / directory,
            lines.append,
        )

    assert so_far(best) == best
    assert so_far(best, "other") is None
    assert so_far(None) is None
    assert so_far(best, metric=None, mode=None) is None
    assert lines == []
    for change in ({"metric": "val/ssim"}, {"mode": "min"}, {"validation": "1 clip"}):
        assert so_far(best, **change) is None
        what = "the validation set" if "validation" in change else "checkpoint.best_metric"
        assert lines.pop().startswith(
            f"{what} differs from the checkpoint's: the best checkpoint so"
        )
    there.clear()  # the best checkpoint is lost
    assert so_far(best) is None


@pytest.mark.parametrize("there", [True, False])
def test_process_zero_decides_whether_the_best_checkpoint_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(resume, "is_complete", lambda path: not there)  # seen by this process
    monkeypatch.setattr(
        process_group, "process_zero_decides", lambda decide: "there" if there else ""
    )
    best = {"metric": "val/psnr", "mode": "max", "value": 25.0, "step": 3, "validations_since": 1}
    saved = {"best": best, "validation": "5 clips"}
    start = tmp_path / "checkpoints/4"
    found = resume.best_so_far(saved, CRITERION, start, tmp_path, print)
    assert found == (best if there else None)


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 7}, "seed 7"), ({}, "fingerprint other"), (None, None)]
)
def test_a_resume_rejects_another_seed_or_other_data(
    change: dict[str, Any] | None, named: str | None
) -> None:
    saved = described(RUN, "other" if change == {} else "same")
    now = described(dataclasses.replace(RUN, **(change or {})), "same")
    if named is None:
        check_same_run(saved, now, print)
        return
    with pytest.raises(InputError, match=named):
        check_same_run(saved, now, print)


def test_a_resume_with_other_clips_per_video_prints_the_original_flag() -> None:
    run = config.load("h100_8", ["--data.clips_per_video", "6"])
    now, saved = described(run, "now"), described(run, "then")
    data = saved["config"]["data"] | {"clips_per_video": 1}
    saved["config"] = saved["config"] | {"data": data}
    named = "pass the same --config and --data.path and --data.clips_per_video 1, or"
    with pytest.raises(InputError, match=re.escape(named)):
        check_same_run(saved, now, print)


def test_a_resume_with_other_frozen_parts_is_refused() -> None:
    """The checkpoint's optimizer state has other parameters; older ones froze nothing."""
    run = config.load("h100_8", ["--model.freeze", "encoder"])
    now, saved = described(run, "same"), described(run, "same")
    check_same_run(saved, now, print)
    model = {k: v for k, v in saved["config"]["model"].items() if k != "freeze"}
    saved["config"] = saved["config"] | {"model": model}
    with pytest.raises(InputError, match=r"model\.freeze=\(\), and this run has encoder, so"):
        check_same_run(saved, now, print)


def test_the_order_of_frozen_parts_does_not_matter() -> None:
    now, saved = (
        described(config.load("h100_8", ["--model.freeze", *paths]), "same")
        for paths in (("encoder", "decoder.head"), ("decoder.head", "encoder"))
    )
    check_same_run(saved, now, print)


def test_different_versions_are_printed() -> None:
    saved, now = described(RUN, "same"), described(RUN, "same")
    saved["versions"] = saved["versions"] | {"grain": "0.0.1"}
    said: list[str] = []
    check_same_run(saved, now, said.append)
    assert [line.partition(" -> ")[0] for line in said] == [
        "version differs from the checkpoint: grain: 0.0.1"
    ]


def test_a_step_of_a_missing_run_directory_is_rejected(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(InputError, match=rf"^--resume 400: {gone} does not exist: pass the "):
        resume.choose("400", gone, tmp_path)
    assert not gone.exists()


def test_a_rollback_falls_back_to_an_irregular_checkpoint(tmp_path: Path) -> None:
    """All regular checkpoints may be damaged while one saved by a stop signal is intact."""
    checkpoints = saver.Checkpoints(tmp_path / "checkpoints", 3, lambda line: None)
    save(checkpoints, 3, 4)
    checkpoints.close()
    (tmp_path / "checkpoints" / "4" / "meta" / "metadata").write_text("{}")
    said: list[str] = []
    found = resume.to_roll_back_to(tmp_path, 5, 4, said.append)
    assert found == tmp_path / "checkpoints" / "3"
    assert "is damaged" in said[0]


def test_a_run_directory_may_be_named_by_digits(tmp_path: Path) -> None:
    run = tmp_path / "1"
    checkpoints = saver.Checkpoints(run / "checkpoints", 3, lambda line: None)
    save(checkpoints, 4)
    checkpoints.close()
    assert resume.choose(str(run), None, tmp_path) == run / "checkpoints" / "4"
