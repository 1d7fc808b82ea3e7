"""``jaxtrain checkpoints``: lists and verifies checkpoints, and names the one to resume from."""

import errno
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from checkpoint import small_checkpoint
from obstore.store import MemoryStore
from program import lock_held

from jaxtrain import main
from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.cli import checkpoints, command_line
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import run_marker
from jaxtrain.storage.bucket import Bucket


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 4 and 9, best 4, and 12 superseded."""
    run = tmp_path / "run"
    for step, kinds in ((4, ("checkpoints", "best")), (12, ("checkpoints",))):
        small_checkpoint.write(run, step, kinds, files={"state/_METADATA": bytes(300_000)})
    small_checkpoint.write(run, 9, saved="2026-01-31T09:00:00Z")
    return run


def tree(run: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]
    }


def table(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_lists_intact_checkpoints_and_changes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / small_checkpoint.files_folder(13) / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    before = tree(run)
    assert command_line.run("checkpoints", [str(run)]) == 0
    assert tree(run) == before
    head, *rows, _, last = table(capsys.readouterr().out)
    assert head == ["checkpoint", "saved (UTC)", "examples seen", "size"]
    assert [(row[0], row[2], row[4]) for row in rows] == [
        ("checkpoints/4", "12", "verified"),
        ("checkpoints/9", "27", "verified"),
        ("best/4", "12", "verified"),
        (
            f"aside/{small_checkpoint.files_folder(12).rpartition('/')[2]}",
            "36",
            "moved, superseded",
        ),
    ]
    assert rows[1][1] == "2026-01-31 09:00:00"
    assert rows[0][3] == "0.3 MiB"
    assert last == [f"--resume latest would resume from {run / 'checkpoints' / '9'}"]


def test_names_damaged_checkpoints_and_the_one_to_resume_from(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_checkpoint.damage(run / "checkpoints/9.json")
    (run / "best/4.json").write_text("{}")
    report = tmp_path / "report.json"
    before = tree(run)
    assert command_line.run("checkpoints", [str(run), "--json", str(report)]) == 1
    assert tree(run) == before
    text = capsys.readouterr().out
    rows = {row[0]: row[-1] for row in table(text)}
    assert rows["checkpoints/4"] == "verified"
    assert rows["checkpoints/9"].startswith("DAMAGED: state/_METADATA was changed")
    assert rows["best/4"].startswith("DAMAGED: its pointer is damaged")
    taken = run / "checkpoints" / "4"
    assert text.splitlines()[-1] == f"--resume latest would resume from {taken}"
    found = json.loads(report.read_text())
    assert found["latest"] == str(taken)
    assert [one["step"] for one in found["checkpoints"]] == [4, 9, 4, 12]
    assert [one["examples_seen"] for one in found["checkpoints"]] == [12, 27, None, 36]
    # A resume takes this checkpoint, and moves the damaged ones.
    assert small_checkpoint.choose("latest", run, lambda line: None) == taken.with_suffix(".json")
    assert (
        command_line.run("checkpoints", [str(run)]) == 0
    )  # all checkpoints that a run would use are intact
    moved = {row[0]: row[-1] for row in table(capsys.readouterr().out)}
    reasons = {name.partition("-")[0]: row for name, row in moved.items()}
    for name in ("checkpoints/9", "best/4"):
        aside = rows[name].replace("DAMAGED", "moved, damaged")
        assert reasons[f"aside/{name.rpartition('/')[2]}"] == aside
    assert "checkpoints/9" not in moved
    small_checkpoint.damage(run / "checkpoints/4.json")
    assert command_line.run("checkpoints", [str(run)]) == 1


def test_a_bucket_with_only_damaged_checkpoints(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "s3://bucket/run"
    held = Bucket(url, MemoryStore())
    for module in (checkpoints, remote):
        monkeypatch.setattr(module, "Bucket", lambda url: held)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    held.put("config.json", b"{}")
    held.put(run_marker.NAME, small_checkpoint.marker())
    with pytest.raises(InputError, match=f"checkpoints {url}: this run has not saved a checkpoint"):
        command_line.run("checkpoints", [url])
    store = remote.RemoteRun(held, print).store
    path = run / "checkpoints/9.json"
    for file in small_checkpoint.data_of(path).rglob("_METADATA"):
        held.put(file.relative_to(run).as_posix(), file)
    store.commit(("checkpoints",), 9, path.read_bytes())
    assert command_line.run("checkpoints", [url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"--resume latest would resume from {url}/checkpoints/9"
    )
    held.put(f"{pointer.read(path).data}/state/_METADATA", b"stop 9")
    assert command_line.run("checkpoints", [url]) == 1
    (_, row, last) = capsys.readouterr().out.splitlines()
    assert re.match(r"checkpoints/9 +2026-\S+ 09:00:00 +27 .*DAMAGED: .* its checksum is w", row)
    assert last == "--resume latest would be refused: no checkpoint can be used"
    store.set_aside("checkpoints", 9, "damaged", "it is wrong")
    assert command_line.run("checkpoints", [url]) == 0
    row = capsys.readouterr().out.splitlines()[-3]
    assert re.match(r"aside/9-0123456789ab.* moved, damaged: it is wrong$", row)


def test_wrong_use(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path)], "has no checkpoints/; pass a run directory$"),
        ([str(run / "checkpoints" / "9")], f"pass a run directory, such as {run}$"),
        ([str(run), "--json", str(tmp_path / "no" / "x.json")], "does not exist: create it"),
    ):
        with pytest.raises(InputError, match=message):
            command_line.run("checkpoints", arguments)
    assert main.main(["checkpoints", str(tmp_path / "nowhere")]) == 2


def last_line(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], str]:
    """Returns the exit code, the verdict on each checkpoint, and the line about a resume."""
    before = tree(run)
    code = command_line.run("checkpoints", [str(run)])
    assert tree(run) == before
    lines = capsys.readouterr().out.splitlines()
    return code, {row[0]: row[-1] for row in table("\n".join(lines[1:-1]))}, lines[-1]


def resumed(run: Path) -> str:
    """Returns the checkpoint that a real resume takes, or the name of its error."""
    try:
        found = small_checkpoint.choose("latest", run, lambda line: None)
    except RunAgain:
        return "RunAgain"
    except InputError:
        return "InputError"
    return "none" if found is None else found.relative_to(run).with_suffix("").as_posix()


def test_a_temporary_read_error_is_not_damage(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, victim = (
        Path.open,
        small_checkpoint.data_of(run / "checkpoints/9.json") / "state/_METADATA",
    )

    def fail(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == victim:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", fail)
    code, rows, last = last_line(run, capsys)
    assert code == 1
    assert rows["checkpoints/9"] == f"UNKNOWN: {victim} cannot be read now (Input/output error)"
    assert last.startswith("--resume latest would fail: ")
    assert resumed(run) == "RunAgain"


def test_an_active_run_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_held(run) as process:
        code, rows, last = last_line(run, capsys)
    assert code == 0
    assert rows["checkpoints/9"] == "verified"
    assert last == (
        f"--resume latest would resume from {run / 'checkpoints' / '9'}, after the run that is "
        f"active here (process {process.pid} on {socket.gethostname()}) has ended"
    )
    _, _, last = last_line(run, capsys)  # the process is dead, so its lock is free
    assert last == f"--resume latest would resume from {run / 'checkpoints' / '9'}"


def test_prune_refuses_a_folder_of_a_user(tmp_path: Path) -> None:
    """The defect: it left a lock there."""
    (tmp_path / "aside").mkdir()
    with pytest.raises(InputError, match=r"--prune: this is not a run$"):
        command_line.run("checkpoints", [str(tmp_path), "--prune"])
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]


def test_prune_deletes_what_is_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(Folder(run))
    store.set_aside("checkpoints", 4, "damaged", "it is wrong")  # best/ needs its files
    (run / "aside/notes.txt").write_text("of a user")
    assert command_line.run("checkpoints", [str(run)]) == 0
    assert re.search(
        rf"^aside/ has 2 checkpoints that no longer count \(293.0 KiB\); to delete them: .* {run} "
        r"--prune$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert command_line.run("checkpoints", [str(run), "--prune"]) == 0
    text = capsys.readouterr().out
    assert f"deleted 2 checkpoints of {run}" in text
    assert "aside/ has" not in text.splitlines()[-1]
    assert [path.name for path in (run / "aside").iterdir()] == ["notes.txt"]
    assert [folder.rpartition("/")[2][:2] for folder in store.folders()] == ["4-", "9-"]
