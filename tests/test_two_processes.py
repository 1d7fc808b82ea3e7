"""Two real processes with four virtual devices each are one run."""

import socket
import subprocess
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, losses, train, write_corpus


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    arguments = [
        *TINY_MLM,
        *[
            "--data.path",
            "corpus",
            "--mesh.data",
            "2",
            "--mesh.fsdp",
            "4",
            "--mesh.shard",
            "params",
        ],
        *[
            "--simulate-devices",
            "8",
            "--loop.steps",
            "6",
            "--checkpoint.every",
            "3",
            "--data.workers",
            "1",
        ],
        *["--loop.eval_every", "3", "--loop.eval_examples", "11", "--optim.peak_lr", "1e-2"],
    ]
    train(tmp_path, *arguments, "--output-dir", "one")
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            command(*arguments, "--output-dir", "two"),
            cwd=tmp_path,
            env=environment(
                tmp_path,
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(number),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert sorted(one) == sorted(two) == [1, 2, 3, 4, 5, 6]
    for step, loss in one.items():
        assert two[step] == pytest.approx(loss, rel=1e-5), step
    steps = sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir())
    assert steps == sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert (tmp_path / "two" / "log.txt").exists()
    assert (tmp_path / "two" / "log.1.txt").exists()
    assert "step 6/6" in outputs[0]
    assert "step 6/6" not in outputs[1]
    # And one process goes on with what two have saved.
    more = [*arguments, "--loop.steps", 8, "--output-dir", "two", "--resume", "latest"]
    train(tmp_path, *more)
    assert sorted(losses(tmp_path / "two")) == [1, 2, 3, 4, 5, 6, 7, 8]
