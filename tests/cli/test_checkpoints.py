"""``jaxtrain checkpoints``: lists and verifies checkpoints, and names the one to resume from."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from small_state import make_state, meta_of, save

from jaxtrain import main
from jaxtrain.checkpoint import bucket_checkpoints, manifest, resume, saver
from jaxtrain.cli import checkpoints as command
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Bucket
from jaxtrain.training import run_directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 4 and 9, best 4, and 12 superseded."""
    run = tmp_path_factory.mktemp("saved") / "run"
    checkpoints = saver.Checkpoints(run / "checkpoints", 3, lambda line: None)
    save(checkpoints, 4, 12, 9)
    checkpoints.save_best(make_state(4), meta_of(4))
    checkpoints.close()
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved``."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def tree(run: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]
    }


def table(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_lists_intact_checkpoints_and_changes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "13.orbax-checkpoint-tmp").mkdir()
    before = tree(run)
    assert command.main([str(run)]) == 0
    assert tree(run) == before
    head, *rows, last = table(capsys.readouterr().out)
    assert head == ["checkpoint", "saved (UTC)", "examples seen", "size"]
    assert [(row[0], row[2], row[4]) for row in rows] == [
        ("checkpoints/4", "12", "verified"),
        ("checkpoints/9", "27", "verified"),
        ("best/4", "12", "verified"),
        ("superseded/checkpoints/12", "36", "verified"),
    ]
    saved_at = manifest.read(run / "checkpoints" / "9").saved
    assert rows[1][1][:10] == saved_at[:10]
    assert re.fullmatch(r"0\.\d MiB", rows[1][3])
    assert last == [f"--resume latest would resume from {run / 'checkpoints' / '9'}"]


def test_names_damaged_checkpoints_and_the_one_to_resume_from(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "9" / "manifest.json").unlink()
    (run / "best" / "4" / "meta" / "metadata").write_text("{}")
    report = tmp_path / "report.json"
    before = tree(run)
    assert command.main([str(run), "--json", str(report)]) == 1
    assert tree(run) == before
    text = capsys.readouterr().out
    rows = {row[0]: row[-1] for row in table(text)}
    assert rows["checkpoints/4"] == "verified"
    assert rows["checkpoints/9"].startswith("DAMAGED: manifest.json is missing")
    assert rows["best/4"].startswith("DAMAGED: meta/metadata has 2 bytes")
    taken = run / "checkpoints" / "4"
    assert text.splitlines()[-1] == f"--resume latest would resume from {taken}"
    found = json.loads(report.read_text())
    assert found["latest"] == str(taken)
    assert [one["step"] for one in found["checkpoints"]] == [4, 9, 4, 12]
    assert [one["examples_seen"] for one in found["checkpoints"]] == [12, 27, None, 36]
    # A resume takes this checkpoint, and moves the damaged ones.
    assert resume.choose("latest", run, tmp_path, lambda line: None) == taken
    assert command.main([str(run)]) == 0  # all checkpoints that a run would use are intact
    moved = {row[0]: row[-1] for row in table(capsys.readouterr().out)}
    for name in ("checkpoints/9", "best/4"):
        aside = rows[name].replace("DAMAGED", "moved, damaged")
        assert moved[f"damaged/{name}"] == aside
    assert "checkpoints/9" not in moved
    (run / "checkpoints" / "4" / "meta" / "metadata").write_text("{}")
    assert command.main([str(run)]) == 1


def test_lists_uncertified_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("checkpoints/4", "checkpoints/9", "best/4"):
        resume.set_aside(run / path, "a wrong step", lambda line: None, to="uncertified")
    assert command.main([str(run)]) == 0
    rows = table(capsys.readouterr().out)
    assert ["uncertified/checkpoints/9", "moved, uncertified: a wrong step"] in [
        [row[0], row[-1]] for row in rows
    ]
    assert rows[-1] == ["--resume latest would be refused: no checkpoint can be used"]


