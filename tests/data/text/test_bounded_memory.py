"""Anonymous memory during text preparation does not grow with the corpus.

benchmarks/text_memory.py measures a larger case: 2 GB and a complete run.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import text_memory

PROGRAM = """
import json, sys
from pathlib import Path
from jaxtrain.data import text; from jaxtrain.data.text import shards, tokenizer, vocabulary
from small_text import Model
shards._CHUNK_CHARACTERS, shards.GROUP_BYTES, shards.LARGE_BYTES = 100_000, 2**20, 2**20
vocabulary.MOST_CHARACTERS = 10**6
tokenizer._MOST_COUNTED, tokenizer._MOST_LEARNED = 2000, 1000
config = text.Masked(path=sys.argv[1], batch_size=2, cache_dir=sys.argv[2])
sources = config.open(Model(vocab_size=1000), seed=0, say=lambda line: None)
for index in range(0, len(sources.train), 50):
    sources.train.sequence(index)
"""


def peak_gib(folder: Path, megabytes: float) -> float:
    folder.mkdir()
    text_memory.generate(folder / "corpus.jsonl", megabytes)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(folder / "corpus.jsonl"), str(folder / "cache")]
    return text_memory.measured(command, folder)["peak_anonymous_gib"]


@pytest.mark.long
def test_four_times_the_text_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    small, large = peak_gib(tmp_path / "small", 3), peak_gib(tmp_path / "large", 12)
    assert small > 0.01
    assert large < small + 0.006, (small, large)  # 9 MB are 0.0084 GiB


def test_the_measurement_sees_children(tmp_path: Path) -> None:
    hold = "import time; held = bytes(range(256)) * 2**18; time.sleep(1)"  # 64 MiB
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    found = text_memory.measured([sys.executable, "-c", nested], tmp_path)
    assert 1 / 16 < found["peak_anonymous_gib"] < 0.2
    json.dumps(found)
