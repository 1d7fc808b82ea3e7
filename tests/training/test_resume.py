"""A stopped run resumes exactly, without losing anything."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from program import TINY_MLM, arrays, command, environment, losses, run, train, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and two runs on eight devices, of twenty and of eight steps."""
    directory = tmp_path_factory.mktemp("resume")
    write_corpus(directory)
    train(directory, *EIGHT, "--loop.steps", 20, "--output-dir", "straight")
    train(directory, *EIGHT, "--loop.steps", 8, "--output-dir", "eight")
    return directory


EIGHT = [
    *TINY_MLM,
    *[
        "--data.path",
        "corpus",
        "--mesh.fsdp",
        "8",
        "--mesh.shard",
        "params",
        "--simulate-devices",
        "8",
    ],
    *["--checkpoint.every", "4", "--checkpoint.keep", "2"],
]


def test_twenty_steps_equal_eight_and_twelve(place: Path) -> None:
    """Bit for bit, in every loss and every array of the state."""
    shutil.copytree(place / "eight", place / "halves")
    text = train(place, *EIGHT, "--loop.steps", 20, "--output-dir", "halves", "--resume", "latest")
    assert "64 examples seen" in text
    assert "loop.steps" in text  # the difference from the saved config is printed
    assert "learning rate schedule" not in text  # it is constant
    straight, halves = losses(place / "straight"), losses(place / "halves")
    assert sorted(halves) == list(range(1, 21))
    assert straight == halves
    left, right = arrays(place / "straight"), arrays(place / "halves")
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


@pytest.mark.long
def test_a_longer_run_reports_what_happens_to_the_learning_rate(place: Path) -> None:
    shutil.copytree(place / "eight", place / "longer")
    arguments = [*EIGHT, "--output-dir", "longer", "--resume", "latest", "--loop.steps", 20]
    text = train(place, *arguments, "--optim.schedule", "linear")
    assert (
        "the learning rate schedule (linear) now covers 20 steps instead of 8: the rate at step 8 "
        "changes from 0.01 to 0.006"
    ) in text


def test_a_damaged_checkpoint_loses_only_its_own_steps(place: Path) -> None:
    """Resuming from the previous one gives the same run."""
    arguments = [*EIGHT, "--output-dir", "spoilt"]
    shutil.copytree(place / "eight", place / "spoilt")
    newest = place / "spoilt" / "checkpoints" / "8"
    files = pointer.folder_of(newest.with_suffix(".json"))
    data = max((files / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    refused = run(place, *arguments, "--loop.steps", 20, "--resume", 8)
    assert refused.returncode == 2
    assert "its checksum is wrong); checkpoints/ has: 4" in refused.stderr
    found = run(place, *arguments, "--loop.steps", 20, "--resume", "latest")
    assert found.returncode == 0, found.stderr
    name = data.relative_to(files).as_posix()
    moved = f"warning: checkpoint {newest} is damaged ({name} was changed after"
    assert (found.stderr + found.stdout).count(moved) == 1
    assert moved in (place / "spoilt" / "log.txt").read_text()
    assert "32 examples seen" in found.stdout
    assert losses(place / "spoilt") == losses(place / "straight")
    assert (place / "spoilt" / "damaged" / "checkpoints" / "8.txt").exists()


@pytest.mark.long
def test_ctrl_c_saves_once_and_the_run_resumes(place: Path) -> None:
    """The workers receive it, too, as in a terminal; test_preemption.py sends SIGTERM."""
    arguments = [*EIGHT, "--loop.steps", 20, "--output-dir", "stopped"]
    endless = ["--loop.steps", 1_000_000, "--checkpoint.every", 1_000_000, "--data.workers", 2]
    process = subprocess.Popen(
        command(*arguments, *endless),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = place / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "--resume latest" in output
    steps = [path.name for path in (place / "stopped" / "checkpoints").iterdir()]
    assert len(steps) == 1
    done = int(steps[0])
    assert done == max(losses(place / "stopped"))
    if done < 20:  # a fast machine may be past the end of the reference run
        train(place, *arguments, "--resume", "latest")
    common = losses(place / "straight").keys() & losses(place / "stopped").keys()
    assert common
    for step in common:
        assert losses(place / "stopped")[step] == losses(place / "straight")[step]


def test_ctrl_c_while_the_workers_start_is_one_line(place: Path) -> None:
    """A terminal sends it to them, too, during their imports."""
    process = subprocess.Popen(
        command(*EIGHT, "--data.workers", 2, "--loop.steps", 99, "--output-dir", "early"),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while "spawn_main" not in _command_lines(process.pid):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
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


@pytest.mark.long
def test_a_run_that_cannot_be_resumed_is_rejected(place: Path) -> None:
    again = run(place, *EIGHT, "--loop.steps", 20, "--output-dir", "straight")
    assert again.returncode == 2
    assert "--resume" in again.stderr
    resume = [*EIGHT, "--loop.steps", 30, "--output-dir", "straight", "--resume", "latest"]
    for other, said in (
        (["--seed", 7], "seed"),
        (["--model.hidden", 64], "a different model"),
        (["--model.heads", 1], "was trained with model.heads"),
        (["--data.path", str(write_corpus(place / "cache", seed=5))], "fingerprint"),
    ):
        refused = run(place, *resume, *other)
        assert refused.returncode == 2, refused.stdout
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert max(losses(place / "straight")) == 20


def test_a_kill_before_the_first_save_keeps_the_checkpoint_of_another_run(place: Path) -> None:
    """Launchers restart with --resume latest."""
    flags = [*EIGHT, "--loop.steps", 12, "--output-dir", "other"]
    train(place, *flags, "--resume", "eight", "--checkpoint.every", "12")
    for name in ("checkpoints", "data"):
        shutil.rmtree(place / "other" / name)
    text = train(place, *flags, "--resume", "latest")
    assert "no checkpoint yet: resuming from " in text
    assert "eight/checkpoints/8: step 8 of 12" in text
    straight, other = losses(place / "straight"), losses(place / "other")
    assert other == {step: straight[step] for step in other}
    assert sorted(other) == [9, 10, 11, 12]
    for name in ("checkpoints", "data"):
        shutil.rmtree(place / "other" / name)
    (place / "other/history.jsonl").write_text(
        '{"event": "start", "from": "/gone/checkpoints/8"}\n'
    )
    gone = run(place, *flags, "--resume", "latest")
    assert gone.returncode == 2
    assert "this run was started from /gone/checkpoints/8, and has no checkpoint" in gone.stderr
    assert gone.stderr.count("\n") == 1


FRESH = ["--output-dir", "fresh", "--resume", "latest", "--profile", "1:2"]


@pytest.mark.long
def test_resume_latest_starts_from_scratch_without_a_checkpoint(place: Path) -> None:
    text = train(place, *EIGHT, "--loop.steps", 2, *FRESH)
    assert "no checkpoint" in text
    assert list((place / "fresh" / "profile").rglob("*.xplane.pb"))