def test_without_an_intact_checkpoint_a_resume_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("checkpoints/4", "checkpoints/9", "best/4"):
        (run / path / "manifest.json").write_text("")
    assert command.main([str(run)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "--resume latest would be refused: no checkpoint can be used"
    with pytest.raises(InputError, match="is intact"):
        resume.choose("latest", run, tmp_path, lambda line: None)
    (run / "config.json").write_text('{"checkpoint": {"every": 9}}')  # 9 is the first save
    assert command.main([str(run)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "--resume latest would start from scratch: no checkpoint can be used"
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    shutil.rmtree(run / "best")
    assert command.main([str(run)]) == 0


def test_a_bucket_with_only_damaged_checkpoints(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "s3://bucket/run"
    held = Bucket(url, MemoryStore())
    for module in (command, bucket_checkpoints):
        monkeypatch.setattr(module, "Bucket", lambda url: held)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    held.put("config.json", b'{"checkpoint": {"every": 8}}')
    with pytest.raises(InputError, match=f"checkpoints {url}: this run has not saved a checkpoint"):
        command.main([url])
    store = bucket_checkpoints.BucketCheckpoints(held, print)
    path = run / "checkpoints" / "9"
    data = bucket_checkpoints.data_of(9, bucket_checkpoints.part_of(path))
    store.upload(path, data, 0, lambda count: None)
    store.commit("checkpoints", 9, data, bucket_checkpoints.Layout())
    assert command.main([url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"--resume latest would resume from {url}/checkpoints/9"
    )
    held.put(f"{data}/0/meta/metadata", b"damaged")
    held.put(f"{data}/0/{manifest.NAME}", b"damaged")
    shutil.rmtree(tmp_path / "cache")
    for sentence in ("be refused", "start from scratch"):
        assert command.main([url]) == 1
        (_, row, last) = capsys.readouterr().out.splitlines()
        assert re.match(r"checkpoints/9 +\? +\? +\? +DAMAGED: .* its checksum is wrong", row)
        assert last == f"--resume latest would {sentence}: no checkpoint can be used"
        held.put("config.json", b'{"checkpoint": {"every": 9}}')
    store.set_aside("checkpoints", 9, "it is wrong")
    assert command.main([url]) == 0
    row = capsys.readouterr().out.splitlines()[-2]
    assert re.match(
        r"damaged/checkpoints/9 +\? +\? +\? +moved, damaged: a resume has found this", row
    )


def test_wrong_use(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path)], "has no checkpoints/; pass a run directory$"),
        ([str(run / "checkpoints" / "9")], f"pass a run directory, such as {run}$"),
        ([str(run / "checkpoints")], f"pass a run directory, such as {run}$"),
        ([str(run), "--jsn", "x"], "--jsn x"),
        ([str(run), "--json"], "expected one argument"),
        ([str(run), "--json", str(tmp_path / "no" / "x.json")], "does not exist: create it"),
    ):
        with pytest.raises(InputError, match=message):
            command.main(arguments)
    assert main.main(["checkpoints", str(tmp_path / "nowhere")]) == 2


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "checkpoints DIR" in capsys.readouterr().out


def test_imports_nothing_heavy(run: Path, checkout: Path) -> None:
    probe = (
        "import sys; from jaxtrain import main; main.main(sys.argv[1:]); "
        "print([name for name in ('jax', 'orbax', 'numpy', 'tyro') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe, "checkpoints", str(run)],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[]"


def last_line(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], str]:
    """Returns the exit code, the verdict on each checkpoint, and the line about a resume."""
    before = tree(run)
    code = command.main([str(run)])
    assert tree(run) == before
    lines = capsys.readouterr().out.splitlines()
    return code, {row[0]: row[-1] for row in table("\n".join(lines[1:-1]))}, lines[-1]


def resumed(run: Path) -> str:
    """Returns the checkpoint that a real resume takes, or the name of its error."""
    try:
        found = resume.choose("latest", run, run.parent, lambda line: None)
    except RunAgain:
        return "RunAgain"
    except InputError:
        return "InputError"
    return "none" if found is None else found.relative_to(run).as_posix()


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/9", "samples"])
def test_a_link_that_a_run_refuses_is_named(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "samples").mkdir()
    link = run / name
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    code, verdicts, last = last_line(run, capsys)
    assert last == f"--resume latest would be refused: {name} is a symbolic link: remove it"
    with pytest.raises(InputError, match=f"contains a symbolic link, {name}, "):
        run_directory.take(run, print)
    of_link = {one for one in verdicts if one == name or one.startswith(f"{name}/")}
    assert {verdicts.pop(one) for one in of_link} <= {f"UNKNOWN: {name} is a symbolic link"}
    assert len(of_link) == {"checkpoints": 2, "checkpoints/9": 1, "samples": 0}[name]
    assert set(verdicts.values()) == {"verified"}
    assert code == (1 if of_link else 0)


@pytest.mark.parametrize("folder", ["checkpoints/9", "best/4"])
def test_a_temporary_read_error_is_not_damage(
    run: Path,
    folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Path.open

    def fail(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == run / folder / "meta" / "metadata":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", fail)
    code, rows, last = last_line(run, capsys)
    why = f"{run / folder / 'meta' / 'metadata'} cannot be read now (Input/output error)"
    assert (code, rows[folder]) == (1, f"UNKNOWN: {why}")
    assert last == f"--resume latest would fail: {folder}: {why}"
    assert resumed(run) == "RunAgain"


def test_a_format_of_another_version_is_not_damage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "9" / "manifest.json"
    content = json.loads(path.read_text()) | {"format": 99}
    content.pop("sha256")
    path.write_text(json.dumps(content | {"sha256": manifest.checksum(content)}))
    code, rows, last = last_line(run, capsys)
    assert code == 1
    assert rows["checkpoints/9"].startswith("UNKNOWN: ")
    assert "has format 99" in rows["checkpoints/9"]
    assert last.startswith("--resume latest would fail: checkpoints/9: ")
    assert resumed(run) == "InputError"


def damage(path: Path) -> None:
    """Overwrites a file with as many zeros."""
    file = path / "state" / "_METADATA"
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("new", "old", "taken"),
    [
        ("unfinished", "whole", "checkpoints/9"),
        ("unfinished", "damaged", "checkpoints/4"),
        ("gone", "whole", "checkpoints/9"),
        ("gone", "damaged", "checkpoints/4"),
        ("whole", "damaged", "checkpoints/9"),
        ("damaged", "whole", "checkpoints/4"),  # it looked intact, so the old one was deleted
    ],
)
def test_a_checkpoint_that_is_being_replaced_is_verified(
    run: Path, new: str, old: str, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, waiting = run / "checkpoints" / "9", run / "checkpoints" / "9.replaced"
    shutil.copytree(target, waiting)
    if new == "unfinished":
        (target / "manifest.json").unlink()
    elif new == "gone":
        shutil.rmtree(target)
    elif new == "damaged":
        damage(target)
    if old == "damaged":
        damage(waiting)
    _, rows, last = last_line(run, capsys)
    assert rows["checkpoints/9.replaced"].startswith("DAMAGED" if old == "damaged" else "verified")
    assert last == f"--resume latest would resume from {run / taken}"
    assert resumed(run) == taken


def test_the_newest_checkpoint_of_an_active_run_is_being_saved(
    run: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "9" / "manifest.json").unlink()
    holder = (
        "import sys, pathlib; from jaxtrain.storage import lock; "
        "lock.hold(pathlib.Path(sys.argv[1]), print); print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(run)],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            code, rows, last = last_line(run, capsys)
        finally:
            process.kill()
    assert code == 0
    assert rows["checkpoints/9"] == "being saved: by the run that is active here"
    assert last == (
        f"--resume latest would resume from {run / 'checkpoints' / '4'}, after the run that is "
        f"active here (process {process.pid} on {socket.gethostname()}) has ended"
    )
    code, rows, last = last_line(run, capsys)  # the process is dead, so its lock is free
    assert code == 1
    assert rows["checkpoints/9"].startswith("DAMAGED: manifest.json is missing")
    assert last == f"--resume latest would resume from {run / 'checkpoints' / '4'}"
