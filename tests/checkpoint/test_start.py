"""Where a run starts: the table of start.py, with a kill at every moment, in both places."""

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore

from jaxtrain.checkpoint import own_files, pointer, resume, start
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.start import Flags, Intent
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place, mark_copy
from jaxtrain.errors import InputError
from jaxtrain.storage.bucket import Bucket

# What a run does, in this order. It is killed before it does the next thing.
MOMENTS = (
    *("rendezvous", "verifying", "opening data", "restore", "compilation", "first step"),
    *("writing the first save", "first save"),
)


class Killed(BaseException):
    """A SIGKILL."""


class Run:
    """A run without training, on a disk or in a bucket; each start has a new process."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.directory = folder, folder / "run"
        self.bucket = Bucket("s3://bucket/run", MemoryStore()) if where == "bucket" else None
        self.said: list[str] = []
        self.place.put("jaxtrain-run.json", small_checkpoint.marker())
        mark_copy(self.directory, small_checkpoint.marker().decode())
        self.names = (f"{number:012x}" for number in itertools.count())

    @property
    def place(self) -> Place:
        return Folder(self.directory) if self.bucket is None else self.remote().store.place

    def remote(self) -> RemoteRun:
        assert self.bucket is not None
        return RemoteRun(self.bucket, self.said.append)

    def save(self, step: int, start_id: str, *, pointer_too: bool = True) -> None:
        """Writes the files of a checkpoint, and its pointer."""
        shutil.rmtree(self.folder / "source", ignore_errors=True)
        path = small_checkpoint.write(
            self.folder / "source", step, meta={"start": start_id}, name=next(self.names)
        )
        if pointer_too:
            small_checkpoint.copy(path, CheckpointStore(self.place))
        else:
            for file in small_checkpoint.data_of(path).rglob("_METADATA"):
                name = file.relative_to(self.folder / "source").as_posix()
                self.place.put(name, file.read_bytes())

    def start(self, resume: str | None = None, moment: str = "", **flags: Any) -> str:
        """Starts the run, which saves two steps later; returns from what it started.

        Args:
            moment: the kill comes there; "" for a run that is stopped after its save.
        """
        self.said.clear()
        if moment == "rendezvous":
            raise Killed
        remote = None if self.bucket is None else self.remote()
        checkpoints = CheckpointCandidates(self.directory, self.said.append, remote)
        if moment == "verifying":
            checkpoints.ensure_intact = _kill  # type: ignore[method-assign]
        begun = start.open_start(
            Flags(resume, **flags), self.place, checkpoints, self.folder, self.said.append
        )
        what = begun.intent.typed if begun.path is None else begun.display_path
        if moment in ("verifying", "opening data", "restore", "compilation"):
            raise Killed
        step = 0
        store = CheckpointStore(self.place)
        if begun.path is not None and start.is_in(self.directory, begun.path):
            step = pointer.step_in(begun.path.name)
            store.go_back_to(begun.path.relative_to(self.directory).as_posix())
        store.collect()
        if moment == "first step":
            raise Killed
        if moment == "writing the first save":
            self.save(step + 2, begun.intent.id, pointer_too=False)
            raise Killed
        self.save(step + 2, begun.intent.id)
        if moment:
            raise Killed
        return what or "scratch"


def _kill(*_: object) -> str:
    raise Killed


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return Run(tmp_path, request.param)


@pytest.fixture
def other(tmp_path: Path) -> str:
    """The checkpoint of another run."""
    return str(small_checkpoint.write(tmp_path / "other", 40).with_suffix(""))


def killed(run: Run, moment: str, resume: str | None, **flags: Any) -> bool:
    """Starts a run and kills it; returns whether it had saved a checkpoint."""
    with pytest.raises(Killed):
        run.start(resume, moment, **flags)
    return moment == "first save"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("again", [{"again": True}, {"resume": "latest"}, {"launch": "job 1"}])
def test_a_new_run_starts_again_or_continues(run: Run, moment: str, again: dict[str, Any]) -> None:
    saved = killed(run, moment, None, launch="job 1")
    expected = f"{run.place.location}/checkpoints/2" if saved else "scratch"
    assert run.start(**again) == expected
    assert run.start(again=True) == f"{run.place.location}/checkpoints/{4 if saved else 2}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_weights_of_a_new_run_are_kept(run: Run, moment: str) -> None:
    saved = killed(run, moment, None, init_from="/weights")
    began = moment != "rendezvous"  # after nothing is recorded, the launcher repeats the flag
    repeated = {} if began else {"init_from": "/weights"}
    expected = f"{run.place.location}/checkpoints/2" if saved else "/weights"
    if began and not saved:
        with pytest.raises(InputError, match=r"with model.init_from=/weights, and has not "):
            run.start("latest", init_from="/others")
    assert run.start(again=True, **repeated) == expected


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["latest", "path", "again"])
def test_another_runs_checkpoint_is_what_the_run_starts_from(
    run: Run, other: str, moment: str, how: str
) -> None:
    """The defect: it started from random weights if it was killed before its data were open."""
    saved = killed(run, moment, other)
    expected = f"{run.place.location}/checkpoints/2" if saved else other
    began = moment != "rendezvous"
    flags: dict[str, Any] = {"latest": {"resume": "latest"}, "path": {"resume": other}}.get(how, {})
    if how == "again":
        flags = {"resume": other, "again": True}
    if not began and how == "latest":
        expected = "scratch"  # nothing has started yet
    assert run.start(**flags) == expected
    if saved and how == "path":
        assert f"--resume {other}: {run.place.location} continues with its own" in run.said[0]


@pytest.mark.parametrize("moment", MOMENTS[1:-1])
def test_another_path_or_no_flag_is_refused_until_the_first_save(
    run: Run, other: str, tmp_path: Path, moment: str
) -> None:
    third = str(small_checkpoint.write(tmp_path / "third", 7).with_suffix(""))
    killed(run, moment, other)
    for flags in ({"resume": third}, {}, {"resume": "40"}):
        with pytest.raises(InputError) as refused:
            run.start(**flags)
        assert "\n" not in str(refused.value)
    assert run.start("latest") == other  # a refusal has not changed what is recorded


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["latest", "step", "again", "launch"])
def test_a_step_is_what_the_run_goes_back_to(run: Run, moment: str, how: str) -> None:
    """The defect: a launcher's restart continued from the step that was to be abandoned."""
    for _ in range(3):
        run.start(again=True)
    assert CheckpointStore(run.place).steps() == [2, 4, 6]
    flags: dict[str, Any] = {
        "latest": {"resume": "latest"},
        "step": {"resume": "2"},
        "again": {"resume": "2", "again": True},
        "launch": {"resume": "2", "launch": "job 1"},
    }[how]
    saved = killed(run, moment, "2", **({"launch": "job 1"} if how == "launch" else {}))
    began = moment != "rendezvous"
    step = 4 if saved and how != "step" else 2
    if not began and how in ("latest", "again"):
        step = 6  # nothing is recorded of that start
    assert run.start(**flags) == f"{run.place.location}/checkpoints/{step}"
    if saved and how == "step":
        assert "--resume 2: going back to step 2 again" in run.said
    assert run.start(again=True) == f"{run.place.location}/checkpoints/{step + 2}"


