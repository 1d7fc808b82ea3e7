"""GPT of 2025, small, on two CPU cores: its export opens in transformers.

Trains on the documentation of Python's standard library; set `--data.path` to use your own text.
The same as `demo_gpt`, whose model of 2026 transformers does not have, with the optimizer of 2025.

Guide: docs/guides/gpt.md. A specialist would use more text, and a larger `model.depth`.

    jaxtrain train demo_gpt_2025
"""

from jaxtrain import config
from jaxtrain.models import gpt

run = config.named("demo_gpt").override(
    {
        "model": gpt.Config(vocab_size=2048, sequence_length=128, depth=4, width=128, heads=4),
        "optim": config.named("gpt_h200_1").optim,
        "optim.warmup_fraction": 0.05,
        "optim.accumulate": 1,
        "optim.muon.momentum_steps": 100,
    }
)
