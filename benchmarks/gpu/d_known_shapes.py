"""Times steps of sizes that people know, on one GPU, beside what others have published.

    python benchmarks/gpu/d_known_shapes.py [--minutes 6] [--tiny]

The part of one GPU in a run on several: its own sequences per step, and the optimizer once.
"""

import chapter
import tiny

_DEMO = ("--data.demo", "True")
_HALF = ("--data.batch_size", "32", "--optim.accumulate", "2", "--mesh.fsdp", "1")
# What: published for it, config, and overrides.
SHAPES = {
    "autoresearch: gpt of 2026, depth 8, V 8192, 2^19 tokens": (
        "published: 1.665M tokens/s, 39.8% MFU on one H100",
        *("autoresearch_h100_1", *_DEMO),
    ),
    "nanochat: gpt of 2026, depth 24, 32 sequences": (
        "published: 92,500 to 100,000 tokens/s for each of 8 H100, with fp8",
        *("gpt_2026_h100_8", *_HALF, *_DEMO),
    ),
    "ettin, 150M, 576 sequences of 1,024": (
        "published: 303,000 tokens/s for each H100",
        *("ettin_150m_h100_8", "--mesh.fsdp", "1", "--data.batch_size", "576", *_DEMO),
    ),
    "nanochat: gpt of 2026, depth 20, 32 sequences": (
        "nothing published for this depth",
        *("gpt_2026_h100_8", "--model.depth", "20", *_HALF, *_DEMO),
    ),
    "ModernBERT base, 8 sequences of 8,192": (
        "no training speed published",
        *("ettin_150m_h100_8", "--mesh.fsdp", "1", "--optim.accumulate", "1"),
        *("--model.sequence_length", "8192", "--data.batch_size", "8", *_DEMO),
    ),
}
_SMALL = {
    "autoresearch_h100_1": tiny.GPT,
    "gpt_2026_h100_8": tiny.GPT,
    "ettin_150m_h100_8": (*tiny.MASKED, "--model.ff", "64"),
}


def main() -> None:
    """Runs the chapter."""
    flags = chapter.flags(__doc__).parse_args()
    one = chapter.Chapter(flags)
    for what, (published, name, *typed) in SHAPES.items():
        chosen = _SMALL[name] if flags.tiny else typed
        one.steps(what, name, chosen, note=published)


if __name__ == "__main__":
    main()
