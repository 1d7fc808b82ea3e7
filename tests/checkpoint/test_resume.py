"""Tests which checkpoint a resume uses: damage is detected, and intact checkpoints are found."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore

from jaxtrain.checkpoint import candidates, pointer, remote, resume
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Bucket
from jaxtrain.training import run_directory

FILES = {"state/_METADATA": b"arrays", "state/d/0": b"numbers", "tokenizer.json": b"{}"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 4 and 9 and best 4, whose files are also of checkpoint 4."""
    directory = tmp_path / "run"
    small_checkpoint.write(directory, 4, ("checkpoints", "best"), files=FILES)
    small_checkpoint.write(directory, 9, files=FILES)
    return directory


def files_of(path: Path) -> dict[str, bytes]:
    return {
        one.relative_to(path).as_posix(): one.read_bytes()
        for one in path.rglob("*")
        if one.is_file() and one.name != ".lock"
    }


def spoil(run: Path, step: int, name: str = "state/d/0") -> None:
    """Flips a bit of a file, which is of all pointers to it."""
    (folder,) = (run / "checkpoints/files").glob(f"{step}-*")
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("state/d/0", "flipped"), ("state/d/0", "shorter"), ("state/_METADATA", "longer")),
        *(("state/_METADATA", "emptied"), ("tokenizer.json", "deleted")),
    ],
)
def test_damage_to_any_file_is_detected(run: Path, tmp_path: Path, name: str, how: str) -> None:
    victim = small_checkpoint.data_of(run / "checkpoints/9.json") / name
    content = victim.read_bytes()
    victim.unlink()
    if how != "deleted":
        changed = {
            "flipped": bytes([content[0] ^ 4]) + content[1:],
            "shorter": content[:-1],
            "longer": content + b"x",
            "emptied": b"",
        }
        victim.write_bytes(changed[how])
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints/4.json"
    category, _, why = small_checkpoint.aside(run)[9].partition(": ")
    assert category == "damaged"
    assert name in why
    (moved,) = (run / "aside").glob("9-*.json")
    assert said == [
        f"warning: checkpoint {run}/checkpoints/9 is damaged ({why}): moved to "
        f"{moved.with_suffix('')}",
        f"warning: resuming from {run}/checkpoints/4, the newest intact one in checkpoints/",
    ]


def test_a_pointer_is_there_or_not(run: Path, tmp_path: Path) -> None:
    """What an interrupted save left is not damage; a truncated pointer is."""
    (run / small_checkpoint.files_folder(12, "a" * 12) / "state").mkdir(parents=True)
    assert resume.choose("latest", run, tmp_path) == run / "checkpoints/9.json"
    assert not (run / "aside").exists()
    os.truncate(run / "checkpoints/9.json", 100)
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints/4.json"
    assert "its pointer is damaged" in said[0]


def test_find_latest(run: Path, tmp_path: Path) -> None:
    assert resume.choose("latest", tmp_path / "nothing", tmp_path) is None
    assert resume.choose("latest", None, tmp_path / "nothing") is None
    runs = tmp_path / "runs"
    for name, hour in (("2026-01-02", 9), ("2026-01-03", 4)):
        small_checkpoint.write(runs / name, hour, saved=f"2026-01-01T{hour:02}:00:00Z")
    (runs / "2026-01-04" / "checkpoints").mkdir(parents=True)
    # The time of the save counts, and not the name of the folder or the time of the file.
    assert resume.choose("latest", None, runs) == runs / "2026-01-02/checkpoints/9.json"
    shutil.copytree(runs / "2026-01-02", runs / "2026-01-05")
    assert resume.choose("latest", None, runs) == runs / "2026-01-05/checkpoints/9.json"
    ordered = [run.name for run in resume.newest_runs(tmp_path) if run.parent == runs]
    assert ordered == ["2026-01-05", "2026-01-02", "2026-01-03"]


def test_find_step_and_path(run: Path, tmp_path: Path) -> None:
    kept = run / "checkpoints"
    assert resume.choose("4", run, tmp_path) == kept / "4.json"
    assert resume.choose(str(kept / "4"), None, tmp_path) == kept / "4.json"
    assert resume.choose(str(kept / "4.json"), None, tmp_path) == kept / "4.json"
    assert resume.choose(str(run / "best/4"), None, tmp_path) == run / "best/4.json"
    assert resume.choose(str(run), tmp_path / "other", tmp_path) == kept / "9.json"
    with pytest.raises(InputError, match=r"checkpoints/ has: 4, 9; best/ has: 4; pass one"):
        resume.choose("5", run, tmp_path)
    with pytest.raises(InputError, match="requires --output-dir"):
        resume.choose("5", None, tmp_path)
    with pytest.raises(InputError, match=rf"^--resume 400: {tmp_path}/gone does not exist: pass t"):
        resume.choose("400", tmp_path / "gone", tmp_path)
    assert not (tmp_path / "gone").exists()
    with pytest.raises(InputError, match=r"nowhere: no such folder"):
        resume.choose(str(tmp_path / "nowhere"), None, tmp_path)
    with pytest.raises(InputError, match="no complete checkpoint found in"):
        resume.choose(str(tmp_path), None, tmp_path)


