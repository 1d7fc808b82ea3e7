"""Overrides with which a chapter can be tried on a CPU in a minute."""

_ONE = (
    *("--mesh.data", "1", "--mesh.fsdp", "1", "--optim.accumulate", "1", "--data.workers", "0"),
    *("--precision", "float32"),
)
GPT = (
    *("--model.depth", "2", "--model.vocab_size", "512", "--model.sequence_length", "64"),
    *("--data.batch_size", "2", *_ONE),
)
MASKED = (
    *("--model.hidden", "32", "--model.layers", "1", "--model.heads", "2"),
    *("--model.vocab_size", "512", "--model.sequence_length", "32", "--data.batch_size", "2"),
    *_ONE,
)
VIDEO = (
    *("--model.frames", "8", "--model.height", "32", "--model.width", "32"),
    *("--model.encoder_width", "8", "--model.decoder_widths", "16", "8", "8", "8"),
    *("--data.batch_size", "1", *_ONE),
)
