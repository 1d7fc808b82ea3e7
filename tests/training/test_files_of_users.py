"""A run deletes, moves and replaces nothing that it did not write."""

import signal
from pathlib import Path

import pytest
from checkpoint import small_checkpoint
from program import OFTEN_BAD, run, started, train, wait_for, write_corpus, write_often_bad
from storage import of_users

from jaxtrain.storage import run_marker

pytestmark = pytest.mark.slow

# With this seed, the norms of several steps count as bad, and the run is rolled back.
ARGUMENTS = [
    *OFTEN_BAD,
    *("--data.path", "corpus", "--loop.steps", "71", "--checkpoint.every", "4"),
    *("--checkpoint.keep", "2", "--loop.record_examples", "True", "--seed", "0"),
    *("--output-dir", "work"),
]


def add_files(work: Path, seed: int) -> dict[str, bytes]:
    """Writes files of a user; returns the content of each."""
    files = of_users.files(seed)
    for name, content in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
    return files


def of_user(work: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: (work / name).read_bytes() for name in files if (work / name).is_file()}


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_often_bad(tmp_path)
    files = add_files(tmp_path / "work", 1)
    before = sorted(path for path in tmp_path.rglob("*"))
    done = run(tmp_path, *ARGUMENTS)
    assert done.returncode == 2, done.stderr
    assert "--output-dir" in done.stderr
    assert "is not empty and not a run" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before
    assert of_user(tmp_path / "work", files) == files


@pytest.mark.long  # test_run_marker.py knows whose files are whose
def test_all_files_of_a_user_are_there_byte_for_byte(tmp_path: Path) -> None:
    """They came after the run had begun: a stop, a resume, rollbacks, a step back, a prune."""
    write_corpus(tmp_path)
    write_often_bad(tmp_path)
    work = tmp_path / "work"
    process = started(tmp_path, *ARGUMENTS)
    wait_for(lambda: (work / "checkpoints/4.json").exists(), process)
    files = add_files(work, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert of_user(work, files) == files
    train(tmp_path, *ARGUMENTS, "--resume", "latest")
    log = (work / "log.txt").read_text()
    assert "restoring checkpoint" in log
    assert of_user(work, files) == files
    steps = sorted(int(path.stem) for path in (work / "checkpoints").glob("[1-9]*[0-9].json"))
    train(tmp_path, *ARGUMENTS, "--resume", str(steps[0]), "--loop.steps", str(steps[0] + 2))
    assert small_checkpoint.aside(work)
    done = run(tmp_path, "checkpoints", "work", "--prune")
    assert done.returncode == 0, done.stdout
    run_id = run_marker.read(work)
    left = [path.name for path in (work / "aside").glob("*.json")]
    assert [n for n in left if run_marker.step_of_folder(n.partition(".")[0], run_id)] == []
    assert of_user(work, files) == files
