"""GPT of depth 20, 561M parameters, sequences of 3072, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`.

Guide: docs/guides/gpt.md. A specialist would use as many tokens per step as the rates were tuned
for: `--data.batch_size 168 --optim.accumulate 24`.

    jaxtrain train gpt_32gb_high --data.path TEXT
"""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "model.depth": 20,
        "model.sequence_length": 3072,
        "data.batch_size": 28,  # 86,016 tokens: 7 sequences x 4
        # Ranked by `plan --fit`: 14 x 2 fits only with every layer rematerialized (20% more work).
        "optim.accumulate": 4,
    }
)
