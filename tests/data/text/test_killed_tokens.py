"""A kill while tokenizing or in the middle of an epoch changes neither tokens nor losses."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, records

from jaxtrain.data.text import tokenizer

STEPS = 150
WORDS = ["".join(random.Random(n).choices("aeinorst", k=n % 7 + 2)) for n in range(300)]


def write(folder: Path, megabytes: float) -> None:
    """Writes a .jsonl of made-up sentences, and a tokenizer that has some of their words."""
    rng = random.Random(0)
    with open(folder / "corpus.jsonl", "w") as file:
        while file.tell() < megabytes * 1e6:
            text = ". ".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(20))
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer.train([" ".join(WORDS * 3)], 300).save(str(folder / "tokenizer.json"))


def arguments(folder: Path) -> list[object]:
    given = ["--data.path", folder / "corpus.jsonl", "--data.tokenizer", folder / "tokenizer.json"]
    return [
        *(*TINY_MLM, *given, "--output-dir", "run", "--resume", "latest"),
        *("--loop.steps", STEPS, "--checkpoint.every", 30),
    ]


def killed_when(condition: Callable[[], bool], directory: Path, folder: Path) -> None:
    """Starts the run, and kills it and all its processes once the condition holds."""
    with open(directory / "said.txt", "a") as said:
        process = subprocess.Popen(
            command(*arguments(folder)),
            cwd=directory,
            env=environment(directory),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        while not condition():
            assert process.poll() is None, (directory / "said.txt").read_text()
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finished(directory: Path, folder: Path) -> str:
    done = subprocess.run(
        command(*arguments(folder)),
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shards(directory: Path) -> dict[str, bytes]:
    """The files of the finished shards."""
    found = (directory / "cache/text").glob("shard-*/*")
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


@pytest.mark.long
def test_kills_do_not_change_tokens_or_losses(tmp_path: Path) -> None:
    write(tmp_path, 8)
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    for directory in (calm, struck):
        directory.mkdir()
    finished(calm, tmp_path)

    def half_tokenized() -> bool:
        return any(path.stat().st_size for path in struck.glob("cache/text/.jobs/**/unsorted"))

    killed_when(half_tokenized, struck, tmp_path)
    assert not shards(struck)
    killed_when(lambda: any(struck.glob("run/checkpoints/*.json")), struck, tmp_path)
    assert "resumed from" in finished(struck, tmp_path)
    assert shards(struck) == shards(calm)
    assert len(shards(calm)) == 4
    mine, theirs = records(struck / "run"), records(calm / "run")
    assert sorted(mine) == sorted(theirs) == list(range(1, STEPS + 1))
    for step, record in theirs.items():
        assert mine[step]["train/loss"] == record["train/loss"], step
