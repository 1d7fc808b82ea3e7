"""GPT of 2025, small, on two CPU cores: its export opens in transformers.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.
The same size as `demo_gpt`, whose model of 2026 transformers does not have.

Guide: docs/guides/gpt.md. A specialist would use more text, and a larger `model.depth`.

    jaxtrain train demo_gpt_2025
"""

from jaxtrain import config

run = config.named("gpt_h200_1").override(
    {
        "precision": "float32",  # CPUs compute bfloat16 slowly
        "model.vocab_size": 2048,
        "model.sequence_length": 128,
        "model.depth": 4,
        "model.width": 128,
        "model.heads": 4,
        "data.demo": True,
        "data.batch_size": 16,
        "optim.warmup_steps": None,
        "optim.warmup_fraction": 0.05,
        "optim.accumulate": 1,
        "optim.muon.momentum_steps": 100,
        "loop.tokens_per_param": None,
        "loop.steps": 200,
        "loop.log_every": 20,
        "loop.eval_every": 100,
        "loop.eval_examples": 64,
        "loop.hang_timeout_s": 600.0,
        "checkpoint.every": 100,
        "checkpoint.keep": 2,
    }
)
