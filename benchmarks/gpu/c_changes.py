"""Times what may make the three steps faster, on one GPU: single kernels first, then steps.

    python benchmarks/gpu/c_changes.py [--before CHECKOUT] [--minutes 6] [--tiny]

With `--before`, the steps of another checkout are timed on the same card, next to those of this
one. The video steps come last: cold, their convolutions take four minutes, so give them minutes of
their own (`--only video`) unless another chapter has kept its results.
"""

import argparse
from pathlib import Path

import chapter
import sizes
import tiny

_ONE = (*sizes.ONE_GPU, "--data.demo", "True")
ADAMW = ("--optim.muon", "None", "--optim.peak_lr", "3e-4")
STEPS = {
    "BERT base": ("mlm_h200_8", *sizes.BERT_BASE, *_ONE),
    "gpt of depth 12, AdamW": ("gpt_h200_1", *ADAMW, "--data.batch_size", "32", *_ONE),
    "gpt of depth 12, Muon": ("gpt_h200_1", "--data.batch_size", "32", *_ONE),
    "video, 8 clips": ("h100_8", *sizes.TWELVE, "--data.batch_size", "8", *_ONE),
}
TINY = {
    "BERT base": ("mlm_h200_8", *tiny.MASKED),
    "gpt of depth 12, AdamW": ("gpt_h200_1", *ADAMW, *tiny.GPT),
    "gpt of depth 12, Muon": ("gpt_h200_1", *tiny.GPT),
    "video, 8 clips": ("h100_8", *tiny.VIDEO),
}
# Matmuls by XLA's own Triton kernels where those are faster, or all by cuBLASLt: what each model
# does not do by itself (`ModelConfig.gpu_options`).
OTHER_MATMULS = {
    "BERT base": "--xla_gpu_enable_triton_gemm=True",
    "gpt of depth 12, AdamW": "--xla_gpu_enable_triton_gemm=False",
}


def main() -> None:
    """Runs the chapter."""
    parser = chapter.flags(__doc__)
    parser.add_argument("--before", type=Path, help="a checkout without the changes")
    flags = parser.parse_args()
    one = chapter.Chapter(flags)
    table = TINY if flags.tiny else STEPS
    only_tiny = ("--tiny",) if flags.tiny else ()
    one.script("single kernels", "gpu/kernels.py", *only_tiny, at_most_s=170.0)
    for what, xla_flags in OTHER_MATMULS.items():
        beside(one, flags, table, what)
        name, *typed = table[what]
        one.steps(f"{what}, {xla_flags}", name, typed, xla_flags=xla_flags)
    for what in ("gpt of depth 12, Muon", "video, 8 clips"):
        beside(one, flags, table, what)


def beside(
    one: chapter.Chapter,
    flags: argparse.Namespace,
    table: dict[str, tuple[str, ...]],
    what: str,
) -> None:
    """Times a step, and that of the other checkout, if there is one."""
    name, *typed = table[what]
    one.steps(what, name, typed)
    if flags.before is not None:
        one.steps(f"{what}, before", name, typed, checkout=flags.before.absolute())


if __name__ == "__main__":
    main()
