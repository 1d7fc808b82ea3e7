"""A real checkpoint, written, damaged, read."""

from pathlib import Path

import jax
import pytest
from examined import all_ok, only_problem, only_warning, small_disk, subject, tiny

from jaxtrain.doctor import checkpointing
from jaxtrain.doctor.finding import Finding, run_checks


def leftovers(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(".jaxtrain-doctor")]


def test_the_whole_state_is_written_read_and_removed(tmp_path: Path) -> None:
    made: list[Path] = []
    sharded = tiny("--mesh.fsdp", "8", "--mesh.shard", "params")
    output = tmp_path / "run" / "to" / "be"
    examined = subject(tmp_path, sharded, output=output, scratch=made.append)
    said = all_ok(checkpointing.written_and_read(examined))
    assert "verified, read back in" in said
    assert said.endswith("and equal: the config's whole state")
    assert [path.parent for path in made] == [tmp_path]
    assert not leftovers(tmp_path)


def test_a_part_of_a_large_state_says_how_long_all_of_it_takes(tmp_path: Path) -> None:
    examined = subject(tmp_path, tiny())  # one device wanted, eight are there: still examined
    said = all_ok(checkpointing.written_and_read(examined, largest=20_000))
    assert "19.5 KiB are enough for a trial: all of its" in said
    assert "(predicted)" in said


def test_a_byte_that_flips_between_writing_and_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the largest file, after which its length is the same."""

    def flip(folder: Path) -> None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    monkeypatch.setattr(checkpointing, "_forget", flip)
    found: list[Finding] = []
    run_checks("checkpoint", checkpointing.checks(subject(tmp_path)), found.append)
    only = only_problem(found)
    assert f"a checkpoint written at {tmp_path} fails: " in only.seen
    assert "has other bytes than were saved" in only.seen
    assert "do not save there" in only.cure
    assert not leftovers(tmp_path)


def test_arrays_that_come_back_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpointing.restore

    def changed(path: Path, target: object) -> object:
        state = real(path, target)
        name = max(state.params, key=lambda one: state.params[one].size)
        state.params[name] = state.params[name].at[0].add(1.0)
        return state

    monkeypatch.setattr(checkpointing, "restore", changed)
    found = only_problem(checkpointing.written_and_read(subject(tmp_path)))
    assert "is not what was written: params." in found.seen
    assert "do not save there" in found.cure
    assert not leftovers(tmp_path)


def test_a_disk_that_fills_up_under_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "free_bytes", lambda folder: 2**40)  # as a quota lies
    with small_disk(tmp_path / "disk", "64k") as folder:
        found: list[Finding] = []
        examined = subject(tmp_path, output=folder)
        run_checks("checkpoint", checkpointing.checks(examined), found.append)
        assert not leftovers(folder)
    only = only_problem(found)
    assert "could not be written" in only.seen
    assert only.seen.endswith("No space left on device")
    assert "free space there" in only.cure


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k", "ro") as folder:
        found: list[Finding] = []
        examined = subject(tmp_path, output=folder)
        run_checks("checkpoint", checkpointing.checks(examined), found.append)
    only = only_problem(found)
    assert "no checkpoint can be written" in only.seen
    assert "give another --output-dir" in only.seen


def test_storage_that_is_not_shared_is_not_tried(tmp_path: Path) -> None:
    found = only_warning(checkpointing.written_and_read(subject(tmp_path, shared=False)))
    assert "are not seen to share" in found.seen


def test_the_trial_cannot_be_compressed(tmp_path: Path) -> None:
    target = subject(tmp_path).built.target
    state = checkpointing._random(target)
    leaves = jax.tree.leaves(state.opt)
    assert any(leaf.size > 1000 and float(leaf.std()) > 0.1 for leaf in leaves)