@pytest.mark.parametrize("end", ["", ".json"])
def test_the_path_or_url_of_its_own_checkpoint_is_a_step(run: Run, end: str) -> None:
    for _ in range(2):
        run.start(again=True)
    own = f"{run.place.location}/checkpoints/2"
    assert run.start(f"{own}{end}") == own
    recorded = Intent.read(run.place)
    assert recorded is not None
    assert (recorded.kind, recorded.typed) == ("step", "2")


def test_without_a_flag_a_run_with_checkpoints_is_refused(run: Run) -> None:
    run.start()
    with pytest.raises(InputError, match=r"contains checkpoints \(newest: 2\): resume with"):
        run.start()
    run.place.delete(own_files.START)  # copied without it
    with pytest.raises(InputError, match="already contains checkpoints"):
        run.start()
    assert run.start(again=True) == f"{run.place.location}/checkpoints/2"


def test_the_same_command_of_a_new_run_may_be_repeated(run: Run) -> None:
    """Its first start may have ended because of the data."""
    killed(run, "opening data", None)
    assert run.start() == "scratch"


def test_a_launch_is_known_only_to_itself(run: Run) -> None:
    run.start(launch="job 1")
    run.start("latest")
    killed(run, "compilation", "2", launch="job 2")
    assert run.start("2", launch="job 2") == f"{run.place.location}/checkpoints/2"
    assert run.start("2", launch="job 2") == f"{run.place.location}/checkpoints/4"  # requeued
    assert run.start("2", launch="job 3") == f"{run.place.location}/checkpoints/2"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_launchers_first_start_counts_once_it_is_recorded(run: Run, moment: str) -> None:
    """The defect: after a rendezvous that failed, --again meant the newest, not --resume STEP."""
    for number in range(3):
        run.start(again=True, launch=f"job {number}")
    saved = killed(run, moment, "2", launch="job 9")
    expected = 4 if saved else 2
    assert (
        run.start("2", again=True, launch="job 9") == f"{run.place.location}/checkpoints/{expected}"
    )


