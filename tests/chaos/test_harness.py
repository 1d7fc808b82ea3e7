"""The harness: its plans and its observations, and whether it detects failures."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from chaos import verdict as verdicts
from chaos.damage import DAMAGES, damage
from chaos.faults import KINDS, RESTARTING, STARTING, Fault, plan
from chaos.launched import Launched
from chaos.striking import Stored, Striker
from chaos.watch import Watch
from checkpoint import small_checkpoint
from program import wait_for
from storage.bucket_server import Server

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.store import CheckpointStore, Folder

STEPS = 4


def write_records(directory: Path, losses: dict[int, float], ids: dict[int, list[int]]) -> None:
    directory.mkdir(exist_ok=True)
    lines = [
        json.dumps({"step": step, "time": 1.0, "train/loss": loss, "train/steps_per_second": loss})
        for step, loss in losses.items()
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    lines = [json.dumps({"step": step, "position": 0, "ids": row}) for step, row in ids.items()]
    (directory / "examples.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_checkpoint(run: Path, step: int) -> Path:
    """Writes a checkpoint with a few files."""
    names = ("state/d/0", "tokenizer.json", "state/_METADATA")
    files = {name: random.Random(name).randbytes(200) for name in names}
    return small_checkpoint.write(run, step, files=files)


LOSSES = {step: 1.0 / step for step in range(1, STEPS + 1)}
IDS = {step: [2 * step, 2 * step + 1] for step in range(1, STEPS + 1)}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Writes two run directories with the same records."""
    for name in ("undisturbed", "run"):
        write_records(tmp_path / name, LOSSES, IDS)
    return tmp_path / "undisturbed", tmp_path / "run"


def test_equal_records_pass_despite_different_times(runs: tuple[Path, Path]) -> None:
    metrics = runs[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"time": 1.0', '"time": 2.0'))
    verdict = verdicts.compare(*runs)
    assert not verdict.problems
    assert (verdict.lost, verdict.repeated) == (0, 0)


@pytest.mark.parametrize(
    ("losses", "ids", "problem", "lost", "repeated"),
    [
        ({**LOSSES, 3: 1 / 3 + 1e-15}, IDS, "train/loss of step 3", 0, 0),
        ({1: 1.0, 2: 0.5, 4: 0.25}, IDS, "has no train/loss of 1 steps", 0, 0),
        ({**LOSSES, 5: 0.2}, IDS, "unexpected", 0, 0),
        ({1: 1.0, 3: 1 / 3, 2: 0.5, 4: 0.25}, IDS, "follows step", 0, 0),
        (LOSSES, {**IDS, 3: [7, 6]}, "step 3", 0, 0),
        (LOSSES, {**IDS, 3: [4, 5]}, "step 3", 2, 2),
        (LOSSES, {1: IDS[1], 2: IDS[2]}, "step 3: None", 4, 0),
    ],
    ids=["last digit", "missing", "surplus", "order", "ids' order", "other ids", "ids missing"],
)
def test_different_records_fail(
    runs: tuple[Path, Path],
    losses: dict[int, float],
    ids: dict[int, list[int]],
    problem: str,
    lost: int,
    repeated: int,
) -> None:
    write_records(runs[1], losses, ids)
    verdict = verdicts.compare(*runs)
    assert problem in " ".join(verdict.problems)
    assert (verdict.lost, verdict.repeated) == (lost, repeated)


def test_examples_of_two_processes_are_merged(runs: tuple[Path, Path]) -> None:
    for number, name in enumerate(("examples.jsonl", "examples.1.jsonl")):
        lines = [json.dumps({"step": s, "position": 0, "ids": [IDS[s][number]]}) for s in IDS]
        (runs[1] / name).write_text("".join(f"{line}\n" for line in lines))
    assert not verdicts.compare(*runs).problems
    (runs[1] / "examples.1.jsonl").unlink()
    verdict = verdicts.compare(*runs)
    assert verdict.problems
    assert verdict.lost == STEPS


@pytest.mark.parametrize("name", ["metrics.jsonl", "examples.jsonl"])
@pytest.mark.parametrize("what", ["twice", "incomplete"])
def test_a_duplicate_or_incomplete_record_fails(
    runs: tuple[Path, Path], name: str, what: str
) -> None:
    path = runs[1] / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + (lines[-1] if what == "twice" else lines[-1][:9]))
    assert what in " ".join(verdicts.compare(*runs).problems)


