"""GPT of depth 16, 335M parameters, sequences of 2048, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`.

    python -m jaxtrain.main --config gpt_32gb_medium --data.path TEXT
"""

import dataclasses

from jaxtrain import config

base = config.named("gpt_32gb_conservative")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, depth=16, sequence_length=2048),
    data=dataclasses.replace(base.data, batch_size=24),  # 49,152 tokens: 12 sequences x 2
)