def test_an_intent_stays_spent_if_what_was_saved_since_is_damaged(tmp_path: Path) -> None:
    """The defect: after a kill, it meant the step again, which keep had deleted."""
    run = Run(tmp_path, "disk")
    for _ in range(2):
        run.start(again=True)
    store = CheckpointStore(run.place)
    store.commit(("best",), 2, store.read("checkpoints/2.json")[1])
    run.start("4")
    for step in (2, 4):
        store.delete("checkpoints", step)
    small_checkpoint.damage(run.directory / "checkpoints/6.json")
    killed(run, "restore", "latest")
    assert run.start("latest") == f"{run.directory}/best/2"


def test_a_step_that_does_not_exist_changes_nothing(run: Run) -> None:
    run.start()
    before = run.place.get(own_files.START)
    with pytest.raises(InputError, match=r"--resume 7: .* has no complete checkpoint 7"):
        run.start("7")
    assert run.place.get(own_files.START) == before
    assert run.start("latest") == f"{run.place.location}/checkpoints/2"


def test_a_step_whose_start_is_refused_changes_nothing(run: Run) -> None:
    """The defect: after --resume 2 with another --seed, --resume latest went back to 2, too."""
    for _ in range(2):
        run.start(again=True)
    before = run.place.get(own_files.START)
    checkpoints = CheckpointCandidates(
        run.directory, bucket_run=None if run.bucket is None else run.remote()
    )
    begun = start.open_start(Flags("2"), run.place, checkpoints, run.folder, run.said.append)
    begun.refused(run.place)
    assert run.place.get(own_files.START) == before
    assert run.start("latest") == f"{run.place.location}/checkpoints/4"


def test_a_rollback_is_not_undone_by_a_kill_before_the_next_save(run: Run) -> None:
    for _ in range(3):
        run.start(again=True)
    killed(run, "first step", "4")
    remote = None if run.bucket is None else run.remote()
    saved = CheckpointCandidates(run.directory, run.said.append, remote)
    path, _ = saved.intact(2)
    assert path is not None
    start.follow_rollback(run.place, path)
    saved.set_aside_after(2)
    assert run.start(again=True) == f"{run.place.location}/checkpoints/2"
    (path, _) = saved.intact(2)
    assert path is not None
    start.follow_rollback(run.place, path)  # the intent is spent: the newest one counts
    assert run.start(again=True) == f"{run.place.location}/checkpoints/4"


def test_a_checkpoint_that_was_moved_aside_is_brought_back(tmp_path: Path) -> None:
    run = Run(tmp_path, "disk")
    for _ in range(3):
        run.start(again=True)
    (_, content) = CheckpointStore(run.place).read("checkpoints/6.json")
    run.start("2")  # 4 and 6 are abandoned, and 4 is saved again
    (aside,) = (tmp_path / "run/aside").glob("6-*.json")
    killed(run, "compilation", str(aside))
    assert run.start(again=True) == str(aside.with_suffix(""))
    assert CheckpointStore(run.place).read("checkpoints/6.json")[1] == content
    assert run.start(again=True) == f"{run.place.location}/checkpoints/8"


