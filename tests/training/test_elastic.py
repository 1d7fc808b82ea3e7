"""A run resumes with other devices or batch sizes: same examples, same order, same losses."""

from pathlib import Path

import pytest
from program import TINY_MLM, example_ids, losses, train, two_processes, write_corpus

pytestmark = pytest.mark.slow

RUN = [
    *TINY_MLM,
    *["--data.path", "corpus", "--checkpoint.every", "1000"],
    *["--loop.record_examples", "True", "--mesh.shard", "params"],
]
STEPS = 6


def on(devices: int, *more: object) -> list[object]:
    """Returns the flags for a number of devices, and other flags."""
    return ["--mesh.fsdp", devices, "--simulate-devices", devices, *more]


# Each resumes the previous one.
SHAPES = [
    on(8, "--data.workers", 1),
    on(4, "--mesh.shard", "optimizer", "--optim.accumulate", 2, "--data.workers", 2),
    on(1, "--mesh.shard", "none", "--optim.accumulate", 4),
    ["--simulate-devices", 2, "--mesh.fsdp", 4, "--mesh.auto", True],  # as if planned for four
    on(8, "--mesh.data", 2, "--mesh.fsdp", 4, "--data.workers", 1),
]
TWO_PROCESSES = 4  # index of the shape with two processes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and an uninterrupted run on eight devices."""
    directory = tmp_path_factory.mktemp("elastic")
    write_corpus(directory)
    total = STEPS * len(SHAPES)
    train(directory, *RUN, *on(8), "--loop.steps", total, "--output-dir", "straight")
    return directory


@pytest.mark.long
def test_devices_processes_workers_sharding_and_accumulation_may_change(place: Path) -> None:
    for number, shape in enumerate(SHAPES):
        more = ["--loop.steps", STEPS * (number + 1), "--output-dir", "chain", "--resume", "latest"]
        if number == TWO_PROCESSES:
            with two_processes(place, *RUN, *shape, *more) as started:
                outputs = [process.communicate(timeout=300)[0] for process in started]
            assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
        else:
            printed = train(place, *RUN, *shape, *more)
            assert ("mesh.auto: --mesh.data 1 --mesh.fsdp 2 " in printed) == (
                "--mesh.auto" in shape
            )
            assert "data.workers" in printed
    assert example_ids(place / "chain") == example_ids(place / "straight")
    straight, chain = losses(place / "straight"), losses(place / "chain")
    assert list(chain) == list(range(1, STEPS * len(SHAPES) + 1))
    for step, loss in straight.items():
        assert chain[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.long
def test_the_global_batch_may_change(place: Path) -> None:
    """The position is the number of examples seen: the order continues after the last batch."""
    done = 0
    for batch, steps in ((8, 3), (16, 2), (4, 4)):
        done += steps
        more = ["--data.batch_size", batch, "--loop.steps", done, "--output-dir", "batches"]
        train(place, *RUN, *on(1), *more, "--resume", "latest")
    seen = [one for _, ids in example_ids(place / "batches").values() for one in ids]
    straight = [one for _, ids in example_ids(place / "straight").values() for one in ids]
    assert len(seen) == 8 * 3 + 16 * 2 + 4 * 4
    assert seen == straight[: len(seen)]
    positions = [position for position, _ in example_ids(place / "batches").values()]
    assert positions == [0, 8, 16, 24, 40, 56, 60, 64, 68]
