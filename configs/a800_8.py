"""Video autoencoder, 12x480x720, a short run on one node of 8 A800.

Differs from `h100_8` in smaller microbatches, a weaker reconstruction loss, and 2000 steps.

    python -m jaxtrain.main --config a800_8 --data.path CLIPS
"""

import dataclasses

from jaxtrain import config

base = config.named("h100_8")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, reconstruction_weight=10.0),
    optim=dataclasses.replace(base.optim, accumulate=8, warmup_steps=200),  # 2 clips x 8 x 8 = 128
    loop=dataclasses.replace(base.loop, steps=2000, early_stop_patience=10),
    checkpoint=dataclasses.replace(base.checkpoint, every=1000, keep=5),
)