def test_what_takes_its_place_is_moved_aside(tmp_path: Path) -> None:
    """The defect: the one of the same step was deleted, and a later best one stayed."""
    run = Run(tmp_path, "disk")
    for _ in range(2):
        run.start(again=True)
    run.start("2")  # 4 is abandoned, and saved again
    store = CheckpointStore(run.place)
    (aside,) = (run.directory / "aside").glob("4-*.json")
    again = store.data_folder("checkpoints", 4)
    run.start("latest")
    store.commit(("best",), 6, store.read("checkpoints/6.json")[1])
    run.start(str(aside))
    assert (store.steps(), store.steps("best")) == ([2, 4, 6], [])
    assert again.rpartition("/")[2] in store.asides()
    assert not CheckpointStore(run.place).unused()


def test_a_kill_while_a_resume_goes_back_leaves_no_later_best_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        run.start(again=True)
    store = CheckpointStore(run.place)
    store.commit(("best",), 6, store.read("checkpoints/6.json")[1])
    move, moved = CheckpointStore.set_aside, list[int]()

    def move_two(self: CheckpointStore, kind: str, step: int, *why: str) -> str:
        if len(moved) == 2:
            raise Killed
        moved.append(step)
        return move(self, kind, step, *why)

    monkeypatch.setattr(CheckpointStore, "set_aside", move_two)
    killed(run, "first step", "2")
    monkeypatch.undo()
    killed(run, "first step", "latest")
    assert (store.steps(), store.steps("best")) == ([2], [])


def test_what_the_run_was_started_from_may_not_change(run: Run, other: str) -> None:
    killed(run, "compilation", other)
    small_checkpoint.write(Path(other).parent.parent, 40, name="f" * 12)
    with pytest.raises(InputError, match=r"started from .*, which is another checkpoint now"):
        run.start(again=True)
    shutil.rmtree(Path(other).parent.parent)
    with pytest.raises(InputError, match=r"this run was started from .*: no such folder"):
        run.start(again=True)


def test_another_spelling_of_a_path_is_the_same(run: Run, other: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    killed(run, "compilation", other)
    for path in (
        "other/../other/checkpoints/40",
        "link/checkpoints/40",
        "link/checkpoints/40.json",
    ):
        killed(run, "compilation", str(tmp_path / path))
    assert run.start(again=True) == other


def test_a_bad_step_is_not_resumed(tmp_path: Path) -> None:
    run = Run(tmp_path, "disk")
    run.start()
    path = small_checkpoint.write(tmp_path / "source", 3, meta={"bad_step": "step 4 is bad"})
    store = CheckpointStore(run.place)
    store.commit((pointer.BAD_STEP,), 3, path.read_bytes())
    (name,) = store.asides()
    with pytest.raises(InputError, match=rf"\(aside/{name} is a bad step, for find-nan"):
        run.start(f"{run.place.location}/aside/{name}")
    assert run.start("latest") == f"{run.place.location}/checkpoints/2"


def test_a_run_that_is_live_gives_the_checkpoint_that_was_chosen(run: Run, tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "other", 40)
    killed(run, "compilation", str(tmp_path / "other"))
    small_checkpoint.write(tmp_path / "other", 50, name="f" * 12)
    assert run.start(again=True) == str(tmp_path / "other/checkpoints/40")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "new"}'])
def test_a_damaged_record_is_an_error_that_names_it(run: Run, content: str) -> None:
    run.start()
    run.place.put(own_files.START, content.encode())
    with pytest.raises(InputError, match=r"run/start.json is damaged, so it is unknown what"):
        run.start("latest")


def test_weights_have_a_digest(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    for name, size in (("a.safetensors", 10), ("b.safetensors", 300_000)):
        (tmp_path / "w" / name).write_bytes(random.Random(1).randbytes(size))
    digest = resume.digest_of_weights(tmp_path / "w")
    assert resume.digest_of_weights(tmp_path / "w") == digest
    with (tmp_path / "w/b.safetensors").open("rb+") as file:
        file.seek(-1, 2)
        file.write(b"\xff\x00"[:1])
    assert resume.digest_of_weights(tmp_path / "w") != digest
    path = small_checkpoint.write(tmp_path / "run", 4)
    assert resume.digest_of_weights(tmp_path / "run") == resume.digest_of_weights(path)


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    place, intent = Folder(tmp_path / "run"), Intent("step", "4", "checkpoints/files/4-0", "ab")
    assert Intent.read(place) is None
    intent.write(place)
    assert Intent.read(place) == intent
    assert json.loads((tmp_path / "run/start.json").read_text())["typed"] == "4"
