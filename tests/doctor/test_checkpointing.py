"""Doctor's test checkpoint: written, damaged, read."""

from pathlib import Path

import pytest
from doctor.examined import all_ok, only_problem, small_disk, subject, tiny
from obstore.store import MemoryStore

from jaxtrain.doctor import checkpointing
from jaxtrain.doctor.finding import Finding, run_checks
from jaxtrain.errors import RunAgain
from jaxtrain.storage.bucket import Bucket


def leftovers(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(".jaxtrain-doctor")]


def test_the_complete_state_is_written_read_and_removed(tmp_path: Path) -> None:
    made: list[Path] = []
    sharded = tiny("--mesh.fsdp", "8", "--mesh.shard", "params")
    output = tmp_path / "run" / "to" / "be"
    examined = subject(tmp_path, sharded, output=output, scratch=made.append)
    seen = all_ok(checkpointing.written_and_read(examined))
    assert "verified, read back in" in seen
    assert seen.endswith("and equal: the config's complete state")
    assert [path.parent for path in made] == [tmp_path]
    assert not leftovers(tmp_path)


def test_a_byte_that_flips_between_writing_and_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte is in the middle of the largest file, whose length stays the same."""

    def flip(folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    real = checkpointing.pointer.verify
    monkeypatch.setattr(
        checkpointing.pointer,
        "verify",
        lambda path: flip(checkpointing.pointer.folder_of(path)) or real(path),
    )
    found: list[Finding] = []
    run_checks("checkpoint", checkpointing.checks(subject(tmp_path)), found.append)
    only = only_problem(found)
    assert f"a checkpoint written at {tmp_path} is damaged: " in only.seen
    assert "was changed after it was saved" in only.seen
    assert "do not save there" in only.cure
    assert not leftovers(tmp_path)


def test_arrays_that_differ_after_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpointing.restore

    def changed(path: Path, target: object) -> object:
        state = real(path, target)
        name = max(state.params, key=lambda one: state.params[one].size)
        state.params[name] = state.params[name].at[0].add(1.0)
        return state

    monkeypatch.setattr(checkpointing, "restore", changed)
    found = only_problem(checkpointing.written_and_read(subject(tmp_path)))
    assert "differs from what was written: params." in found.seen
    assert "do not save there" in found.cure
    assert not leftovers(tmp_path)


def test_a_disk_that_fills_up_during_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with a quota, which statvfs does not show.
    monkeypatch.setattr(checkpointing, "free_bytes", lambda folder: 2**40)
    with small_disk(tmp_path / "disk", "64k") as folder:
        found: list[Finding] = []
        examined = subject(tmp_path, output=folder)
        run_checks("checkpoint", checkpointing.checks(examined), found.append)
        assert not leftovers(folder)
    only = only_problem(found)
    assert "could not be written" in only.seen
    assert only.seen.endswith("No space left on device")
    assert "free space there" in only.cure


def test_the_object_is_deleted_even_if_a_later_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Bucket("gs://bucket/run", MemoryStore())
    monkeypatch.setattr(checkpointing, "Bucket", lambda url: folder)
    assert [one.level for one in checkpointing.bucket_access("gs://bucket/run")] == ["ok"]

    def fail(*_: object) -> None:
        raise RunAgain("gs://bucket/run: cannot write")

    put_if = folder.put_if
    answers = iter([put_if, fail])
    monkeypatch.setattr(folder, "put_if", lambda *more: next(answers)(*more))
    with pytest.raises(RunAgain, match="cannot write"):
        list(checkpointing.bucket_access("gs://bucket/run"))
    assert folder.sizes() == {}
