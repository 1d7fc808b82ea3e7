"""Runs of two real processes with two virtual devices each."""

import resource
from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos
from program import TINY_MLM, records, train, two_processes, wait_for, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow

FOUR = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.shard", "params"],
    *["--simulate-devices", "4", "--data.workers", "0"],
    *["--loop.steps", "6", "--checkpoint.every", "3"],
    *["--loop.eval_every", "3", "--loop.eval_examples", "11"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a directory with a corpus."""
    directory = tmp_path_factory.mktemp("processes")
    write_corpus(directory)
    return directory


def two(directory: Path, *arguments: object, **variables: Any) -> Any:
    """Starts both processes of a run on four devices."""
    return two_processes(directory, *FOUR, *arguments, **variables)


def test_two_processes_reproduce_the_metrics_of_one(place: Path) -> None:
    train(place, *FOUR, "--output-dir", "one")
    with two(place, "--output-dir", "two") as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    one, both = records(place / "one"), records(place / "two")
    assert sorted(one) == sorted(both) == [1, 2, 3, 4, 5, 6]
    for step, record in one.items():
        assert both[step]["train/loss"] == pytest.approx(record["train/loss"], rel=1e-5), step
        validated = sorted(name for name in record if name.startswith("val/"))
        names = ["val/accuracy", "val/loss", "val/pseudo_perplexity"]
        assert validated == (names if step in (3, 6) else [])
        for name in validated:
            assert both[step][name] == pytest.approx(record[name], rel=1e-5), (step, name)
    steps = sorted(path.name for path in (place / "two" / "checkpoints").iterdir())
    assert steps == sorted(path.name for path in (place / "one" / "checkpoints").iterdir())
    assert (place / "two" / "log.txt").exists()
    assert (place / "two" / "log.1.txt").exists()
    assert "step 6/6" in outputs[0]
    assert "step 6/6" not in outputs[1]


@pytest.mark.long  # test_process_group.py has a shorter test
def test_wrong_input_ends_both_processes(place: Path) -> None:
    with two(place, "--output-dir", "wrong", "--data.path", "nowhere") as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "nowhere" in output
        assert "Traceback" not in output


VIDEO = [
    *("--config", "demo", "--model.frames", 4, "--model.height", 16, "--model.width", 16),
    *("--model.encoder_width", 8, "--model.decoder_widths", 16, 8, 8, 8),
    *("--model.init", "random", "--optim.muon", "None", "--data.path", "videos"),
    *("--data.batch_size", 4, "--data.workers", 0, "--mesh.data", 2, "--simulate-devices", 2),
    *("--loop.steps", 2, "--loop.eval_every", 2, "--loop.eval_examples", 4),
    *("--checkpoint.every", 2),
]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("videos")
    for number in range(8):
        sample_videos.write(directory / "videos" / f"{number}.mp4", 20 + number)
    return directory


def test_processes_with_caches_of_their_own_do_not_cut_all_videos_twice(videos: Path) -> None:
    caches = [{"JAXTRAIN_CACHE": str(videos / f"cache-{number}")} for number in range(2)]
    with two_processes(
        videos, *VIDEO, "--output-dir", "refused", first=caches[0], second=caches[1]
    ) as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "the processes see different sets to make" in output
        assert "set --data.cache_dir to storage that every host sees" in output
        assert "jaxtrain prepare clips" in output
        assert "Traceback" not in output
    assert not list(videos.glob("cache-*/sets/*/*.tar"))


@pytest.mark.long  # test_sets.py has a shorter test
def test_two_processes_cut_videos_together(videos: Path) -> None:
    cache = {"JAXTRAIN_CACHE": str(videos / "cache")}
    with two_processes(videos, *VIDEO, "--output-dir", "run", both=cache) as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert "cutting 8 videos" in outputs[0]
    assert "8 videos (8 good)" in outputs[0]
    (folder,) = (videos / "cache/sets").iterdir()
    assert list(folder.glob("*.tar"))
    assert records(videos / "run")[2]["val/psnr"] > 0


UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NOT_A_BYTE = (0, resource.RLIM_INFINITY)
OFTEN = ["--loop.steps", 1_000_000, "--checkpoint.every", 8, "--loop.eval_every", "None"]


@pytest.mark.long
def test_a_save_that_fails_in_one_process_fails_in_both(place: Path) -> None:
    """Neither waits for the other in vain; the next save works in both, or both end."""
    run = place / "fails"
    folder, log = run / "checkpoints", run / "log.txt"
    failed = "(process 1: File too large)"
    with two(place, "--output-dir", run, *OFTEN) as started:
        wait_for(lambda: pointer.steps(folder), *started)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, NOT_A_BYTE)
        wait_for(lambda: failed in log.read_text(), *started)  # the log of the other process
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, UNLIMITED)
        newest = max(pointer.steps(folder))
        wait_for(lambda: max(pointer.steps(folder), default=0) > newest, *started)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, NOT_A_BYTE)
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], "\n".join(outputs)
    for output in outputs:
        last = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(last) == 1, output
        assert last[0].startswith("error: 3 saves in a row have failed: ")
        assert failed in last[0]
        assert "Traceback" not in output
    kept = pointer.steps(folder)
    assert kept[-1] > newest
    assert [pointer.verify(folder / f"{step}.json") for step in kept] == [""] * len(kept)
    assert {path.name for path in folder.iterdir()} == {"files", *(f"{step}.json" for step in kept)}
