"""GPT of depth 16, 335M parameters, sequences of 2048, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`.

Guide: docs/guides/gpt.md. A specialist would use as many tokens per step as the rates were tuned
for: `--data.batch_size 252 --optim.accumulate 21`.

    jaxtrain train gpt_32gb_medium --data.path TEXT
"""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "model.depth": 16,
        "model.sequence_length": 2048,
        "data.batch_size": 24,  # 49,152 tokens: 12 sequences x 2
    }
)
