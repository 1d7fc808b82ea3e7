"""The run directory: how it is chosen, created, checked and linked."""

import errno
import fcntl
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint

from jaxtrain.checkpoint import own_files, pointer, start
from jaxtrain.checkpoint.store import Folder
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import run_marker
from jaxtrain.storage.atomic import expanded
from jaxtrain.training import run_directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "output"


NOTHING = start.Flags()


def fake_checkpoint(run: Path, step: int) -> Path:
    """Writes a complete checkpoint."""
    return small_checkpoint.write(run, step, saved=f"2026-01-01T00:00:{step:02}Z")


def test_a_new_run_is_named_after_the_time(root: Path) -> None:
    first = run_directory.prepare("demo", None, None, root)
    second = run_directory.prepare("demo", None, None, root)
    assert first != second
    for directory in (first, second):
        assert directory.is_dir()
        assert directory.parent == root / "demo"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d+)?", directory.name)
    run_directory.point_latest(first, root)
    run_directory.point_latest(second, root)
    assert expanded(root / "latest") == second
    assert expanded(root / "latest/report.html") == second / "report.html"
    assert (root / "latest").read_text() == f"demo/{second.name}\n"  # the folder can be moved
    assert sorted(path.name for path in root.iterdir()) == ["demo", "latest"]


def test_latest_is_a_run_below_the_root(root: Path, tmp_path: Path) -> None:
    given = tmp_path / "elsewhere" / "run"
    assert run_directory.prepare("demo", str(given), None, root) == given
    run_directory.point_latest(given, root)
    assert not root.exists()
    inside = root / "demo" / "mine"
    assert run_directory.prepare("demo", str(inside), None, root) == inside
    run_directory.point_latest(inside, root)
    assert expanded(root / "latest") == inside


def test_checking_a_directory_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    given = tmp_path / "new" / "deep"
    assert not list(run_directory.problems(str(given), NOTHING))
    assert not given.parent.exists()
    (found,) = run_directory.problems("/proc/jaxtrain/deep", NOTHING)
    assert "cannot write to the run directory /proc/jaxtrain/deep" in found
    fake_checkpoint(given, 7)
    (found,) = run_directory.problems(str(given), NOTHING)
    assert "already contains checkpoints (newest: 7)" in found
    assert not list(run_directory.problems(str(given), start.Flags("latest")))
    assert given.exists()


def test_a_folder_with_files_of_a_user_is_refused_and_unchanged(root: Path, tmp_path: Path) -> None:
    given = tmp_path / "work"
    (given / "data/2024-01-15").mkdir(parents=True)
    (given / "data/2024-01-15/holiday.txt").write_text("mine")
    message = f"--output-dir {given} is not empty and not a run of this version of jaxtrain (it has"
    for _ in range(2):
        with pytest.raises(InputError, match=re.escape(f"{message} data): choose a new or empty")):
            run_directory.prepare("demo", str(given), None, root)
        assert [path.name for path in given.iterdir()] == ["data"]
    (found,) = run_directory.problems(str(given), NOTHING)
    assert found.startswith(message)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/lost+found").mkdir()
    assert run_directory.prepare("demo", str(tmp_path / "empty"), None, root)


def test_a_link_among_the_folders_of_checkpoints_is_refused(root: Path, tmp_path: Path) -> None:
    given = run_directory.prepare("demo", str(tmp_path / "run"), None, root)
    (tmp_path / "elsewhere").mkdir()
    (given / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"run/checkpoints is a symbolic link, and checkpoints"):
        run_directory.prepare("demo", str(given), None, root)


def test_what_a_killed_save_left_is_deleted_before_anything_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have filled the disk."""
    given = run_directory.prepare("demo", str(tmp_path / "run"), None, root)
    lost = given / small_checkpoint.files_folder(6, run_id=run_marker.read(given))
    of_user = given / "checkpoints/files/2024-01-15"
    for folder in (lost, of_user):
        folder.mkdir(parents=True)
    real = tempfile.TemporaryFile

    def probe(dir: Path) -> Any:
        if lost.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", probe)
    assert run_directory.prepare("demo", str(given), "latest", root) == given
    assert of_user.is_dir()


def test_what_an_interrupted_start_has_fetched_stays_in_the_cache(tmp_path: Path) -> None:
    """The defect: a launcher's restart fetched a large checkpoint from the beginning."""
    cached, bucket = tmp_path / "cached", Folder(tmp_path / "bucket")
    for step in (2, 4):
        fake_checkpoint(cached, step).unlink()  # which is written last
    fake_checkpoint(bucket.run_dir, 4)
    run_directory.prepare_cache(cached, bucket)
    left = (cached / "checkpoints/files").iterdir()
    assert [folder.name.partition("-")[0] for folder in left] == ["4"]


