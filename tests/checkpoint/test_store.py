"""The rules of a run's checkpoints, which are the same in a folder and in a bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore

from jaxtrain.checkpoint.pointer import Damaged
from jaxtrain.checkpoint.store import (
    BucketFolder,
    CheckpointStore,
    Folder,
    Place,
    mark_copy,
    most_kept,
)
from jaxtrain.storage import run_marker
from jaxtrain.storage.bucket import Bucket


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        yield Folder(tmp_path / "run")
    else:
        yield BucketFolder(Bucket("s3://bucket/run", MemoryStore()))


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(place: Place, messages: list[str]) -> CheckpointStore:
    return CheckpointStore(place, messages.append)


def save(
    store: CheckpointStore, tmp_path: Path, step: int, *kinds: str, name: str = "0" * 12
) -> str:
    """Commits a checkpoint whose files are in the place; returns their folder."""
    path = small_checkpoint.write(tmp_path / "source", step, name=name)
    small_checkpoint.copy(path, store, kinds or ("checkpoints",))
    return small_checkpoint.files_folder(step, name)


def test_a_committed_checkpoint_is_there(store: CheckpointStore, tmp_path: Path) -> None:
    data = save(store, tmp_path, 4, "checkpoints", "best")
    assert store.steps() == store.steps("best") == [4]
    assert store.data_folder("checkpoints", 4) == store.data_folder("best", 4) == data
    found, content = store.read("checkpoints/4.json")
    assert (found.step, found.to_json()) == (4, content)
    with pytest.raises(Damaged, match="there is no such checkpoint"):
        store.read("checkpoints/5.json")


def test_later_steps_are_superseded(
    store: CheckpointStore, tmp_path: Path, messages: list[str]
) -> None:
    save(store, tmp_path, 4)
    save(store, tmp_path, 8, "checkpoints", "best")
    save(store, tmp_path, 6)
    assert store.steps() == [4, 6]
    assert store.steps("best") == [8]  # only where this one is
    assert small_checkpoint.aside(store.place) == {8: "superseded"}
    save(store, tmp_path, 7, "best")
    assert store.steps() == [4, 6]
    assert small_checkpoint.aside(store.place) == {8: "superseded"}
    assert len(messages) == 2
    assert f"{store.place.location}/checkpoints/8 is superseded: moved to" in messages[0]


def test_a_step_that_is_saved_again_replaces_its_pointer(
    store: CheckpointStore, tmp_path: Path
) -> None:
    old = save(store, tmp_path, 4)
    new = save(store, tmp_path, 4, name="1" * 12)
    assert store.data_folder("checkpoints", 4) == new
    assert store.folders() == sorted((old, new))
    store.collect()
    assert store.folders() == [new]


def test_a_checkpoint_that_is_gone_is_not_moved(
    store: CheckpointStore, messages: list[str]
) -> None:
    store.set_aside("checkpoints", 4, "damaged", "a byte is wrong")
    assert not messages
    assert small_checkpoint.aside(store.place) == {}


def test_the_reason_goes_with_what_is_moved(
    store: CheckpointStore, tmp_path: Path, messages: list[str]
) -> None:
    data = save(store, tmp_path, 4)
    store.set_aside("checkpoints", 4, "damaged", "a byte is wrong")
    assert store.steps() == []
    assert small_checkpoint.aside(store.place) == {4: "damaged: a byte is wrong"}
    assert messages[0].startswith("warning: checkpoint ")
    assert "/checkpoints/4 is damaged (a byte is wrong): moved to " in messages[0]
    store.collect()
    assert store.folders() == [data]  # it may be inspected
    save(store, tmp_path, 4, name="1" * 12)
    store.set_aside("checkpoints", 4, "damaged", "another one")
    other = small_checkpoint.files_folder(4, "1" * 12)
    reasons = {
        store.folder_of(f"aside/{name}.json"): store.why_aside(name) for name in store.asides()
    }
    assert reasons == {data: "damaged: a byte is wrong", other: "damaged: another one"}
    assert set(store.prune()) == {folder.rpartition("/")[2] for folder in (data, other)}
    store.collect()
    assert store.folders() == []


def test_all_after_a_step_are_suspect(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(store, tmp_path, step, "checkpoints", "best")
    store.set_aside_after(3, "suspect", "step 7 was wrong")
    assert (store.steps(), store.steps("best")) == ([2], [2])
    why = "suspect: step 7 was wrong"
    assert small_checkpoint.aside(store.place) == {4: why, 6: why}


def test_the_newest_and_the_newest_at_the_cadence_stay(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """Checkpoints saved by stop signals must not displace it, as a rollback needs it."""
    left = []
    for step in (10, 20, 23, 24, 27, 30, 31):
        save(store, tmp_path, step, "checkpoints", "best")
        store.retain(2, 10)
        left.append(store.steps())
        assert store.steps("best") == [step]
        assert len(left[-1]) <= most_kept(2, replays=False)
    assert left == [[10], [10, 20], [20, 23], [20, 23, 24], [20, 24, 27], [27, 30], [30, 31]]


def test_the_newest_whose_replay_was_equal_stays(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(store, tmp_path, step)
        store.retain(1, 10, last_equal=25)
    assert store.steps() == [20, 40]
    store.retain(1, 10, last_equal=50)
    assert store.steps() == [40]


def test_milestones_stay(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (10, 20, 25, 30, 40, 50):
        save(store, tmp_path, step)
        store.retain(1, 10, milestones=20)
    assert store.steps() == [20, 40, 50]
    store.retain(1, 10)
    assert store.steps() == [50], "kept as long as the run asks for it"


def test_only_files_that_nothing_points_to_are_deleted(
    store: CheckpointStore, tmp_path: Path
) -> None:
    kept = save(store, tmp_path, 4)
    lost, writing = save(store, tmp_path, 6), save(store, tmp_path, 8)
    for step in (6, 8):
        store.place.delete(f"checkpoints/{step}.json")
    of_user = (
        *("checkpoints/files/mine/notes.txt", "checkpoints/files/2024-01-15/a.mp4"),
        *("checkpoints/files/7-0123456789abcdef/a", "data/7-0123456789ab/a", "aside/notes.txt"),
    )
    for name in of_user:
        store.place.put(name, b"mine")
    fresh = CheckpointStore(store.place)
    fresh.collect(keep=[writing])
    assert store.folders() == [kept, writing]
    fresh.collect()
    fresh.prune()
    assert store.folders() == [kept]
    assert {store.place.get(name) for name in of_user} == {b"mine"}
    assert store.place.get(f"{lost}/state/_METADATA") is None


def test_a_copy_of_another_run_is_replaced(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    mark_copy(copy, small_checkpoint.marker().decode())
    for name in ("metrics.jsonl", "checkpoints/4.json", "log.1.txt"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("old")
    mark_copy(copy, small_checkpoint.marker().decode())
    assert (copy / "metrics.jsonl").exists()
    mark_copy(copy, run_marker.new())
    # The log is of a launcher, which has opened it before.
    assert {path.name for path in copy.iterdir()} == {"log.1.txt", run_marker.NAME}


def test_files_of_a_damaged_pointer_are_not_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    data = save(store, tmp_path, 4)
    store.place.put("checkpoints/4.json", b"{")
    CheckpointStore(store.place).collect()
    assert store.folders() == [data]
