"""Measures the peak anonymous memory of all processes of a run, on a generated corpus.

    python benchmarks/text_memory.py --megabytes 2000 --folder /tmp/corpus

Writes a corpus (.jsonl) and trains `demo_mlm` on it from the command line, which reads the files,
trains a tokenizer, tokenizes everything, lays out the examples, and runs a few steps. Meanwhile,
it sums `RssAnon` (/proc) over the process and its descendants: memory that the kernel cannot free
by dropping file pages. Prints one JSON object.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

STEPS = 20
_LOOK_EVERY_S = 0.1


def generate(path: Path, megabytes: float, seed: int = 0) -> None:
    """Generates documents of 2 to 60 sentences, with words by Zipf's law and some unique ones."""
    rng = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=n % 11 + 2)) for n in range(50_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    pool = rng.choices(words, weights, k=500_000)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            sentences = []
            for _ in range(rng.randint(2, 60)):
                start = rng.randrange(len(pool) - 40)
                rare = f"{rng.choice(words)}{rng.randrange(10**6)}"
                sentence = [*pool[start : start + rng.randint(4, 30)], rare]
                sentences.append(" ".join(sentence).capitalize() + ".")
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")


def anonymous_gib(pid: int) -> float:
    """Returns the anonymous, unshared memory of a process and its descendants, GiB."""
    total = 0
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0.0
    for member in family:
        try:
            status = Path(f"/proc/{member}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total / 2**30


def measured(command: list[str], folder: Path) -> dict[str, float]:
    """Runs a command; returns its peak anonymous memory, the time of the peak, and its duration.

    Raises:
        SystemExit: the command failed.
    """
    log = folder / "output.txt"
    began, peak, peak_at_s = time.monotonic(), 0.0, 0.0
    environment = {**os.environ, "JAXTRAIN_CACHE": str(folder / "cache")}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        while process.poll() is None:
            now = anonymous_gib(process.pid)
            if now > peak:
                peak, peak_at_s = now, time.monotonic() - began
            time.sleep(_LOOK_EVERY_S)
    if process.returncode:
        raise SystemExit(
            f"the run failed with exit code {process.returncode}:\n{log.read_text()[-2000:]}"
        )
    return {
        "peak_anonymous_gib": round(peak, 3),
        "peak_at_s": round(peak_at_s, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Generates the corpus, trains on it, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=2000.0)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="folder for the corpus and the run; requires twice the size of the corpus",
    )
    flags = parser.parse_args()
    folder = flags.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        generate(corpus, flags.megabytes)
    command = [
        *(sys.executable, "-m", "jaxtrain.main", "--config", "demo_mlm"),
        *("--data.path", str(corpus), "--loop.steps", str(STEPS), "--output-dir", "run"),
        *("--loop.eval_every", str(STEPS), "--checkpoint.every", str(STEPS), "--resume", "latest"),
    ]
    found = measured(command, folder)
    size = corpus.stat().st_size / 1e6
    print(json.dumps({"megabytes": round(size), "steps": STEPS, **found}))


if __name__ == "__main__":
    main()