@pytest.mark.parametrize("locks", [True, False])
def test_a_start_removes_temporary_files_of_a_killed_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    given = tmp_path / "run"
    left = [
        ".config.json.abcdefgh.json",
        "tensorboard/.events.out.tfevents.0000000000.config.j_rb53c1.config",
        "samples/.clip_4.png.abcdefgh.png",
        "profile/process-1/.summary.txt.abcdefgh.txt",
        "checkpoints/.4.json.abcdefgh.json",
        "aside/.4-0123456789ab.txt.abcdefgh.txt",
    ]
    # Of a user, or of a command that is writing now.
    kept = [".notes.20260101", "wandb/.a.json.abcdefgh.json", ".report.html.abcdefgh.html"]
    for name in (*left, *kept):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).touch()
    small_checkpoint.mark(given)

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:  # another run may be alive
        monkeypatch.setattr(fcntl, "lockf", no_locks)
    run_directory.prepare("demo", str(given), None, root)
    there = {
        path.relative_to(given).as_posix()
        for path in given.rglob("*")
        if path.is_file() and path.name not in (".lock", run_marker.NAME)
    }
    assert there == set(kept if locks else left + kept)


def test_resume_latest_without_a_directory_uses_that_of_the_run(root: Path) -> None:
    newest = fake_checkpoint(root / "demo" / "2026-01-02T00-00-00Z", 5)
    directory = run_directory.prepare("demo", None, "latest", root)
    assert small_checkpoint.choose("latest", directory) == newest
    assert directory == root / "demo" / "2026-01-02T00-00-00Z"


