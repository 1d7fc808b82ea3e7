"""Anonymous memory during text preparation does not grow with the corpus.

benchmarks/text_memory.py measures a larger case: 2 GB and a complete run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import text_memory

PROGRAM = """
import json, sys
from jaxtrain.data import text
from jaxtrain.jobs import engines
from jaxtrain.data.text import shards, tokenizer, vocabulary
from data.text.small_text import Model
tokenizer._MOST_COUNTED, tokenizer._MOST_LEARNED = 2000, 1000
vocabulary.MOST_CHARACTERS = 10**6
shards._CHUNK_CHARACTERS, shards.GROUP_BYTES, shards.LARGE_BYTES = 100_000, 2**20, 2**20
shards.Processes = lambda workers, say: engines.Threads(1)  # all memory is that of this process
make, kib = shards._make, []
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
def measured(*arguments):
    details = make(*arguments)
    kib.append(anonymous())
    return details
shards._make = measured
config = text.Masked(path=sys.argv[1], batch_size=2, cache_dir=sys.argv[2])
sources = config.open(Model(vocab_size=1000), seed=0, say=lambda line: None)
for index in range(0, len(sources.train), 50):
    sources.train.sequence(index)
print(json.dumps([*kib, anonymous()]))
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From shard to shard, and while examples are laid out and read."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    text_memory.generate(tmp_path / "corpus.jsonl", 12)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "corpus.jsonl"), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kib = json.loads(done.stdout)
    assert len(kib) == 12 + 1
    assert max(kib) < kib[1] + 6 * 1024, kib