def test_falls_back_to_the_best_checkpoint_if_all_others_are_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_checkpoint.write(run, 4, ("best",), files=FILES)
    small_checkpoint.write(run, 9, files=FILES)
    spoil(run, 9)
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "best/4.json"
    assert said[-1] == (
        f"warning: no intact checkpoint in checkpoints/: resuming from {run}/best/4"
    )


@pytest.mark.parametrize("how", ["damaged", "was moved", "suspect"])
def test_no_fresh_start_if_no_checkpoint_is_left(run: Path, tmp_path: Path, how: str) -> None:
    if how == "damaged":
        spoil(run, 4)
        spoil(run, 9)
    else:
        category = "suspect" if how == "suspect" else "damaged"
        CheckpointStore(Folder(run)).set_aside_after(0, category, "it is wrong")
    before = files_of(run)
    for _ in range(2):  # nothing is moved, or the second attempt would start from scratch
        with pytest.raises(InputError) as caught:
            resume.choose("latest", run, tmp_path)
        assert "\n" not in str(caught.value)
        which = (
            "checkpoints/9: state/d/0 was changed" if how == "damaged" else "damaged or suspect "
        )
        assert f"--resume latest: no checkpoint of {run} is intact ({which}" in str(caught.value)
        assert "to start from scratch, choose another --output-dir" in str(caught.value)
    assert files_of(run) == before
    # Nor is an older run resumed instead.
    small_checkpoint.write(tmp_path / "runs/old", 4, saved="2026-01-01T00:00:00Z")
    run.rename(tmp_path / "runs/new")
    with pytest.raises(InputError, match=r"no checkpoint of .*/new is intact"):
        resume.choose("latest", None, tmp_path / "runs")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_checkpoints_with_temporary_read_errors_are_not_moved(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spoil(run, 9)
    before = files_of(run)
    real = Path.open
    victim = small_checkpoint.data_of(run / "checkpoints/4.json") / "state/d/0"

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == victim:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **more)

    kind = InputError if number == errno.EACCES else RunAgain
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        for flag in ("latest", "4"):
            with pytest.raises(kind, match=rf"d/0 cannot be read \({os.strerror(number)}\): "):
                run_directory.start_from("demo", flag, str(run), tmp_path)
    assert files_of(run) == before


def test_a_damaged_best_checkpoint_is_moved_even_if_not_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_checkpoint.write(run, 4, ("best",), files=FILES)
    small_checkpoint.write(run, 9, files=FILES)
    spoil(run, 4)
    assert resume.choose("latest", run, tmp_path, quiet) == run / "checkpoints/9.json"
    assert list(small_checkpoint.aside(run)) == [4]
    assert pointer.steps(run / "best") == []


def test_a_damaged_checkpoint_that_cannot_be_moved_is_skipped(run: Path, tmp_path: Path) -> None:
    spoil(run, 9)
    (run / "aside").write_text("in the way: not even root makes a folder in it")
    said: list[str] = []
    assert resume.choose("latest", run, tmp_path, said.append) == run / "checkpoints/4.json"
    assert "and skipped; it cannot be moved to aside/" in said[0]
    assert pointer.steps(run / "checkpoints") == [4, 9]


def test_a_damaged_step_or_path_is_refused_and_nothing_moves(run: Path, tmp_path: Path) -> None:
    spoil(run, 9)
    before = files_of(run)
    for wish in ("9", str(run / "checkpoints/9")):
        with pytest.raises(InputError) as caught:
            resume.choose(wish, run, tmp_path)
        message = str(caught.value)
        assert "state/d/0 was changed after it was saved" in message
        assert "checkpoints/ has: 4; best/ has: 4" in message
        assert "\n" not in message
    said: list[str] = []
    assert resume.choose(str(run), None, tmp_path, said.append) == run / "checkpoints/4.json"
    assert f"checkpoint {run}/checkpoints/9 is damaged (state/d/0" in said[0]
    assert said[1].endswith("checkpoints/4, the newest intact one")
    assert files_of(run) == before


