"""Paths may have any bytes; checkpoints need UTF-8, which is checked before a run starts."""

import os
import random
from pathlib import Path

import program
import pytest
from checkpoint.small_state import make_state

from jaxtrain.checkpoint.restore import restore
from jaxtrain.errors import InputError

LATIN = os.fsdecode(b"caf\xe9")


@pytest.mark.long
def test_a_run_reads_paths_that_are_not_utf_8(tmp_path: Path) -> None:
    """Files, folders, the cache, validation text, and the tokenizer."""
    rng = random.Random(0)
    for folder, files in ((f"data-{LATIN}", 3), (f"val-{LATIN}", 1)):
        (tmp_path / folder).mkdir()
        for number in range(files):
            text = " ".join(rng.choices(["red", "green", "blue", "one", "two", "three"], k=400))
            (tmp_path / folder / f"{number}-{LATIN}.txt").write_text(text)
    flags = (*program.TINY_MLM, "--data.demo", "False", "--loop.steps", 2, "--loop.eval_every", 2)
    data = ("--data.path", f"data-{LATIN}", "--data.val_path", f"val-{LATIN}")
    cache = ("--data.cache_dir", f"cache-{LATIN}")
    program.train(tmp_path, *flags, *data, *cache, "--output-dir", "run")
    assert "step 2/2 | validation" in (tmp_path / "run/log.txt").read_text()
    refused = program.run(tmp_path, *flags, "--data.path", f"data-{LATIN}", "--output-dir", LATIN)
    assert refused.returncode == 2
    assert "has a name that is not UTF-8" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / LATIN).exists()


def test_a_checkpoint_in_such_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not UTF-8, .*: move it to another folder"):
        restore(tmp_path / LATIN / "checkpoints" / "3.json", make_state(3))
