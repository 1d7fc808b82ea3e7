"""A stopped run resumes exactly, without losing anything."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint import small_checkpoint
from program import (
    TINY_MLM,
    arrays,
    example_ids,
    losses,
    run,
    started,
    train,
    wait_for,
    write_corpus,
)

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow


EIGHT = [
    *[*TINY_MLM, "--data.path", "corpus", "--mesh.fsdp", "8", "--mesh.shard", "params"],
    *["--simulate-devices", "8", "--checkpoint.every", "4", "--loop.steps", "20"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and a run of twenty steps on eight devices."""
    directory = tmp_path_factory.mktemp("resume")
    write_corpus(directory)
    train(directory, *EIGHT, "--checkpoint.keep", 9, "--output-dir", "straight")
    return directory


def killed(run: Path, name: str, step: int) -> Path:
    """Returns a copy of a run as a kill after the checkpoint of a step leaves it."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    for pointer_file in (copy / "checkpoints").glob("*.json"):
        if int(pointer_file.stem) > step:
            pointer_file.unlink()
    metrics = copy / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:step]))
    assert sorted(losses(copy)) == list(range(1, step + 1))
    return copy


def test_twenty_steps_equal_eight_and_twelve(place: Path) -> None:
    """Bit for bit, in every loss and every array of the state."""
    killed(place / "straight", "halves", 8)
    text = train(place, *EIGHT, "--output-dir", "halves", "--resume", "latest")
    assert "64 examples seen" in text
    assert "checkpoint.keep" in text  # the difference from the saved config is printed
    assert "learning rate schedule" not in text  # it is constant
    straight, halves = losses(place / "straight"), losses(place / "halves")
    assert sorted(halves) == list(range(1, 21))
    assert straight == halves
    left, right = arrays(place / "straight"), arrays(place / "halves")
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


@pytest.mark.long
def test_packed_documents_continue_where_they_stopped(tmp_path: Path) -> None:
    """`data.fit_documents`, with another number of workers and across an epoch."""
    write_corpus(tmp_path)
    fitted = [
        *["--config", "demo_gpt", "--data.path", "corpus", "--data.fit_documents", True],
        *["--model.depth", 1, "--model.width", 32, "--model.heads", 2, "--model.vocab_size", 300],
        *["--model.sequence_length", 64, "--data.batch_size", 16, "--loop.steps", 12],
        *["--loop.log_every", 1, "--loop.eval_every", None, "--checkpoint.best_metric", None],
        *["--checkpoint.every", 5, "--checkpoint.keep", 9, "--loop.record_examples", True],
    ]
    text = train(tmp_path, *fitted, "--data.workers", 0, "--output-dir", "straight")
    assert "1.15 epochs of 167 examples" in text
    straight = tmp_path / "straight"
    copy = killed(straight, "killed", 5)
    train(tmp_path, *fitted, "--data.workers", 1, "--output-dir", "killed", "--resume", "latest")
    assert losses(copy) == losses(straight)
    assert len(set(losses(copy).values())) == 12
    assert example_ids(copy) == example_ids(straight)


def test_a_damaged_checkpoint_loses_only_its_own_steps(place: Path) -> None:
    """Resuming from the previous one gives the same run."""
    newest = killed(place / "straight", "spoilt", 8) / "checkpoints" / "8"
    files = pointer.folder_of(newest.with_suffix(".json"))
    data = max((files / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    found = run(place, *EIGHT, "--output-dir", "spoilt", "--resume", "latest")
    assert found.returncode == 0, found.stderr
    name = data.relative_to(files).as_posix()
    moved = f"warning: checkpoint {newest} is damaged ({name} was changed after"
    assert (found.stderr + found.stdout).count(moved) == 1
    assert moved in (place / "spoilt" / "log.txt").read_text()
    assert "32 examples seen" in found.stdout
    assert losses(place / "spoilt") == losses(place / "straight")
    assert small_checkpoint.aside(place / "spoilt")[8].startswith("damaged: ")


def test_ctrl_c_while_the_workers_start_is_one_line(place: Path) -> None:
    """A terminal sends it to them, too, during their imports."""
    process = started(place, *EIGHT, "--data.workers", 2, "--output-dir", "early")
    wait_for(lambda: "spawn_main" in _command_lines(process.pid), process)
    time.sleep(0.3)  # Python has started there, and imports
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output


def _command_lines(group: int) -> str:
    """Returns the command lines of all processes in a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                found.append((folder / "cmdline").read_text())
    return "\n".join(found)


@pytest.mark.long  # test_start.py stops a start at each moment
def test_a_kill_before_the_first_save_keeps_the_checkpoint_of_another_run(place: Path) -> None:
    """The same command, repeated, means the same; so does --resume latest."""
    flags = [*EIGHT, "--loop.steps", 12, "--output-dir", "other"]
    process = started(place, *flags, "--resume", "straight/checkpoints/8")
    wait_for((place / "other/start.json").exists, process)
    process.kill()
    process.communicate()
    text = train(place, *flags, "--resume", "latest")
    assert f"no checkpoint yet: starting from {place}/straight/checkpoints/8" in text
    assert "straight/checkpoints/8: step 8 of 12" in text
    straight, other = losses(place / "straight"), losses(place / "other")
    assert other == {step: straight[step] for step in (9, 10, 11, 12)}