def test_a_run_with_other_checkpoints_is_not_written_to(run: Path, tmp_path: Path) -> None:
    other = small_checkpoint.write(tmp_path / "other", 3)
    with pytest.raises(InputError, match=r"already contains checkpoints \(newest: 9\): resume"):
        resume.check_directory(run, None, None)
    with pytest.raises(InputError, match=r"and --resume 3 is another run"):
        resume.check_directory(run, "3", other)
    resume.check_directory(run, "latest", run / "checkpoints/4.json")
    best = small_checkpoint.write(tmp_path / "best", 3, ("best",))
    with pytest.raises(InputError, match=r"already contains checkpoints \(newest: 3\)"):
        resume.check_directory(pointer.run_of(best), None, None)
    resume.check_directory(tmp_path / "empty", None, None)


def test_commands_prefer_the_best_checkpoint(run: Path, tmp_path: Path) -> None:
    assert resume.trained_checkpoint(run) == run / "best/4.json"
    assert resume.trained_checkpoint(run / "checkpoints/9") == run / "checkpoints/9.json"
    spoil(run, 4)
    assert resume.trained_checkpoint(run) == run / "checkpoints/9.json"
    with pytest.raises(InputError, match="no checkpoint found in"):
        resume.trained_checkpoint(tmp_path)


def test_is_expected(run: Path, tmp_path: Path) -> None:
    root = tmp_path / "output"
    assert not resume.is_expected(None, run, root)
    assert not resume.is_expected("latest", tmp_path, root)
    assert not resume.is_expected("latest", None, root)
    assert resume.is_expected("200", tmp_path, root)
    assert resume.is_expected("latest", run, root)


def test_a_rollback_prefers_regular_checkpoints(tmp_path: Path) -> None:
    for step in (4, 8, 9, 12):
        small_checkpoint.write(tmp_path, step, files=FILES)
    saved = candidates.CheckpointCandidates(tmp_path)
    assert resume.rollback_checkpoint(saved, 9, 4) == tmp_path / "checkpoints/8.json"
    spoil(tmp_path, 8)
    spoil(tmp_path, 4)
    # All regular ones may be damaged while one saved by a stop signal is intact.
    said: list[str] = []
    saved = candidates.CheckpointCandidates(tmp_path, said.append)
    assert resume.rollback_checkpoint(saved, 9, 4) == tmp_path / "checkpoints/9.json"
    assert list(small_checkpoint.aside(tmp_path)) == [4, 8]
    assert len(said) == 2


def test_a_rollback_without_an_intact_checkpoint_moves_nothing(run: Path) -> None:
    spoil(run, 4)
    assert resume.rollback_checkpoint(candidates.CheckpointCandidates(run), 5, 4) is None
    assert pointer.steps(run / "checkpoints") == [4, 9]


