"""The GPT of 2025 at the size of gpt_2026."""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "precision": "float32",
        "model.vocab_size": 2048,
        "model.sequence_length": 256,
        "model.depth": 4,
        "model.width": 64,
        "model.heads": 1,
        "data.batch_size": 8,
        "optim.accumulate": 1,
        "optim.muon": config.Muon(momentum_steps=100),
        "loop.tokens_per_param": None,
        "loop.steps": 800,
        "loop.log_every": 100,
        "loop.eval_every": 400,
        "loop.eval_examples": 256,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 400,
        "checkpoint.keep": 1,
    }
)
