"""Times the training steps beside PyTorch's on one GPU: GPT, BERT and the video autoencoder.

    python benchmarks/gpu/b_beside_torch.py [--minutes 6] [--tiny]

Both sides of a comparison alternate in one process on the same card, with the same weights, batches
and optimizer. PyTorch runs with torch.compile, autocast to bfloat16 and SDPA, and for videos with
channels last. The video comes last, because XLA tries all convolutions first: four minutes without
the results that another chapter kept.
"""

import chapter

# One process each: both sides compile for a minute.
ONCE = ("--processes", "1", "--rounds", "5")
# Eight clips, as in the other chapters, so that the same convolutions have been tried. Both sides
# fit in 80 GB if PyTorch needs less than twice as much as our 24 GiB.
COMPARISONS = {
    "gpt of depth 12": ("gpt_vs_torch.py", ONCE),
    "BERT base": ("mlm_vs_transformers.py", ONCE),
    "video, 8 clips": ("video_ae_vs_torch.py", (*ONCE, "--data.batch_size", "8")),
}
FEW = ("--processes", "1", "--rounds", "1")
TINY = {
    "gpt of depth 12": (
        *("--model.depth", "2", "--model.vocab_size", "512", "--model.sequence_length", "64"),
    ),
    "BERT base": (
        *("--model.hidden", "32", "--model.layers", "1", "--model.heads", "2"),
        *("--model.vocab_size", "512", "--model.sequence_length", "32", "--data.batch_size", "2"),
    ),
    "video, 8 clips": (
        *("--model.height", "32", "--model.width", "32", "--model.encoder_width", "8"),
        *("--model.decoder_widths", "16", "8", "8", "8", "--data.batch_size", "1"),
    ),
}


def main() -> None:
    """Runs the chapter."""
    flags = chapter.flags(__doc__).parse_args()
    one = chapter.Chapter(flags)
    for what, (script, arguments) in COMPARISONS.items():
        one.script(what, script, *((*FEW, *TINY[what]) if flags.tiny else arguments))


if __name__ == "__main__":
    main()
