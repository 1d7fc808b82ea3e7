"""A disk that fills, disappears or rejects writes: a real run continues, or exits with 75.

The tests mount a small file system. If that is not possible, a limit on the size of files simulates
the full disk. Neither is skipped.
"""

import contextlib
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import program
import pytest
from program import TINY_MLM, command, environment, losses, train, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow

ARGUMENTS = [
    *[*TINY_MLM, "--data.path", "corpus", "--simulate-devices", "1"],
    *["--loop.steps", "1000000", "--checkpoint.every", "20", "--checkpoint.keep", "2"],
]
DISK_BYTES = 4 * 2**20
FAILED = "could not be written"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and the first losses of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("full")
    write_corpus(directory)
    train(directory, *ARGUMENTS, "--loop.steps", 200, "--output-dir", "straight")
    return directory


class Disk:
    """A disk that can be filled and freed.

    Attributes:
        path: its folder.
        mounted: whether it is a separate file system.
    """

    def __init__(self, path: Path, mounted: bool) -> None:
        self.path = path
        self.mounted = mounted
        self._fill = path / "fill"

    def fill(self, process: subprocess.Popen[str]) -> None:
        """Leaves no space for the process."""
        if not self.mounted:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        descriptor = os.open(self._fill, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, bytes(4096))
        os.close(descriptor)

    def free(self, process: subprocess.Popen[str]) -> None:
        """Frees the space again."""
        if self.mounted:
            self._fill.unlink()
        elif process.poll() is None:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    ).returncode
    yield Disk(path, mounted)
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def running(place: Path, run: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs jaxtrain with its output in ``out.txt``; kills it at the end of the block."""
    with (place / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command(*ARGUMENTS, *arguments, "--output-dir", run, "--resume", "latest"),
            cwd=place,
            env=environment(place),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Waits for a condition while the process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def said(place: Path) -> str:
    return (place / "out.txt").read_text()


def intact_steps(run: Path) -> list[int]:
    """Returns the steps of all checkpoints, which must be intact."""
    folder = run / pointer.CHECKPOINTS
    found = pointer.steps(folder)
    assert [pointer.verify(folder / f"{step}.json") for step in found] == [""] * len(found)
    return found


def same_losses(place: Path, run: Path, *, lost: bool = False) -> None:
    """Checks for the losses of the uninterrupted run; with ``lost``, records may be missing."""
    straight, found = losses(place / "straight"), losses(run)
    common = straight.keys() & found.keys()
    assert len(common) > 20
    assert lost or sorted(found) == list(range(1, max(found) + 1))
    assert {step: found[step] for step in common} == {step: straight[step] for step in common}


@pytest.mark.long
def test_three_failures_end_the_run_and_it_resumes_later(place: Path, disk: Disk) -> None:
    run = disk.path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(pointer.steps(run / "checkpoints")))
        disk.fill(process)
        assert process.wait(120) == 75, said(place)
        *_, last = said(place).splitlines()
        assert re.fullmatch(rf"error: 3 saves in a row have failed: .*{FAILED} .*latest", last)
        assert said(place).count(f"warning: checkpoint {run}/checkpoints") == 3
        assert "Traceback" not in said(place)
        kept = intact_steps(run)
        assert f"the newest complete one is {run / 'checkpoints' / str(kept[-1])};" in last
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left == {str(step) for step in kept}  # no incomplete ones
        if disk.mounted:  # as a launcher restarts it
            again = program.run(place, *ARGUMENTS, *resumed(run, kept[-1] + 30))
            assert again.returncode == 75, again.stderr
            assert re.fullmatch(r"error: cannot write to .*No space left.*\n", again.stderr)
        disk.free(process)
    train(place, *ARGUMENTS, *resumed(run, kept[-1] + 30))
    assert intact_steps(run)[-1] == kept[-1] + 30
    same_losses(place, run, lost=True)


def resumed(run: Path, steps: int) -> list[object]:
    return ["--loop.steps", steps, "--output-dir", run, "--resume", "latest"]


def test_a_run_survives_a_failed_save(place: Path, disk: Disk) -> None:
    run = disk.path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(pointer.steps(run / "checkpoints")))
        disk.fill(process)
        until(process, lambda: FAILED in said(place))
        disk.free(process)
        failed = int(re.findall(r"checkpoint (\d+) could not", said(place))[-1])
        until(process, lambda: complete_steps_after(run, failed))
        process.terminate()
        assert process.wait(120) == 75
    assert intact_steps(run)[-1] == max(losses(run))
    assert "written again" in said(place) or "log.txt" not in said(place)
    same_losses(place, run, lost=True)


def complete_steps_after(run: Path, step: int) -> bool:
    return any(one > step for one in pointer.steps(run / "checkpoints"))


@pytest.mark.long
@pytest.mark.parametrize("freed", [True, False])
def test_the_last_save_is_retried(place: Path, disk: Disk, freed: bool) -> None:
    run = disk.path / "run"
    with running(place, run, "--checkpoint.every", 1_000_000) as process:
        until(process, lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 2)
        disk.fill(process)
        process.terminate()
        until(process, lambda: "retrying the last save" in said(place))
        if freed:
            disk.free(process)
        assert process.wait(120) == 75
        text = said(place)
        assert text.count("retrying the last save") == (1 if freed else 2)
        assert bool(intact_steps(run)) == freed
        assert ("error: the last state is not saved" in text) != freed
        assert "none is complete" in text


@pytest.mark.long
def test_a_directory_that_goes_away_and_comes_back(place: Path, tmp_path: Path) -> None:
    """Like a network disk; nothing is written in its place meanwhile."""
    run, away = tmp_path / "run", tmp_path / "away"
    with running(place, run) as process:
        until(process, lambda: bool(pointer.steps(run / "checkpoints")))
        run.rename(away)
        until(process, lambda: FAILED in said(place))
        assert not (run / "checkpoints").exists()
        assert intact_steps(away)
        away.rename(run)
        failed = int(re.findall(r"checkpoint (\d+) could not", said(place))[-1])
        until(process, lambda: complete_steps_after(run, failed))
        process.terminate()
        assert process.wait(120) == 75
    assert intact_steps(run)[-1] == max(losses(run))
    same_losses(place, run)


@pytest.mark.long
def test_a_directory_that_stays_away_ends_the_run(place: Path, tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    with running(place, run) as process:
        # The run may not have checked the second checkpoint yet, although it is complete.
        until(process, lambda: len(pointer.steps(run / "checkpoints")) >= 2)
        run.rename(away)
        assert process.wait(120) == 75
    last = said(place).splitlines()[-1]
    named = re.search(rf"the newest complete one is {run / 'checkpoints'}/(\d+);", last)
    assert named is not None, last
    assert int(named[1]) in intact_steps(away)
    assert "Traceback" not in said(place)
    assert not (run / "checkpoints").exists()


@pytest.mark.long
def test_a_directory_that_cannot_be_written_ends_the_run(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(pointer.steps(run / "checkpoints")))
        with unwritable(run / "checkpoints"):
            assert process.wait(120) == 75
    assert intact_steps(run)
    assert re.search(rf"error: .*{FAILED} \((Operation not permitted|Permission)", said(place))
    assert "Traceback" not in said(place)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Makes a folder read-only, even for root, which ignores permissions."""
    if os.getuid():
        folder.chmod(0o555)
    else:
        subprocess.run(["chattr", "+i", str(folder)], check=True)
    try:
        yield
    finally:
        if os.getuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["chattr", "-i", str(folder)], check=True)