class Places:
    """A run on a disk and in a bucket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.copy = RemoteRun(Bucket("s3://bucket/run", MemoryStore()), quiet)
        self.said: list[str] = []

    def save(
        self,
        step: int,
        *where: str,
        name: str = "0" * 12,
        kinds: tuple[str, ...] = ("checkpoints",),
    ) -> str:
        """Writes a checkpoint to the disk, the bucket, or both; returns its folder."""
        source = self.directory.with_name("source")
        shutil.rmtree(source, ignore_errors=True)
        files = FILES | {"state/d/0": f"{step} {name}".encode()}
        path = small_checkpoint.write(source, step, kinds, files=files, name=name)
        data = small_checkpoint.files_folder(step, name)
        if "disk" in where:
            small_checkpoint.write(self.directory, step, kinds, files=files, name=name)
        if "bucket" in where:
            small_checkpoint.copy(path, self.copy.store, kinds)
        if "disk" in where and "bucket" in where:
            remote.note(self.directory, self.copy.bucket.url, [data])
        return data

    def candidates_of(self, directory: Path) -> candidates.CheckpointCandidates:
        return candidates.CheckpointCandidates(
            directory, self.said.append, RemoteRun(self.copy.bucket, quiet)
        )

    def latest(self, resumed: str = "latest") -> str:
        """Returns the folder of the checkpoint that a resume uses, which is intact on the disk."""
        found = resume.choose(
            resumed,
            self.directory,
            self.directory,
            self.said.append,
            candidates_of=self.candidates_of,
        )
        if found is None:
            return ""
        assert pointer.verify(found) == ""
        return pointer.read(found).data


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "run")


def test_a_new_machine_takes_the_newest_in_the_bucket(places: Places) -> None:
    places.save(4, "bucket", kinds=("checkpoints", "best"))
    newest = places.save(8, "bucket")
    assert places.latest() == newest
    assert pointer.steps(places.directory / "best") == [4]  # validations are compared with it


def test_what_was_not_uploaded_yet_is_newer(places: Places) -> None:
    places.save(4, "disk", "bucket")
    newest = places.save(8, "disk")
    assert places.latest() == newest


def test_a_disk_does_not_bring_back_what_another_machine_has_abandoned(places: Places) -> None:
    """No clocks are compared: the disk has not given this checkpoint to the bucket."""
    places.save(4, "disk", "bucket")
    places.save(8, "disk")
    other = places.save(6, "bucket", name="1" * 12)  # another machine resumed from 4
    assert places.latest() == other
    assert small_checkpoint.aside(places.directory) == {8: "superseded"}


def test_damage_on_the_disk_is_repaired_from_the_bucket(places: Places) -> None:
    places.save(4, "disk", "bucket")
    newest = places.save(8, "disk", "bucket")
    spoil(places.directory, 8)
    assert places.latest() == newest
    shutil.rmtree(places.directory / newest)
    assert places.latest() == newest


def test_a_checkpoint_that_was_deleted_on_the_disk_does_not_return(places: Places) -> None:
    """A user may delete later ones to go back."""
    older = places.save(4, "disk", "bucket")
    places.save(8, "disk", "bucket")
    (places.directory / "checkpoints/8.json").unlink()
    assert places.latest() == older


def test_a_checkpoint_that_is_damaged_in_both_is_moved_in_both(places: Places) -> None:
    older = places.save(4, "disk", "bucket")
    newest = places.save(8, "disk", "bucket")
    spoil(places.directory, 8)
    places.copy.bucket.put(f"{newest}/state/d/0", b"damaged")
    assert places.latest() == older
    assert list(small_checkpoint.aside(places.directory)) == [8]
    assert list(small_checkpoint.aside(places.copy.store.place)) == [8]


def test_what_is_suspect_on_the_disk_does_not_return_from_the_bucket(places: Places) -> None:
    """A kill may come before the bucket is told."""
    older = places.save(4, "disk", "bucket")
    places.save(8, "disk", "bucket")
    places.candidates_of(places.directory)._disk.set_aside("checkpoints", 8, "suspect", "step 9")
    assert places.latest() == older


def test_an_upload_of_this_machine_is_not_that_of_another(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It completes while a rollback looks at the bucket."""
    places.save(4, "disk", "bucket")
    copy = RemoteRun(places.copy.bucket, quiet)
    steps = copy.store.steps

    def uploaded(kind: str = "checkpoints") -> list[int]:
        if kind == "checkpoints":
            places.save(8, "disk", "bucket")
        return steps(kind)

    monkeypatch.setattr(copy.store, "steps", uploaded)
    assert not candidates.CheckpointCandidates(places.directory, quiet, copy).disk_is_behind


def test_damage_is_not_repaired_with_what_was_abandoned(places: Places) -> None:
    """The run was resumed from 4, and has saved 8 again, which was not uploaded yet."""
    older = places.save(4, "disk", "bucket")
    places.save(8, "disk", "bucket")
    places.candidates_of(places.directory)._disk.set_aside("checkpoints", 8, "superseded")
    again = places.save(8, "disk", name="1" * 12)
    (places.directory / again / "state/d/0").write_bytes(b"damaged")
    assert places.latest() == older


def test_a_full_disk_does_not_lose_what_the_bucket_has(places: Places) -> None:
    """It may leave a part of a line."""
    (places.directory).mkdir()
    (places.directory / remote.IN_BUCKET).write_text("s3://bucket/run data/4-01")
    places.save(4, "disk", "bucket")
    newest = places.save(8, "disk")
    assert places.latest() == newest


def test_no_fresh_start_if_the_bucket_has_only_damaged_checkpoints(places: Places) -> None:
    newest = places.save(8, "bucket")
    places.copy.bucket.put(f"{newest}/state/d/0", b"damaged")
    with pytest.raises(InputError, match=r"no checkpoint of s3://bucket/run is intact \(check"):
        places.latest()
    assert places.copy.store.steps() == [8]


def test_a_step_is_found_in_the_bucket_too(places: Places) -> None:
    older = places.save(4, "bucket")
    places.save(8, "disk", "bucket")
    assert places.latest("4") == older
    with pytest.raises(InputError, match="has no complete checkpoint 5; checkpoints/ has: 4, 8"):
        places.latest("5")
