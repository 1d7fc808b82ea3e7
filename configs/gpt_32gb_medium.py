"""GPT of depth 16, 335M parameters, sequences of 2048, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`.

    python -m jaxtrain.main --config gpt_32gb_medium --data.path TEXT
"""

from jaxtrain import config

run = config.named("gpt_32gb_conservative").override(
    {
        "model.depth": 16,
        "model.sequence_length": 2048,
        "data.batch_size": 24,  # 49,152 tokens: 12 sequences x 2
    }
)
