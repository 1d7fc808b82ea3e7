"""Trains on Shakespeare in nanoGPT's setting for GPUs, to its end, on one GPU.

    python benchmarks/gpu/f_shakespeare.py --data shakespeare [--minutes 6] [--tiny]

82 million characters: 5,000 steps of 64 x 256, 6 layers of width 384, dropout 0.2, and the best
validation counts. First the GPT of the config `shakespeare`, then nanoGPT's own network with its
optimizer (benchmarks/nanogpt_shakespeare.py). Its README says 1.4697 nats per character.
"""

import math
import shutil
import time

import chapter

PUBLISHED = "published: 1.4697 by nanoGPT's program"
_LENGTH = ("--loop.steps", "5000", "--loop.eval_every", "250", "--checkpoint.every", "1000")
_BATCH = ("--model.sequence_length", "256", "--data.batch_size", "64")
_SIZE = ("--model.width", "384", "--model.heads", "6", "--model.dropout", "0.2")
_REAL = (*_BATCH, *_SIZE, *_LENGTH, "--precision", "bfloat16")
_OWN = str(chapter.HERE.parent / "nanogpt_shakespeare.py")
RUNS = {
    "Shakespeare, GPT of 2026": ("shakespeare", "--model.depth", "6", *_REAL),
    "Shakespeare, nanoGPT's network and AdamW": (_OWN, "--model.layers", "6", *_REAL),
}
_SHORT = (
    *("--model.sequence_length", "16", "--model.width", "16", "--model.heads", "2"),
    *("--data.batch_size", "2", "--data.workers", "0", "--model.dropout", "0.2"),
    *("--loop.steps", "20", "--loop.eval_every", "10", "--checkpoint.every", "20"),
    *("--optim.warmup_steps", "None", "--optim.warmup_fraction", "0.1"),
)
TINY = {
    "Shakespeare, GPT of 2026": ("shakespeare", "--model.depth", "2", *_SHORT),
    "Shakespeare, nanoGPT's network and AdamW": (_OWN, "--model.layers", "2", *_SHORT),
}


def main() -> None:
    """Runs the chapter."""
    parser = chapter.flags(__doc__)
    parser.add_argument("--data", help="folder with train.txt and valid.txt (docs/guides/gpt.md)")
    flags = parser.parse_args()
    if not flags.tiny and flags.data is None:
        parser.error("--data FOLDER is missing: docs/guides/gpt.md has the commands that make it")
    one = chapter.Chapter(flags)
    data = ("--data.demo", "True") if flags.data is None else ("--data.path", flags.data)
    for what, words in (TINY if flags.tiny else RUNS).items():
        if not one.begins(what, 90.0):
            continue
        run, began = one.work / "shakespeare", time.monotonic()
        shutil.rmtree(run, ignore_errors=True)
        output = one.command(
            *("train", *words, *data, "--output-dir", str(run)), at_most_s=one.left_s - 10
        )
        took_s = time.monotonic() - began
        name, *typed = (word.replace(_OWN, "benchmarks/nanogpt_shakespeare.py") for word in words)
        one.row(
            what,
            f"{best(chapter.records(run))}, {took_s:.0f} s with the compilation; {PUBLISHED}"
            + (f"; {chapter.last(output)}" if "exit code" in chapter.last(output) else ""),
            " ".join(("jaxtrain train", name, "--data.path shakespeare", *typed)),
        )


def best(found: dict[int, dict[str, float]]) -> str:
    """Describes the validations, in nats per character."""
    nats = {
        step: record["val/bits_per_byte"] * math.log(2)
        for step, record in found.items()
        if "val/bits_per_byte" in record
    }
    if not nats:
        return "failed: no validation"
    listed = ", ".join(f"{value:.4f} ({step})" for step, value in sorted(nats.items()))
    return f"best {min(nats.values()):.4f} nats per character, of {listed}"


if __name__ == "__main__":
    main()
