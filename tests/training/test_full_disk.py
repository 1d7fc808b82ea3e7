"""A disk that fills, vanishes or refuses while the real program runs: it goes on, or ends with 75.

On a small file system of its own where one can be mounted; elsewhere a limit on the size of files
stands in for the full disk. Neither is skipped.
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

from jaxtrain.checkpoint import layout, manifest

pytestmark = pytest.mark.slow

ARGUMENTS = [
    *[*TINY_MLM, "--data.path", "corpus", "--simulate-devices", "1"],
    *["--loop.steps", "1000000", "--checkpoint.every", "20", "--checkpoint.keep", "2"],
]
DISK_BYTES = 4 * 2**20
FAILED = "could not be written"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and the first losses of an undisturbed run."""
    directory = tmp_path_factory.mktemp("full")
    write_corpus(directory)
    train(directory, *ARGUMENTS, "--loop.steps", 200, "--output-dir", "straight")
    return directory


class Disk:
    """A disk that can be filled and freed.

    Attributes:
        path: where it is.
        mounted: whether it is a file system of its own.
    """

    def __init__(self, path: Path, mounted: bool) -> None:
        self.path = path
        self.mounted = mounted
        self._fill = path / "fill"

    def fill(self, process: subprocess.Popen[str]) -> None:
        """Leaves no byte for the process."""
        if not self.mounted:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        descriptor = os.open(self._fill, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, bytes(4096))
        os.close(descriptor)

    def free(self, process: subprocess.Popen[str]) -> None:
        """Gives it back."""
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
    """The program, which says everything into ``out.txt``; it does not outlive the block."""
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
    """Waits for it while the program runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def said(place: Path) -> str:
    return (place / "out.txt").read_text()


def whole(run: Path) -> list[int]:
    """The steps whose checkpoints are what was saved; there is nothing else."""
    folder = run / layout.CHECKPOINTS
    found = layout.steps(folder)
    assert [manifest.verify(folder / str(step)) for step in found] == [""] * len(found)
    return found


def same_losses(place: Path, run: Path, *, lost: bool = False) -> None:
    """As if nothing had happened; ``lost``: records that no disk would take may be missing."""
    straight, found = losses(place / "straight"), losses(run)
    common = straight.keys() & found.keys()
    assert len(common) > 20
    assert lost or sorted(found) == list(range(1, max(found) + 1))
    assert {step: found[step] for step in common} == {step: straight[step] for step in common}


def test_three_failures_end_the_run_and_it_goes_on_later(place: Path, disk: Disk) -> None:
    run = disk.path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(layout.steps(run / "checkpoints")))
        disk.fill(process)
        assert process.wait(120) == 75, said(place)
        *_, last = said(place).splitlines()
        assert re.fullmatch(rf"error: 3 saves in a row have failed: .*{FAILED} .*latest", last)
        assert said(place).count(f"warning: checkpoint {run}/checkpoints") == 3
        assert "Traceback" not in said(place)
        kept = whole(run)
        assert f"the newest complete one is {run / 'checkpoints' / str(kept[-1])};" in last
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left == {str(step) for step in kept}  # no half ones
        if disk.mounted:  # a launcher starts it again, and again
            again = program.run(place, *ARGUMENTS, *resumed(run, kept[-1] + 30))
            assert again.returncode == 75, again.stderr
            assert re.fullmatch(r"error: cannot write in .*No space left.*\n", again.stderr)
        disk.free(process)
    train(place, *ARGUMENTS, *resumed(run, kept[-1] + 30))
    assert whole(run)[-1] == kept[-1] + 30
    same_losses(place, run, lost=True)


def resumed(run: Path, steps: int) -> list[object]:
    return ["--loop.steps", steps, "--output-dir", run, "--resume", "latest"]


def test_a_run_survives_a_failed_save(place: Path, disk: Disk) -> None:
    run = disk.path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(layout.steps(run / "checkpoints")))
        disk.fill(process)
        until(process, lambda: FAILED in said(place))
        disk.free(process)
        failed = int(re.findall(r"checkpoints/(\d+) could not", said(place))[-1])
        until(process, lambda: whole_steps_after(run, failed))
        process.terminate()
        assert process.wait(120) == 75
    assert whole(run)[-1] == max(losses(run))
    assert "written again" in said(place) or "log.txt" not in said(place)
    same_losses(place, run, lost=True)


def whole_steps_after(run: Path, step: int) -> bool:
    return any(one > step for one in layout.steps(run / "checkpoints"))


@pytest.mark.parametrize("freed", [True, False])
def test_the_last_save_is_tried_again(place: Path, disk: Disk, freed: bool) -> None:
    run = disk.path / "run"
    with running(place, run, "--checkpoint.every", 1_000_000) as process:
        until(process, lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 2)
        disk.fill(process)
        process.terminate()
        until(process, lambda: "the last save is tried again" in said(place))
        if freed:
            disk.free(process)
        assert process.wait(120) == 75
        text = said(place)
        assert text.count("tried again") == 1 if freed else 2
        assert bool(whole(run)) == freed
        assert ("error: the last state is not saved" in text) != freed
        assert "no complete one exists" in text


def test_a_directory_that_goes_away_and_comes_back(place: Path, tmp_path: Path) -> None:
    """As a network disk does; nothing is written in its place meanwhile."""
    run, away = tmp_path / "run", tmp_path / "away"
    with running(place, run) as process:
        until(process, lambda: bool(layout.steps(run / "checkpoints")))
        run.rename(away)
        until(process, lambda: FAILED in said(place))
        assert not (run / "checkpoints").exists()
        assert whole(away)
        away.rename(run)
        failed = int(re.findall(r"checkpoints/(\d+) could not", said(place))[-1])
        until(process, lambda: whole_steps_after(run, failed))
        process.terminate()
        assert process.wait(120) == 75
    assert whole(run)[-1] == max(losses(run))
    same_losses(place, run)


def test_a_directory_that_stays_away_ends_the_run(place: Path, tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    with running(place, run) as process:
        # The program knows the first of two; the second may be whole a moment before it does.
        until(process, lambda: len(layout.steps(run / "checkpoints")) >= 2)
        run.rename(away)
        assert process.wait(120) == 75
    last = said(place).splitlines()[-1]
    named = re.search(rf"the newest complete one is {run / 'checkpoints'}/(\d+);", last)
    assert named is not None, last
    assert int(named[1]) in whole(away)
    assert "Traceback" not in said(place)
    assert not (run / "checkpoints").exists()


def test_a_directory_that_cannot_be_written_ends_the_run(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(place, run) as process:
        until(process, lambda: bool(layout.steps(run / "checkpoints")))
        with unwritable(run / "checkpoints"):
            assert process.wait(120) == 75
    assert whole(run)
    assert re.search(rf"error: .*{FAILED} \((Operation not permitted|Permission)", said(place))
    assert "Traceback" not in said(place)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Nobody writes into it: not even root, whom permissions do not stop."""
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
