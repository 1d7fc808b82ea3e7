"""Holds overrides shared by several measurements."""

ONE_GPU = (
    *("--mesh.data", "1", "--mesh.fsdp", "1", "--mesh.shard", "none"),
    *("--optim.accumulate", "1"),
)
# The clips of h100_8 that were measured, of which the loss compares nine frames.
TWELVE = ("--model.frames", "12")
# BERT base (arXiv 1810.04805) with full-length sequences.
BERT_BASE = (
    *("--model.hidden", "768", "--model.layers", "12", "--model.heads", "12"),
    *("--model.sequence_length", "512", "--model.vocab_size", "30522"),
    *("--data.batch_size", "64"),
)
