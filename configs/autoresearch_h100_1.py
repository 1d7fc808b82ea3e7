"""GPT of autoresearch's shape: depth 8, 50.3M parameters, 2^19 tokens per step, on one H100.

Trains as many steps as autoresearch's baseline in its five minutes: 499.6 million tokens.

Guide: docs/guides/gpt.md. Sizes, rates, and schedule are those of autoresearch's baseline
(https://github.com/karpathy/autoresearch), which processes 1.665 million tokens per second.
Otherwise the model is that of `gpt_2026_h100_1`: its short windows are a quarter of the sequence,
there a half. A specialist would start from nanochat's newer rates, as in `gpt_2026_h100_1`.

    jaxtrain train autoresearch_h100_1 --data.path TEXT
"""

from jaxtrain import config
from jaxtrain.models import gpt

run = config.named("gpt_2026_h100_1").override(
    {
        "model": gpt.Config.of_2026(
            vocab_size=8192,
            sequence_length=2048,
            depth=8,
            rotary_base=10_000.0,
            qk_scale=1.0,
            smear=False,
            backout=False,
        ),
        "data.batch_size": 256,
        "optim.accumulate": 2,  # microbatches of 128 sequences, as there
        "optim.warmup_steps": 0,
        "optim.warmdown_fraction": 0.5,
        "optim.warmdown_to": 0.0,
        "optim.weight_decay": 0.2,
        "optim.muon.peak_lr": 0.04,
        "optim.muon.embedding_lr": 0.6,
        "optim.muon.unembedding_lr": 0.004,
        "optim.muon.scalar_lr": 0.5,
        "loop.steps": 953,
    }
)