def test_an_unwritable_directory_is_reported(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/jaxtrain")):
        with pytest.raises(InputError, match=r"cannot write to the run directory .*--output-dir"):
            run_directory.prepare("demo", str(given), None, root)


def test_a_latest_that_cannot_be_written_is_one_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name is not replaced, and a full disk does not end the run after a save."""
    run, said = run_directory.prepare("demo", None, None, root), list[str]()
    (root / "latest").mkdir()
    run_directory.point_latest(run, root, said.append)

    def refuse(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_directory, "write_whole", refuse)
    run_directory.point_latest(run, root, said.append)
    assert said == [
        f"warning: cannot write {root / 'latest'}, which names {run} ({why})"
        for why in ("Is a directory", "No space left on device")
    ]


def test_the_config_is_written_atomically(tmp_path: Path) -> None:
    run_directory.write_config(tmp_path, {"seed": 1})
    run_directory.write_config(tmp_path, {"seed": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "tensorboard"}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    said: list[str] = []
    run_directory.write_config(tmp_path / "gone", {}, said.append)
    assert re.fullmatch(r"warning: cannot write .*config.json \(No such file.*", said[0])


def test_a_full_disk_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(RunAgain, match=r"\(No space left on device\): free space .*--output-dir"):
        run_directory.prepare("demo", str(tmp_path / "run"), "latest", tmp_path)


def shared_by_two(monkeypatch: pytest.MonkeyPatch, folder: Path, other_says: str = "") -> None:
    """Calls ``check_shared`` as process 0 of two, and simulates the other one."""

    def gather(what: str, value: str) -> list[str]:
        if len(value) != 16:  # the message of this process, or none
            return [value, other_says]
        (folder / ".shared-other").touch()
        return [value, "other"]

    monkeypatch.setattr(run_directory.jax, "process_count", lambda: 2)
    monkeypatch.setattr(run_directory.jax, "process_index", lambda: 0)
    monkeypatch.setattr(run_directory.process_group, "gather", gather)
    monkeypatch.setattr(run_directory, "_APPEARS_S", 0.1)
    run_directory.check_shared(folder)


def test_a_different_folder_in_each_process_is_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_by_two(monkeypatch, tmp_path)
    says = "(on b) does not see what process 0 wrote"
    with pytest.raises(
        InputError, match=r"is not the same folder for all processes: process 1 \(on b\) does"
    ):
        shared_by_two(monkeypatch, tmp_path, says)
    says = "(on b) cannot write there (Permission denied)"
    with pytest.raises(InputError, match=r"Permission denied"):
        shared_by_two(monkeypatch, tmp_path, says)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_on_one_host_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    words = os.strerror(number)
    with pytest.raises(
        RunAgain, match=rf"process 1 \(on b\) cannot write there \({words}\): .*, or "
    ):
        shared_by_two(monkeypatch, tmp_path, f"(on b) cannot write there ({words})")

    def fail(*arguments: object) -> None:
        raise OSError(number, words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RunAgain, match=rf"process 0 \(on .*\) cannot write there \({words}\)"):
            shared_by_two(patch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", fail)
        with pytest.raises(RunAgain, match=rf"process 0 \(on .*\) cannot read there \({words}\)"):
            shared_by_two(patch, tmp_path)


def test_folders_made_above_a_run_are_reported(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not below the current folder, where the first run of a tutorial makes output/first."""
    run_directory.prepare("demo", str(tmp_path / "one"), None, root)
    (tmp_path / "here").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "here")
        run_directory.prepare("demo", "output/first", None, root)
    assert capsys.readouterr().err == ""
    run_directory.prepare("demo", str(tmp_path / "mnt" / "shared" / "run"), None, root)
    said = capsys.readouterr().err
    assert f"{tmp_path}/mnt/shared did not exist and was created" in said


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    run = root / "demo" / "run"
    saved = fake_checkpoint(run, 7)
    (run / "notes").symlink_to(tmp_path)
    (run / "checkpoints" / "newest").symlink_to("7.json")
    (root / "latest").symlink_to("demo/run")
    given = str(root / "latest")
    directory = run_directory.prepare("demo", given, "latest", root)
    assert directory == root / "latest"
    path = small_checkpoint.choose("latest", directory)
    assert path is not None
    assert path.samefile(saved)


FOLDERS = {*pointer.KINDS, pointer.ASIDE}


@pytest.mark.parametrize("documented", run_directory.FILES)
def test_every_documented_file_is_of_a_known_kind(documented: str) -> None:
    first = documented.partition("/")[0]
    own = own_files.is_own(first) or first in own_files.FOLDERS
    kinds = [own, first in FOLDERS, first in own_files.HERE]
    assert kinds.count(True) == 1, f"{documented}: of the run, of a checkpoint, of this machine"


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (True, ("log.1.txt", "hang-0.txt", "samples/clip_4.png", "wandb/latest-run")),
        (True, ("examples.2.jsonl", "trackers/wandb.json", "tensorboard/events.out.tfevents.1.a")),
        (False, ("notes.txt", "my.log.txt", "checkpoints/4.json", "aside/4-0.json", ".lock")),
        (False, ("notes.json", "labels.jsonl", "samples/frame.png", "samples/4/a.png")),
        (False, ("log.txt/x", "tensorboard/notes.md", "trackers/keys.txt", "samples")),
        (
            False,
            (
                "start.json",
                "restarts.json",
                ".config.json.ab12cd34.json",
                "samples/.a_4.png.ab12cd34.png",
            ),
        ),
    ],
)
def test_only_files_of_a_run_are_its_own(own: bool, names: tuple[str, ...]) -> None:
    assert {name for name in names if own_files.is_own(name) != own} == set()


@pytest.mark.parametrize(
    ("name", "process"),
    [
        ("metrics.jsonl", 0),
        ("log.txt", 0),
        ("log.1.txt", 1),
        ("quarantine.12.jsonl", 12),
        ("hang-3.txt", 3),
        ("profile/process-2/trace.json", 2),
        ("profile/plugins/trace.json", 0),
    ],
)
def test_a_file_is_copied_to_a_bucket_by_the_process_that_writes_it(
    name: str, process: int
) -> None:
    assert own_files.process_of(name) == process
