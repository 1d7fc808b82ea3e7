"""Tests which checkpoint a resume uses: damage is detected, and intact checkpoints are found."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore

from jaxtrain.checkpoint import candidates, pointer, resume
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Bucket
from jaxtrain.training import preflight

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
        if one.is_file() and one.name not in (".lock", "start.json")
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
    assert small_checkpoint.choose("latest", run, said.append) == run / "checkpoints/4.json"
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
    assert small_checkpoint.choose("latest", run) == run / "checkpoints/9.json"
    assert not (run / "aside").exists()
    os.truncate(run / "checkpoints/9.json", 100)
    said: list[str] = []
    assert small_checkpoint.choose("latest", run, said.append) == run / "checkpoints/4.json"
    assert "its pointer is damaged" in said[0]


def test_find_latest(run: Path, tmp_path: Path) -> None:
    assert small_checkpoint.choose("latest", tmp_path / "nothing") is None
    assert resume.newest_run(tmp_path / "nowhere") is None
    runs = tmp_path / "runs"
    for name, hour in (("2026-01-02", 9), ("2026-01-03", 4)):
        small_checkpoint.write(runs / name, hour, saved=f"2026-01-01T{hour:02}:00:00Z")
    (runs / "2026-01-04" / "checkpoints").mkdir(parents=True)
    # The time of the save counts, and not the name of the folder or the time of the file.
    assert resume.newest_run(runs) == runs / "2026-01-02"
    shutil.copytree(runs / "2026-01-02", runs / "2026-01-05")
    assert resume.newest_run(runs) == runs / "2026-01-05"
    ordered = [run.name for run in resume.newest_runs(tmp_path) if run.parent == runs]
    assert ordered == ["2026-01-05", "2026-01-02", "2026-01-03"]


def test_find_step_and_path(run: Path, tmp_path: Path) -> None:
    kept = run / "checkpoints"
    assert small_checkpoint.choose("4", run) == kept / "4.json"
    names = {"checkpoints/4": "4", "checkpoints/4.json": "4", "best/4": "4", ".": "9"}
    for number, (name, step) in enumerate(names.items()):  # by another run
        path = small_checkpoint.choose(str(run / name), tmp_path / f"other{number}")
        assert path == (run / name if name == "best/4" else kept / step).with_suffix(".json")
    with pytest.raises(InputError, match=r"checkpoints/ has: 4, 9; best/ has: 4; pass one"):
        small_checkpoint.choose("5", run)
    assert list(preflight._resume("5", None)) == [
        "--resume 5 requires --output-dir, the run that saved it"
    ]
    (gone,) = preflight._resume("400", tmp_path / "gone")
    assert gone.startswith(f"--resume 400: {tmp_path}/gone does not exist: pass t")
    assert not (tmp_path / "gone").exists()
    for name, why in (("nowhere", "no such folder"), (".", "no complete checkpoint found in")):
        with pytest.raises(InputError, match=why):
            small_checkpoint.choose(str(tmp_path / name), tmp_path / "new")


def test_falls_back_to_the_best_checkpoint_if_all_others_are_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_checkpoint.write(run, 4, ("best",), files=FILES)
    small_checkpoint.write(run, 9, files=FILES)
    spoil(run, 9)
    said: list[str] = []
    assert small_checkpoint.choose("latest", run, said.append) == run / "best/4.json"
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
            small_checkpoint.choose("latest", run)
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
    assert resume.newest_run(tmp_path / "runs") == tmp_path / "runs/new"


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
                small_checkpoint.choose(flag, run)
    assert files_of(run) == before


def test_a_damaged_best_checkpoint_is_moved_even_if_not_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_checkpoint.write(run, 4, ("best",), files=FILES)
    small_checkpoint.write(run, 9, files=FILES)
    spoil(run, 4)
    assert small_checkpoint.choose("latest", run, quiet) == run / "checkpoints/9.json"
    assert list(small_checkpoint.aside(run)) == [4]
    assert pointer.steps(run / "best") == []


def test_a_damaged_checkpoint_that_cannot_be_moved_is_skipped(run: Path, tmp_path: Path) -> None:
    spoil(run, 9)
    (run / "aside").write_text("in the way: not even root makes a folder in it")
    said: list[str] = []
    assert small_checkpoint.choose("latest", run, said.append) == run / "checkpoints/4.json"
    assert "and skipped; it cannot be moved to aside/" in said[0]
    assert pointer.steps(run / "checkpoints") == [4, 9]


def test_a_damaged_step_or_path_is_refused_and_nothing_moves(run: Path, tmp_path: Path) -> None:
    spoil(run, 9)
    before = files_of(run)
    for wish, where in (("9", run), (str(run / "checkpoints/9"), tmp_path / "other")):
        with pytest.raises(InputError) as caught:
            small_checkpoint.choose(wish, where)
        message = str(caught.value)
        assert "state/d/0 was changed after it was saved" in message
        assert "checkpoints/ has: 4; best/ has: 4" in message
        assert "\n" not in message
    said: list[str] = []
    newest = small_checkpoint.choose(str(run), tmp_path / "other", said.append)
    assert newest == run / "checkpoints/4.json"
    assert f"checkpoint {run}/checkpoints/9 is damaged (state/d/0" in said[0]
    assert said[1].endswith("checkpoints/4, the newest intact one")
    assert files_of(run) == before


def test_a_run_with_checkpoints_needs_a_resume(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"already contains checkpoints \(newest: 9\): resume"):
        small_checkpoint.choose(None, run)
    best = small_checkpoint.write(tmp_path / "best", 3, ("best",))
    with pytest.raises(InputError, match=r"already contains checkpoints \(newest: 3\)"):
        small_checkpoint.choose(None, pointer.run_of(best))
    assert small_checkpoint.choose(None, tmp_path / "empty") is None


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
    of_another_config = tmp_path / "output" / "another"
    shutil.copytree(run, of_another_config / "0")
    assert not resume.is_expected("latest", None, tmp_path / "output" / "this")
    assert resume.is_expected("latest", None, of_another_config)


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
        return data

    def candidates(self) -> candidates.CheckpointCandidates:
        return candidates.CheckpointCandidates(
            self.directory, self.said.append, RemoteRun(self.copy.bucket, self.said.append)
        )

    def latest(self, resumed: str = "latest") -> str:
        """Returns the folder of the checkpoint that a resume uses, which is intact in the cache."""
        found = small_checkpoint.choose(
            resumed,
            self.directory,
            self.said.append,
            place=self.copy.store.place,
            checkpoints=self.candidates(),
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
    assert pointer.steps(places.directory / "best") == []  # only what is needed is fetched


def test_what_the_bucket_does_not_have_does_not_count(places: Places) -> None:
    """A start on another machine must give the same result."""
    newest = places.save(4, "disk", "bucket")
    places.save(8, "disk")
    assert places.latest() == newest
    with pytest.raises(InputError, match=r"s3://bucket/run has no complete checkpoint 8"):
        places.latest("8")


def test_intact_files_in_the_cache_are_not_fetched_again(places: Places) -> None:
    data = places.save(4, "disk", "bucket")
    assert places.latest() == data
    assert not places.said
    spoil(places.directory, 4)
    assert places.latest() == data
    (line,) = places.said
    assert line.startswith("fetching checkpoints/4 from s3://bucket/run (")


def test_another_checkpoint_of_the_same_step_is_not_taken_from_the_cache(places: Places) -> None:
    places.save(8, "disk")
    other = places.save(8, "bucket", name="1" * 12)  # another machine went back, and came here
    assert places.latest() == other


def test_a_checkpoint_that_is_damaged_in_the_bucket_is_moved_there(places: Places) -> None:
    older = places.save(4, "bucket")
    newest = places.save(8, "bucket")
    places.copy.bucket.put(f"{newest}/state/d/0", b"damaged")
    assert places.latest() == older
    assert list(small_checkpoint.aside(places.copy.store.place)) == [8]
    assert any("resuming from s3://bucket/run/checkpoints/4" in line for line in places.said)


def test_the_best_checkpoint_is_complete_if_the_bucket_has_its_files(places: Places) -> None:
    best = places.save(4, "bucket", kinds=("best",))
    copy = RemoteRun(places.copy.bucket, quiet)
    assert copy.is_complete("best", 4)
    assert not copy.is_complete("best", 8)
    places.copy.bucket.delete([f"{best}/tokenizer.json"])
    assert not copy.is_complete("best", 4)


def test_no_fresh_start_if_the_bucket_has_only_damaged_checkpoints(places: Places) -> None:
    newest = places.save(8, "bucket")
    places.copy.bucket.put(f"{newest}/state/d/0", b"damaged")
    with pytest.raises(InputError, match=r"no checkpoint of s3://bucket/run is intact \(check"):
        places.latest()
    assert places.copy.store.steps() == [8]


def test_a_step_is_found_in_the_bucket_too(places: Places) -> None:
    older = places.save(4, "bucket")
    places.save(8, "bucket")
    assert places.latest("4") == older
    with pytest.raises(InputError, match="has no complete checkpoint 5; checkpoints/ has: 4, 8"):
        places.latest("5")