def test_leftovers_of_a_run_are_detected(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/files/8-0a/state.orbax-checkpoint-tmp-3").mkdir(parents=True)
    (tmp_path / ".config.json.x7").write_text("")
    (tmp_path / "config.json").write_text("")
    assert verdicts.leftovers(tmp_path) == [
        ".config.json.x7",
        "checkpoints/files/8-0a/state.orbax-checkpoint-tmp-3",
    ]


def test_detected_damage_does_not_hide_leftovers(tmp_path: Path) -> None:
    checkpoints = [write_checkpoint(tmp_path, step) for step in (4, 8)]
    damage(checkpoints[1], "empty", random.Random(0))
    (tmp_path / "checkpoints/.x.partial").write_text("")
    store = CheckpointStore(Folder(tmp_path))
    assert verdicts.damaged(store) == []
    store.set_aside("checkpoints", 8, "damaged", "its pointer is empty")
    assert [name.partition("-")[0] for name in verdicts.damaged(store)] == ["8"]
    assert verdicts.leftovers(tmp_path) == ["checkpoints/.x.partial"]


def test_a_seed_determines_the_plan() -> None:
    plans = [plan(seed, 1) for seed in range(300)]
    assert plans == [plan(seed, 1) for seed in range(300)]
    assert plans[0] != plans[1]
    kinds = Counter(fault.kind for one in plans for fault in one.faults)
    assert kinds.keys() == KINDS.keys() - {"stop"}
    for one in plans:
        for before, fault in zip(one.faults, one.faults[1:], strict=False):
            if fault.moment in STARTING:  # possible only if the fault before restarts the run
                assert before.kind in RESTARTING
                assert before.moment not in STARTING
        assert all(fault.target == 0 for fault in one.faults)


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_breaks_a_checkpoint(tmp_path: Path, kind: str) -> None:
    for seed in range(3):
        checkpoint = write_checkpoint(tmp_path / f"{seed}", 12)
        assert pointer.verify(checkpoint) == ""
        assert damage(checkpoint, kind, random.Random(seed))
        assert pointer.verify(checkpoint) != ""


class OnDisk(Server):
    """A folder in place of a bucket."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def sizes(self, folder: str) -> dict[str, int]:
        top = self._top / folder
        files = (path for path in top.rglob("*") if path.is_file())
        return {path.relative_to(top).as_posix(): path.stat().st_size for path in files}

    def read(self, name: str) -> bytes:
        return (self._top / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self._top / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self._top / name).unlink()


def test_a_checkpoint_in_a_bucket_is_damaged_there(tmp_path: Path) -> None:
    checkpoints = [write_checkpoint(tmp_path / "run", step) for step in (4, 8)]
    stored = Stored(OnDisk(tmp_path), "run", tmp_path / "copy")
    watch = Watch(tmp_path / "a disk without checkpoints", steps=STEPS, eval_every=2)
    striker = Striker(watch, None, stored)
    striker.damage_at_rest(Fault("damage-rest", "steps", damages=("delete", "lie")))
    assert [int(path.stem) for path in checkpoints if not pointer.verify(path)] == [4]
    assert striker.to_be_found == {8}


@pytest.mark.parametrize("saved", [(4, 8, 12), (4, 8), (4,)])
def test_damage_spares_one_checkpoint(tmp_path: Path, saved: tuple[int, ...]) -> None:
    checkpoints = [write_checkpoint(tmp_path, step) for step in saved]
    striker = Striker(Watch(tmp_path, steps=STEPS, eval_every=2), None)
    for seed in range(6):
        striker.damage_at_rest(Fault("damage-rest", "steps", damages=("flip", "lie"), seed=seed))
    assert [int(path.stem) for path in checkpoints if not pointer.verify(path)] == [4]


def test_phases_are_determined_from_the_output(tmp_path: Path) -> None:
    watch = Watch(tmp_path, steps=STEPS, eval_every=2)
    log, metrics = tmp_path / "log.txt", tmp_path / "metrics.jsonl"
    data = tmp_path / "checkpoints/files/1-0a"

    def after(line: str = "", **record: float) -> str:
        if line:
            with log.open("a") as file:
                file.write(f"2026-01-31T09:00:00Z {line}\n")
        if record:
            with metrics.open("a") as file:
                file.write(json.dumps(record | {"time": 0.0}) + "\n")
        watch.look()
        return watch.phase()

    assert after() == "start"
    assert after("run directory /run") == "data"
    assert after("20,652 parameters; 4 steps") == "compile"
    assert after("compiled in 1.0 s") == "first step"
    assert after("step 1/4 | loss 5", step=1) == "steps"
    (data / "state.orbax-checkpoint-tmp-0").mkdir(parents=True)
    assert after() == "save"
    (data / "state.orbax-checkpoint-tmp-0").rename(data / "state")
    assert after() == "commit"
    (tmp_path / "checkpoints/1.json").write_text("{}")
    assert after("step 2/4 | loss 5", step=2) == "evaluation"
    assert after("step 2/4 | validation", **{"step": 2, "val/loss": 5.0}) == "steps"
    assert after("run directory /run") == "data"
    assert after("20,652 parameters; 4 steps") == "restore"
    assert after("resumed from /run/checkpoints/1: step 1 of 4, 8 examples seen") == "compile"
    assert (watch.starts, watch.complete(), watch.resumed_from()) == (2, [1], 1)
    assert after("compiled in 1.0 s") == "first step"
    assert after("step 3/4 | loss 5", step=3) == "steps"
    assert after("step 4/4 | loss 5", step=4) == "end"


def test_all_processes_of_a_launcher_are_found_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including those in another session whose parent has ended."""
    script = tmp_path / "launcher.sh"
    script.write_text("(setsid sleep 600 &)\nexec sleep 600\n")
    monkeypatch.setattr("chaos.launched.LAUNCHER", script)
    launched = Launched(1, [], tmp_path, "a mark", {})
    wait_for(lambda: len(launched.processes()) == 2, seconds=60)
    assert launched.training() == {}
    assert launched.code() is None
    launched.kill_everything()
    assert launched.processes() == []
    assert launched.code() is not None
    launched.close()
