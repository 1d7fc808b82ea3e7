"""Measures counting the words to train a tokenizer on: seconds, memory, and bytes of the counts.

    python benchmarks/word_counting.py --folder /tmp/words --kind wordpiece --workers 1 2 1 2

Generates 285 million characters in 16 .jsonl files, of which a tenth is for validation: words by
Zipf's law, with a faster decline after rank 8,000 as in English (about 600,000 distinct ones), and
punctuation, capitals, and numbers. Counts each time in a fresh process, and prints one JSON object:
seconds of wall clock and of CPU time (of all processes), and the largest resident memory (VmHWM) of
the command and of a worker, in MiB. --ray HOST:PORT or --ray local counts on a Ray cluster.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from jaxtrain.data import cache
from jaxtrain.data.engine import Ray
from jaxtrain.data.text import documents, splitting, tokens, vocabulary, word_counts

FILES = 16
_WORDS, _COMMON = 3_000_000, 8000


def generate(folder: Path, characters: float, seed: int = 0) -> None:
    """Writes documents of 10 words or more, 700 in the mean."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(_WORDS) + 2.7
    lengths = np.minimum(2 + rng.poisson(np.log2(ranks) / 2.6), 18)
    alphabet = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    picked = rng.choice(alphabet, lengths.sum(), p=np.arange(26, 0, -1) / 351)
    letters, ends = picked.tobytes().decode(), np.cumsum(lengths)
    words = np.array([letters[e - n : e] for e, n in zip(ends, lengths, strict=True)], object)
    odds = np.where(ranks < _COMMON, 1 / ranks, (_COMMON / ranks) ** 1.7 / _COMMON)
    cumulated = np.cumsum(odds / odds.sum())
    folder.mkdir(parents=True)
    for number in range(FILES):
        left = characters / FILES
        with open(folder / f"{number:03}.jsonl", "w") as file:
            while left > 0:
                count = int(rng.lognormal(6.0, 1.0)) + 10
                at = np.searchsorted(cumulated, rng.random(count)).clip(max=_WORDS - 1)
                text = " ".join(_decorated(words[at].tolist(), rng)).replace("\n ", "\n")
                left -= len(text)
                file.write(json.dumps({"text": text}) + "\n")


def _decorated(words: list[str], rng: np.random.Generator) -> Iterator[str]:
    begins = True
    for word, mark in zip(words, rng.random(len(words)).tolist(), strict=True):
        now = word.capitalize() if begins or mark > 0.98 else word
        begins = mark < 0.06
        if begins:
            yield now + (".\n\n" if mark < 0.01 else ".")
        elif mark < 0.12:
            yield now + ","
        elif mark < 0.13:
            yield f'"{now}"'
        else:
            yield str(int(mark * 1e5)) if 0.13 < mark < 0.14 else now


def count(folder: Path, kind: Any, workers: int, ray: str | None) -> dict[str, Any]:
    """Counts once, in this process and its workers."""
    files = documents.scan(str(folder / "texts"), None, folder, "--data.path", print)
    split = splitting.assign(
        [file.documents for file in files],
        [file.name for file in files],
        train_split=0.9,
        max_examples=None,
    )
    corpus = tokens.Corpus(files=files, split=split, text_field=None)
    engine = None if ray is None else Ray(ray, workers=workers)
    threading.Thread(target=_watch, daemon=True).start()
    began = time.monotonic()
    words = vocabulary._count([corpus], kind, workers, engine)
    seconds = time.monotonic() - began
    cpu = sum(sum(resource.getrusage(who)[:2]) for who in (0, resource.RUSAGE_CHILDREN))
    return {
        "kind": kind,
        "engine": "local" if ray is None else "ray",
        "workers": workers,
        "million_characters": round(corpus.characters() / 1e6),
        "distinct": len(words),
        "digest": cache.digest(sorted(words.items())),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "driver_mib": round(_largest_mib("self")),
        "worker_mib": round(max(_peaks.values(), default=0)),
    }


_peaks: dict[int, float] = {}


def _largest_mib(pid: int | str) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _watch() -> None:
    """Notes the largest resident memory of each worker."""
    while True:
        for child in psutil.Process().children(recursive=True):
            try:
                command, mib = " ".join(child.cmdline()), _largest_mib(child.pid)
            except (psutil.Error, OSError):
                continue
            if "spawn_main" in command or command.startswith("ray::"):
                _peaks[child.pid] = mib
        time.sleep(0.2)


def _counted_bytes(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Replaces ``word_counts.merge``, and prints what workers send."""
    sizes = [len(json.dumps(part, ensure_ascii=False).encode()) for part in parts]
    print(json.dumps({"parts": len(sizes), "sent_mb": round(sum(sizes) / 1e6, 1)}))
    return Counter()


def main() -> None:
    """Generates the text and counts it in fresh processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--characters", type=float, default=285e6)
    parser.add_argument("--kind", nargs="+", default=["wordpiece"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ray", help="address of a Ray cluster, or local")
    parser.add_argument("--bytes", action="store_true", help="print only the size of the counts")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if not (flags.folder / "texts").exists():
        generate(flags.folder / "texts", flags.characters)
    if flags.bytes:
        word_counts.merge = _counted_bytes
    if flags.here or flags.bytes:
        print(json.dumps(count(flags.folder, flags.kind[0], flags.workers[0], flags.ray)))
        return
    ray = () if flags.ray is None else ("--ray", flags.ray)
    for kind in flags.kind:
        for workers in flags.workers:
            one = ("--folder", flags.folder, "--kind", kind, "--workers", str(workers), *ray)
            subprocess.run([sys.executable, __file__, *map(str, one), "--here"], check=True)


if __name__ == "__main__":
    main()
