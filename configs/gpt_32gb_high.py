"""GPT of depth 20, 561M parameters, sequences of 3072, on one GPU of 32 GB.

Otherwise the same as `gpt_32gb_conservative`.

    python -m jaxtrain.main --config gpt_32gb_high --data.path TEXT
"""

import dataclasses

from jaxtrain import config

base = config.named("gpt_32gb_conservative")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, depth=20, sequence_length=3072),
    data=dataclasses.replace(base.data, batch_size=28),  # 86,016 tokens: 7 sequences x 4
    # Ranked by `plan --fit`: 14 x 2 fits only with every layer rematerialized, a fifth more work.
    optim=dataclasses.replace(base.optim, accumulate=4),
)
